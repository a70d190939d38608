"""Proofs that a device reads the bytes of the file, and that nothing was copied: sums, and what the kernel counts.

The sum is apu_kernel_checksum's, computed here by numpy: an independent second opinion. Anonymous memory is read
from /proc/self: RssAnon costs nothing and says at once that copy-on-write broke, smaps walks the page tables and
says whose pages they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BLOCK = 1 << 18  # words summed at a time
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def checksum(data: NDArray[np.uint8]) -> int:
    """The sum over little-endian words w[i] of 4 bytes, zeros behind the last byte: of (w[i] + 1) * (2 i + 1) * c
    modulo 2^64, with c = 0x9e3779b97f4a7c15.
    """
    whole = data.nbytes // 4 * 4
    total = _words(np.frombuffer(data[:whole], "<u4"), 0)
    if tail := bytes(data[whole:]):
        total += _words(np.frombuffer(tail.ljust(4, b"\0"), "<u4"), whole // 4)
    return total & _MASK


def _words(words: NDArray[Any], first: int) -> int:
    weights = (2 * np.arange(min(_BLOCK, len(words)), dtype=np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
    total = 0
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK].astype(np.uint64) + np.uint64(1)
        total += int(np.dot(block, weights[: len(block)]))
        total += 2 * (first + begin) * _MULTIPLIER * int(block.sum())
    return total & _MASK


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon), from counters."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def anonymous_in(ranges: list[tuple[int, int]]) -> int:
    """Anonymous and swapped bytes of this process's mappings that touch address ranges [begin, end)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        if match := _RANGE.match(line):
            begin, end = int(match[1], 16), int(match[2], 16)
            inside = any(begin < high and low < end for low, high in ranges)
        elif inside and line.startswith(("Anonymous:", "Swap:")):
            total += int(line.split()[1]) * 1024
    return total
