"""The merges of a SentencePiece BPE vocabulary, recovered from its scores.

SentencePiece stores no merges: it joins the adjacent pair whose concatenation is the best-scored piece, until none is
left. That equals BPE over every split (left, right) of every piece into two pieces, ranked by the piece's score. A
262,144-entry vocabulary has 515,000 such splits among 1.2 million places to cut, so the places are looked up by array
arithmetic: prefix hashes of the concatenated pieces give the hash of any substring. A collision of two 64-bit hashes is
caught when the merges meet the vocabulary, and `exact=True` then compares the strings themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Odd, so that it has an inverse modulo 2^64.
_BASE = 0x9E37_79B9_7F4A_7C15
_MIX = np.uint64(0xBF58_476D_1CE4_E5B9)
_TABLE_BITS = 21


def derive_merges(pieces: Sequence[str], products: NDArray[np.int64], exact: bool = False) -> list[tuple[str, str]]:
    """All ways to make `pieces[p]`, p in `products`, of two pieces; in the order of `products`, long left parts first.

    `pieces` are the V strings that may take part; `products` the indices of those that a merge may make, best first.
    """
    if exact:
        known = set(pieces)
        return [
            (piece[:cut], piece[cut:])
            for piece in (pieces[p] for p in products.tolist())
            for cut in range(len(piece) - 1, 0, -1)
            if piece[:cut] in known and piece[cut:] in known
        ]
    left, right = _splits(pieces, products)
    spelled = np.array(pieces, dtype=object)
    return list(zip(spelled[left].tolist(), spelled[right].tolist(), strict=True))


def _splits(pieces: Sequence[str], products: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    chars = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    total = len(chars)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    with np.errstate(over="ignore"):  # all arithmetic is modulo 2^64
        power = _powers(_BASE, total)
        inverse = _powers(pow(_BASE, -1, 1 << 64), total)
        prefix = np.zeros(total + 1, dtype=np.uint64)  # prefix[i] = sum of chars[j] * base^j, j < i
        np.cumsum((chars + np.uint64(1)) * power[:-1], out=prefix[1:])

        def hashes(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.uint64]:
            out: NDArray[np.uint64] = (prefix[end] - prefix[start]) * inverse[start]
            return out

        # Every place to cut a product, products in order, cuts from the right.
        cuts = np.maximum(lengths[products] - 1, 0)
        owner = np.repeat(np.arange(len(products)), cuts)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        end = ends[products][owner]
        place = end - 1 - step
        table = _Table(hashes(starts, ends))
        left, found = table.find(hashes(starts[products][owner], place))
        left, place, end = left[found], place[found], end[found]
        right, found = table.find(hashes(place, end))
        return left[found], right[found]


class _Table:
    """Hash to index: one slot per leading bits, and a sorted list for those that share a slot with another."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self.hashes = hashes
        self.shift = np.uint64(64 - _TABLE_BITS)
        self.slots = np.full(1 << _TABLE_BITS, -1, dtype=np.int32)
        slot = self._slot(hashes)
        self.slots[slot] = np.arange(len(hashes), dtype=np.int32)
        others = np.flatnonzero(self.slots[slot] != np.arange(len(hashes)))
        self.others = others[np.argsort(hashes[others], kind="stable")]
        self.other_hashes = hashes[self.others]

    def find(self, wanted: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each wanted hash an index (any, where there is none), and the places of those that were found."""
        at = self.slots[self._slot(wanted)].astype(np.int64)
        found = self.hashes[at] == wanted
        if len(self.others):
            rest = np.flatnonzero(~found & (at >= 0))
            place = np.searchsorted(self.other_hashes, wanted[rest])
            place[place == len(self.others)] = 0
            match = self.other_hashes[place] == wanted[rest]
            at[rest[match]] = self.others[place[match]]
            found[rest[match]] = True
        return at, np.flatnonzero(found)

    def _slot(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        out: NDArray[np.uint64] = ((hashes ^ (hashes >> np.uint64(29))) * _MIX) >> self.shift
        return out


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    out = np.full(count + 1, base, dtype=np.uint64)
    out[0] = 1
    np.multiply.accumulate(out, out=out)
    return out
