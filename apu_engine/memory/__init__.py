"""Host memory: read-only file mappings, readahead and locking, what is available, and what /proc says is used."""

from __future__ import annotations
