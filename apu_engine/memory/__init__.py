"""Host memory: read-only file mappings, readahead and locks, what is available, and what /proc shows."""

from __future__ import annotations
