"""`python -m apu_engine.cli`."""

import sys

from apu_engine.cli import main

sys.exit(main())
