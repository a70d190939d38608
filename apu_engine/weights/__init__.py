"""Model files: strict header readers that turn a file into named tensor references, without touching the weights."""

from __future__ import annotations
