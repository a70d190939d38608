"""Turns a tensor's place in a file into device addresses.

Who made the files readable by the device (memory/strategies.py) knows runs of file bytes and the device address of
each; a tensor that crosses runs gets one segment per run, cut between rows. Without a device (to list a plan, or to
estimate) the file offset stands in for the address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from apu_engine.errors import ModelError
from apu_engine.plan.spec import Scales, Segment
from apu_engine.weights.model_file import Extent, TensorRef


class Binder(Protocol):
    """Knows where tensors are."""

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]: ...


class OfflineBinder:
    """File offsets instead of addresses: enough to build, check and list a plan, not to run it.

    `used` are the tensors that were asked for.
    """

    def __init__(self) -> None:
        self.used: dict[str, TensorRef] = {}

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        self.used[ref.name] = ref
        if ref.made is not None:
            return (Segment(1, 0, ref.rows, ref.row_bytes, 0),)
        segments: list[Segment] = []
        row = 0
        for extent in ref.extents:
            segments.append(Segment(extent.offset, row, extent.rows, extent.stride, 0))
            row += extent.rows
        return tuple(segments)


def segments_in(ref: TensorRef, runs: Callable[[Extent], Iterable[tuple[int, int, int]]]) -> tuple[Segment, ...]:
    """Segments of a tensor in the `runs` (file offset, device address, bytes) of its extents' files, in file order.

    Raises ModelError when a row crosses from one run to another, which no kernel can read, or is in none.
    """
    segments: list[Segment] = []
    row = 0
    for extent in ref.extents:
        first, rows = row, row + extent.rows
        for begin, address, nbytes in runs(extent):
            at, end = extent.offset + (row - first) * extent.stride, begin + nbytes
            if row == rows or not begin <= at < end:
                continue
            if end - at < ref.row_bytes:
                break
            count = min(rows - row, (end - at - ref.row_bytes) // extent.stride + 1)
            after = end - at - (count - 1) * extent.stride - ref.row_bytes
            segments.append(Segment(address + at - begin, row, count, extent.stride, after))
            row += count
        if row != rows:
            raise ModelError(
                f"tensor {ref.name}: row {row} of {ref.rows} crosses the end of what the device was given; "
                "try another memory strategy",
                (ref.name,),
            )
    return tuple(segments)


def scales_of(ref: TensorRef, binder: Binder) -> Scales | None:
    """The scale plane of a tensor: the segments of its scales in the tensor's own rows, none across two matrices of a
    stack whose last blocks are cut.
    """
    if ref.scales is None:
        return None
    scales, height, width = ref.scales
    rows = ref.shape[-2]
    blocks = -(-rows // height)  # of one matrix
    segments: list[Segment] = []
    for s in binder.segments(scales):
        at, end = s.row_begin, s.row_begin + s.row_count
        while at < end:
            matrix, block = divmod(at, blocks)
            count, begin = end - at, matrix * rows + block * height
            after = begin + count * height
            if rows % height:
                count = min(count, blocks - block)
                after = matrix * rows + min(rows, (block + count) * height)
            address = s.address + (at - s.row_begin) * s.row_stride
            segments.append(Segment(address, begin, after - begin, s.row_stride, 0))
            at += count
    return Scales(scales.dtype, height, width, scales.row_bytes, tuple(segments))


def scale_rows(scales: Scales | None, ranges: Sequence[tuple[int, int]]) -> Scales | None:
    """The scales of rows (first, count) of a weight, one range after the other: cut where a range begins within a
    block, since a segment begins with one.
    """
    if scales is None:
        return None
    out: list[Segment] = []
    row = 0
    for first, count in ranges:
        for s in scales.segments:
            at, end = max(first, s.row_begin), min(first + count, s.row_begin + s.row_count)
            while at < end:
                block, within = divmod(at - s.row_begin, scales.block_rows)
                part = min(end - at, scales.block_rows - within) if within else end - at
                out.append(Segment(s.address + block * s.row_stride, row, part, s.row_stride, 0))
                at, row = at + part, row + part
    return scales._replace(segments=tuple(out))
