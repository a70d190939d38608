"""`python -m apu_engine` is the `apu-engine` command."""

from __future__ import annotations

from apu_engine.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
