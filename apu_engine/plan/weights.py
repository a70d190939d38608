"""Turns a tensor's place in a file into device addresses.

Each mapped file is made readable by the device once, as a whole; what comes back is a list of chunks whose
device addresses may differ from the host's and need not adjoin. A tensor that crosses chunks gets one segment
per chunk, cut between rows. Without mappings (to list a plan, or to estimate) the file offset stands in for
the address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from apu_engine._native import Chunk, Device, Region
from apu_engine.errors import ModelError
from apu_engine.plan.spec import Segment
from apu_engine.weights.model_file import TensorRef


class MappedFile(Protocol):
    """What a mapping must offer: host address of the file's first byte, and its size."""

    address: int
    nbytes: int


class Binder(Protocol):
    def segments(self, ref: TensorRef) -> tuple[Segment, ...]: ...


def _rows(ref: TensorRef) -> int:
    return ref.nbytes // ref.row_bytes


class OfflineBinder:
    """File offsets instead of addresses: enough to build, check and list a plan, not to run it."""

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        return (Segment(ref.offset, 0, _rows(ref), ref.row_bytes, 0),)


class DeviceBinder:
    """Registers mapped files with a device and finds tensors in them.

    Free it after the plan, before the mappings.
    """

    def __init__(self, device: Device, mappings: Sequence[MappedFile], strategy: str = "auto") -> None:
        self._regions: list[Region] = []
        self._files: list[tuple[int, list[Chunk]]] = []
        try:
            for mapping in mappings:
                region = Region.register(device, mapping.address, mapping.nbytes, strategy)
                self._regions.append(region)
                self._files.append((mapping.address, _joined(region.chunks())))
        except BaseException:
            self.free()
            raise

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        base, chunks = self._files[ref.shard]
        return tuple(split(ref, base, chunks))

    @property
    def staged_bytes(self) -> int:
        """Bytes that the device holds as a copy, rather than reading them where they are mapped."""
        return sum(c.nbytes for _, chunks in self._files for c in chunks if c.device != c.host)

    def free(self) -> None:
        for region in self._regions:
            region.free()
        self._regions.clear()


def _joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks that adjoin on the device too are one."""
    out: list[Chunk] = []
    for chunk in chunks:
        last = out[-1] if out else None
        if last and last.host + last.nbytes == chunk.host and last.device + last.nbytes == chunk.device:
            out[-1] = Chunk(last.host, last.device, last.nbytes + chunk.nbytes)
        else:
            out.append(chunk)
    return out


def split(ref: TensorRef, base: int, chunks: Sequence[Chunk]) -> list[Segment]:
    """Segments of a tensor in a file whose first byte is at host address `base`.

    Raises ModelError when a row crosses from one chunk to another, which no kernel can read.
    """
    segments: list[Segment] = []
    row, rows = 0, _rows(ref)
    for chunk in chunks:
        at = base + ref.offset + row * ref.row_bytes
        end = chunk.host + chunk.nbytes
        if row == rows or not chunk.host <= at < end:
            continue
        count = min(rows - row, (end - at) // ref.row_bytes)
        if not count:
            break
        after = end - at - count * ref.row_bytes
        segments.append(Segment(chunk.device + at - chunk.host, row, count, ref.row_bytes, after))
        row += count
    if row != rows:
        raise ModelError(
            f"tensor {ref.name}: row {row} of {rows} crosses the end of a registered chunk; "
            "try another memory strategy",
            (ref.name,),
        )
    return segments
