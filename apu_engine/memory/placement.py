"""Cuts a model's tensor data into parts that a device is given one by one, and finds tensors in them again.

A part is a run of bytes of one file that begins and ends between rows. Runtimes dislike large registrations and large
allocations, so a part has a bound; a tensor that fits under it is never cut, so that most tensors are one segment. In
place a part is made readable as whole pages, which is why kernels may read up to 16 bytes before and behind a row.
Two parts that meet inside a page cannot share it, because a page can be registered once: the second one lies in
another mapping of the file, the next `layer`.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from apu_engine.errors import ModelError
from apu_engine.options import format_size
from apu_engine.plan.spec import Segment
from apu_engine.plan.weights import segments_in
from apu_engine.weights.model_file import Extent, TensorRef

PAGE = mmap.PAGESIZE
REGISTERED_BYTES = 1 << 30  # most of one registration
STAGED_BYTES = 7 << 28  # most of one allocation: 1.75 GiB
GAP = 1 << 20  # unused bytes between tensors that one part may hold
_ALIGNED_ROWS = 4096  # how far back a cut on a page boundary is looked for


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of file `shard`; `layer` says which of the file's mappings holds its pages."""

    shard: int
    begin: int
    end: int
    layer: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def first(self) -> int:
        """File offset of its first page."""
        return self.begin // PAGE * PAGE

    @property
    def last(self) -> int:
        """File offset behind its last page."""
        return -(-self.end // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Placed:
    """A part that the device reads: its first byte is at device address `address`."""

    part: Part
    address: int


def cut(refs: Iterable[TensorRef], limit: int) -> list[Part]:
    """The parts that hold these tensors, in file order; a part's whole pages are at most `limit` bytes.

    Raises ModelError for a tensor whose rows are longer than that.
    """
    room = limit - 2 * PAGE
    spans: list[tuple[int, int, int]] = []
    names = {extent: ref.name for ref in refs for extent in ref.extents}
    ordered = sorted(names, key=lambda extent: (extent.shard, extent.offset))
    for shard, group in groupby(ordered, key=lambda extent: extent.shard):
        begin = end = -1
        for extent in group:
            last = extent.end
            between = extent.offset < end  # its rows lie between those of another tensor
            if begin >= 0 and (between or (last - begin <= room and extent.offset - end <= GAP)):
                end = max(end, last)
            else:
                if begin >= 0:
                    spans.append((shard, begin, end))
                begin, end = extent.offset, last
            while end - begin > room:
                cut_at = begin + _rows(names[extent], extent.stride, begin, room) * extent.stride
                spans.append((shard, begin, cut_at))
                begin = cut_at
        if begin >= 0:
            spans.append((shard, begin, end))
    return list(_layered(spans))


def _rows(name: str, stride: int, begin: int, room: int) -> int:
    """How many rows from `begin` on are cut off: as many as fit, so that the cut is on a page boundary if it can."""
    most = room // stride
    if not most:
        raise ModelError(
            f"tensor {name}: a row has {format_size(stride)}, expected at most {format_size(room)}", (name,)
        )
    for rows in range(most, max(most - _ALIGNED_ROWS, 0), -1):
        if (begin + rows * stride) % PAGE == 0:
            return rows
    return most


def _layered(spans: Sequence[tuple[int, int, int]]) -> Iterator[Part]:
    ends: dict[tuple[int, int], int] = {}  # (shard, layer) -> file offset behind the last page that is taken
    for shard, begin, end in spans:
        layer = 0
        while ends.get((shard, layer), 0) > begin // PAGE * PAGE:
            layer += 1
        part = Part(shard, begin, end, layer)
        ends[shard, layer] = part.last
        yield part


class Places:
    """Parts by file and place. Parts that adjoin in their file and on the device count as one run."""

    def __init__(self, placed: Iterable[Placed]) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}  # shard -> (file offset, device address, bytes)
        for item in sorted(placed, key=lambda item: (item.part.shard, item.part.begin)):
            part, runs = item.part, self._runs.setdefault(item.part.shard, [])
            if runs and runs[-1][0] + runs[-1][2] == part.begin and runs[-1][1] + runs[-1][2] == item.address:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + part.nbytes)
            else:
                runs.append((part.begin, item.address, part.nbytes))

    def runs(self, extent: Extent) -> Iterator[tuple[int, int, int]]:
        """The runs that may hold rows of `extent`, in file order."""
        runs = self._runs.get(extent.shard, [])
        for at in range(max(0, bisect_right(runs, extent.offset, key=lambda run: run[0]) - 1), len(runs)):
            if runs[at][0] >= extent.end:
                break
            yield runs[at]

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        """Where a tensor's rows are on the device. Raises ModelError when a row is not wholly there."""
        return segments_in(ref, self.runs)
