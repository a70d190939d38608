"""Turns a tensor's place in a file into device addresses.

Who made the files readable by the device (memory/strategies.py) knows runs of file bytes and the device address of
each; a tensor that crosses runs gets one segment per run, cut between rows. Without a device (to list a plan, or to
estimate) the file offset stands in for the address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from apu_engine.errors import ModelError
from apu_engine.plan.spec import Segment
from apu_engine.weights.model_file import TensorRef


class Binder(Protocol):
    """Knows where tensors are."""

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]: ...


def _rows(ref: TensorRef) -> int:
    return ref.nbytes // ref.row_bytes


class OfflineBinder:
    """File offsets instead of addresses: enough to build, check and list a plan, not to run it.

    `used` are the tensors that were asked for.
    """

    def __init__(self) -> None:
        self.used: dict[str, TensorRef] = {}

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        self.used[ref.name] = ref
        return (Segment(ref.offset, 0, _rows(ref), ref.row_bytes, 0),)


def segments_in(ref: TensorRef, runs: Iterable[tuple[int, int, int]]) -> tuple[Segment, ...]:
    """Segments of a tensor in runs (file offset, device address, bytes) of its file, in file order.

    Raises ModelError when a row crosses from one run to another, which no kernel can read, or is in none.
    """
    segments: list[Segment] = []
    row, rows = 0, _rows(ref)
    for begin, address, nbytes in runs:
        at, end = ref.offset + row * ref.row_bytes, begin + nbytes
        if row == rows or not begin <= at < end:
            continue
        count = min(rows - row, (end - at) // ref.row_bytes)
        if not count:
            break
        after = end - at - count * ref.row_bytes
        segments.append(Segment(address + at - begin, row, count, ref.row_bytes, after))
        row += count
    if row != rows:
        raise ModelError(
            f"tensor {ref.name}: row {row} of {rows} crosses the end of what the device was given; "
            "try another memory strategy",
            (ref.name,),
        )
    return tuple(segments)
