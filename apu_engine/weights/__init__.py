"""Model files: strict header readers turn a file into named tensor references; the weights stay untouched."""

from __future__ import annotations
