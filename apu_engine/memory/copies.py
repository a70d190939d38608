"""Looks for verbatim copies of a model file in another process's anonymous memory.

Counting pages cannot tell a KV cache from a copy of the weights when both have the same size. Contents can: pieces of
the file, taken at even distances, are searched for in every anonymous range. A copy that was repacked on the way is
not found this way; it shows in the anonymous total instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from apu_engine.errors import ApuError
from apu_engine.memory.footprint import Finding, Footprint, Region

SAMPLES = 8
SAMPLE_BYTES = 64
_CHUNK = 8 << 20


def check_copies(process: Footprint, files: Iterable[str | os.PathLike[str]]) -> list[Finding]:
    """One finding per file: whether anonymous memory of `process` (not this one) holds most of the file's samples.

    Raises ApuError when the process's memory may not be read.
    """
    found = []
    for file in files:
        samples = sample(file)
        hits: dict[bytes, Region] = {}
        for region in process.regions:
            missing = [piece for piece in samples if piece not in hits]
            hits.update(dict.fromkeys(_search(process.pid, region, missing), region))
        text = f"{len(hits)} of {len(samples)} samples of {os.fspath(file)} occur in anonymous memory"
        if 2 * len(hits) > len(samples):
            text += f", in {', '.join(sorted({str(region) for region in hits.values()}))}"
            found.append(Finding(False, text))
        else:
            found.append(Finding(True, text))
    return found


def sample(file: str | os.PathLike[str]) -> list[bytes]:
    """Up to SAMPLES pieces of the file, past its header, that do not look like padding or zeros."""
    pieces: list[bytes] = []
    with Path(file).open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        for i in range(SAMPLES):
            stream.seek(size * (2 * i + SAMPLES) // (3 * SAMPLES))
            piece = stream.read(SAMPLE_BYTES)
            if len(piece) == SAMPLE_BYTES and len(set(piece)) > SAMPLE_BYTES // 4:
                pieces.append(piece)
    return pieces


def _search(pid: int, region: Region, pieces: Sequence[bytes]) -> list[bytes]:
    """Which pieces occur in the range. Pages that went away meanwhile are skipped."""
    if not pieces or region.nbytes < SAMPLE_BYTES:
        return []
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ApuError(f"memory of process {pid} may not be read ({error.strerror}); run as root") from None
    found: list[bytes] = []
    try:
        for start in range(region.start, region.end, _CHUNK):
            try:
                chunk = os.pread(memory, min(_CHUNK + SAMPLE_BYTES, region.end - start), start)
            except OSError:
                continue
            found += [piece for piece in pieces if piece not in found and piece in chunk]
    finally:
        os.close(memory)
    return found
