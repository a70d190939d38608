"""Cuts a model's tensor data into parts that a device is given one by one, and finds tensors in them again.

A part is a run of bytes of one file that begins and ends between rows. Runtimes dislike large registrations and large
allocations, so a part has a bound; a tensor that fits under it is never cut, so that most tensors are one segment. In
place a part is made readable as whole pages, which is why kernels may read up to 16 bytes before and behind a row.
Two parts that meet inside a page cannot share it, because a page can be registered once: the second one lies in
another mapping of the file, the next `layer`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from apu_engine.errors import ModelError
from apu_engine.memory.budget import human_bytes
from apu_engine.plan.spec import Segment
from apu_engine.plan.weights import segments_in
from apu_engine.weights.model_file import TensorRef

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
    ordered = sorted(set(refs), key=lambda ref: (ref.shard, ref.offset))
    for shard, group in groupby(ordered, key=lambda ref: ref.shard):
        begin = end = -1
        for ref in group:
            last = ref.offset + ref.nbytes
            if begin >= 0 and last - begin <= room and ref.offset - end <= GAP:
                end = max(end, last)
                continue
            if begin >= 0:
                spans.append((shard, begin, end))
            begin, end = ref.offset, last
            while end - begin > room:
                cut_at = begin + _rows(ref, begin, room) * ref.row_bytes
                spans.append((shard, begin, cut_at))
                begin = cut_at
        if begin >= 0:
            spans.append((shard, begin, end))
    return list(_layered(spans))


def _rows(ref: TensorRef, begin: int, room: int) -> int:
    """How many rows from `begin` on are cut off: as many as fit, so that the cut is on a page boundary if it can."""
    most = room // ref.row_bytes
    if not most:
        raise ModelError(
            f"tensor {ref.name}: a row has {human_bytes(ref.row_bytes)}, expected at most {human_bytes(room)}",
            (ref.name,),
        )
    for rows in range(most, max(most - _ALIGNED_ROWS, 0), -1):
        if (begin + rows * ref.row_bytes) % PAGE == 0:
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


def segments(ref: TensorRef, placed: Sequence[Placed]) -> tuple[Segment, ...]:
    """Where a tensor's rows are on the device. `placed` is in file order; parts that adjoin on both sides count as one.

    Raises ModelError when a row is not wholly there.
    """
    runs: list[tuple[int, int, int]] = []  # file offset, device address, bytes
    for item in placed:
        part = item.part
        if part.shard != ref.shard or part.end <= ref.offset or part.begin >= ref.offset + ref.nbytes:
            continue
        if runs and runs[-1][0] + runs[-1][2] == part.begin and runs[-1][1] + runs[-1][2] == item.address:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + part.nbytes)
        else:
            runs.append((part.begin, item.address, part.nbytes))
    return segments_in(ref, runs)
