"""Endless random valid blocks of every GGUF weight type, at memory speed and the same on every machine.

Two pools of a few MiB are drawn once per type: `base` holds whole blocks, `mask` random bits where any bit is valid and
zeros elsewhere (scales). Block i of the stream is base[i mod n] xor mask[i mod (n - 1)]: the lengths have no common
divisor, so no two rows or pages of a file are alike, and the scales stay what they were drawn to be. Bits come from
PCG64's raw stream, which numpy keeps stable; all arithmetic on them is exact or rounded as IEEE 754 says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apu_engine.weights.ggml_types import GGML_TYPES

Bytes = NDArray[np.uint8]
Blocks = NDArray[np.uint8]  # (n, bytes of a block)

POOL_BYTES = 2 << 20
CHUNK_BYTES = 1 << 20
_SPREAD = math.sqrt(13 / 12)  # root mean square of a factor that is uniform in 0.5 to 1.5


def random_bytes(count: int, *key: int) -> Bytes:
    """`count` bytes that depend on `key` alone."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.uint8)[:count]


@dataclass(frozen=True)
class Layout:
    """How random bits become valid blocks of one type.

    `rms`: root mean square of the values of random bits where the scale is 1. `scales`: (byte, factor) of the F16
    fields, all `factor` times one random scale. `locked`: other bytes that the mask leaves alone. `signed`: the scale
    may have either sign. `finish(blocks, scale)` sets what is left, `scale` being what `rms` is multiplied with.
    """

    rms: float
    scales: tuple[tuple[int, float], ...] = ()
    locked: tuple[int, int] = (0, 0)
    signed: bool = False
    finish: Callable[[Blocks, float], None] | None = None
    mask: tuple[int, ...] = ()  # of a whole block, instead of what the fields above say


# ---------------------------------------------------------------- fields that not every bit pattern fills


def _paired_2(blocks: Blocks, scale: float) -> None:
    """Q2_K: the minimum's 4 bits equal the scale's, so that values are symmetric as in real weights."""
    blocks[:, :16] = (blocks[:, :16] & 15) * 17


def _paired_6(blocks: Blocks, scale: float) -> None:
    """Q4_K, Q5_K: the same for their 6-bit fields, at bytes 4 to 15."""
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


def _iq1_m(blocks: Blocks, scale: float) -> None:
    """The F16 scale lies in the upper halves of bytes 49, 51, 53 and 55, lowest bits first."""
    half = (_jitter(blocks[:, 48:50].copy()) * np.float32(scale / _SPREAD)).astype("<f2").view("<u2")
    for nibble in range(4):
        field = blocks[:, 49 + 2 * nibble]
        field[:] = (field & 15) | ((half >> (4 * nibble) & 15) << 4).astype(np.uint8)


# A byte of TQ1_0 holds five ternary digits as the upper 8 bits of v * 256 / 243, rounded up; its last four bytes hold
# four. A byte of TQ2_0 holds four of two bits each. Digits are 0, 1, 2 for -1, 0, 1.
_FIVE_TRITS = np.array([(v * 256 + 242) // 243 for v in range(243)], np.uint8)
_FOUR_TRITS = _FIVE_TRITS[::3]
_TRIT_PAIRS = np.array([v // 27 << 6 | v // 9 % 3 << 4 | v // 3 % 3 << 2 | v % 3 for v in range(81)], np.uint8)


def _pick(table: Bytes, blocks: Blocks) -> Bytes:
    picked: Bytes = table[blocks.astype(np.uint16) * len(table) >> 8]
    return picked


def _tq1_0(blocks: Blocks, scale: float) -> None:
    blocks[:, :48] = _pick(_FIVE_TRITS, blocks[:, :48])
    blocks[:, 48:52] = _pick(_FOUR_TRITS, blocks[:, 48:52])


def _tq2_0(blocks: Blocks, scale: float) -> None:
    blocks[:, :64] = _pick(_TRIT_PAIRS, blocks[:, :64])


def _ue4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return 0.5 * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E8M0 = [2.0 ** (code - 128) for code in range(256)]
_UE4M3 = [_ue4m3(code) for code in range(0x7F)]


def _coded(values: Sequence[float], count: int) -> Callable[[Blocks, float], None]:
    """The first `count` bytes are scales from a coarse table: the two nearest, mixed so that the variance is right."""

    def finish(blocks: Blocks, scale: float) -> None:
        code = max(i for i, value in enumerate(values[:-1]) if value <= scale)
        low, high = values[code] ** 2, values[code + 1] ** 2
        share = round(256 * min((scale**2 - low) / (high - low), 1.0))
        blocks[:, :count] = code + (blocks[:, :count] < share)

    return finish


def _float(dtype: str) -> Callable[[Blocks, float], None]:
    """Sums of an element's bytes: a bell of the right width; the mask then fills the mantissa."""

    def finish(blocks: Blocks, scale: float) -> None:
        count = blocks.shape[1]
        deviation = math.sqrt(count * (256**2 - 1) / 12)
        sums = blocks.sum(axis=1, dtype=np.uint16).astype(np.float32) - np.float32(127.5 * count)
        values = sums * np.float32(scale / deviation)
        if dtype == "bf16":
            blocks[:] = values.astype("<f4").view(np.uint8).reshape(-1, 4)[:, 2:]
        else:
            blocks[:] = values.astype(dtype).view(np.uint8).reshape(blocks.shape)

    return finish


# rms of floats: what filling the mantissa adds. Of quants q that are uniform: of q - 8 (sqrt(21.5)), of q - 7.5
# (sqrt(21.25)), and so on; K-quants times the rms of their sub-block scales. Those of the grid types were computed with
# the gguf package's dequantisers, which the tests repeat for every type.
LAYOUTS: dict[str, Layout] = {
    "F32": Layout(1.13, finish=_float("<f4"), mask=(0xFF, 0xFF, 0x7F, 0x80)),
    "F16": Layout(1.13, finish=_float("<f2"), mask=(0xFF, 0x83)),
    "BF16": Layout(1.13, finish=_float("bf16"), mask=(0x7F, 0x80)),
    "Q8_0": Layout(73.9, ((0, 1.0),)),
    "Q4_0": Layout(4.637, ((0, 1.0),), signed=True),
    "Q4_1": Layout(4.610, ((0, 1.0), (2, -7.5))),
    "Q5_0": Layout(9.247, ((0, 1.0),), signed=True),
    "Q5_1": Layout(9.233, ((0, 1.0), (2, -15.5))),
    "Q2_K": Layout(9.843, ((80, 1.0), (82, 1.5)), (0, 16), finish=_paired_2),
    "Q3_K": Layout(43.34, ((108, 1.0),)),
    "Q4_K": Layout(168.3, ((0, 1.0), (2, 7.5)), (4, 16), finish=_paired_6),
    "Q5_K": Layout(337.2, ((0, 1.0), (2, 15.5)), (4, 16), finish=_paired_6),
    "Q6_K": Layout(1365.7, ((208, 1.0),)),
    "IQ1_S": Layout(7.208, ((0, 1.0),)),
    "IQ1_M": Layout(7.208, finish=_iq1_m, mask=(0xFF,) * 48 + (0xFF, 0x0F) * 4),
    "IQ2_XXS": Layout(53.3, ((0, 1.0),)),
    "IQ2_XS": Layout(55.95, ((0, 1.0),)),
    "IQ2_S": Layout(56.45, ((0, 1.0),)),
    "IQ3_XXS": Layout(142.3, ((0, 1.0),)),
    "IQ3_S": Layout(140.2, ((0, 1.0),)),
    "IQ4_NL": Layout(67.4, ((0, 1.0),), signed=True),
    "IQ4_XS": Layout(1245.5, ((0, 1.0),)),
    "TQ1_0": Layout(0.8165, ((52, 1.0),), (0, 52), signed=True, finish=_tq1_0),
    "TQ2_0": Layout(0.8165, ((64, 1.0),), (0, 64), signed=True, finish=_tq2_0),
    "MXFP4": Layout(5.852, locked=(0, 1), finish=_coded(_E8M0, 1)),
    "NVFP4": Layout(5.852, locked=(0, 4), finish=_coded(_UE4M3, 4)),
}
NUMBERS: dict[str, int] = {
    block.name: number for number, block in GGML_TYPES.items() if block.name in LAYOUTS or block.name == "I32"
}


def block_elements(dtype: str) -> int:
    """Values in a block of the type."""
    return GGML_TYPES[NUMBERS[dtype]].elements


def block_bytes(dtype: str) -> int:
    """Bytes of a block of the type."""
    return GGML_TYPES[NUMBERS[dtype]].nbytes


def _jitter(raw: Bytes) -> NDArray[np.float32]:
    """(n, 2) bytes to n factors, uniform in 0.5 to 1.5."""
    factors: NDArray[np.float32] = raw.view("<u2")[:, 0].astype(np.float32) / np.float32(65536) + np.float32(0.5)
    return factors


class BlockStream:
    """The blocks of one type for one seed, in order; each call to `take` continues where the last one ended."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = dtype
        self.nbytes = block_bytes(dtype)
        self.count = POOL_BYTES // self.nbytes
        self._layout = LAYOUTS[dtype]
        self._key = (seed, NUMBERS[dtype])
        self._mask = self._draw_mask()
        self._bases: dict[float, Blocks] = {}
        self._at = 0
        self._out = np.empty((CHUNK_BYTES // self.nbytes, self.nbytes), np.uint8)

    def take(self, blocks: int, deviation: float) -> Iterator[Blocks]:
        """The next `blocks` blocks in chunks, each valid until the next; values have this standard deviation."""
        base = self._bases.get(deviation)
        if base is None:
            base = self._bases[deviation] = self._draw_base(deviation)
        while blocks:
            a, b = self._at % self.count, self._at % (self.count - 1)
            n = min(blocks, self.count - a, self.count - 1 - b, len(self._out))
            yield np.bitwise_xor(base[a : a + n], self._mask[b : b + n], out=self._out[:n])
            self._at += n
            blocks -= n

    def _draw_base(self, deviation: float) -> Blocks:
        layout = self._layout
        blocks = self._raw(self.count, 0)
        scale = deviation / layout.rms
        if layout.scales:
            first = layout.scales[0][0]
            factors = _jitter(blocks[:, first : first + 2].copy()) * np.float32(scale / _SPREAD)
            for at, factor in layout.scales:
                blocks[:, at : at + 2] = (factors * np.float32(factor)).astype("<f2").view(np.uint8).reshape(-1, 2)
        if layout.finish:
            layout.finish(blocks, scale)
        return blocks

    def _draw_mask(self) -> Blocks:
        layout = self._layout
        free = np.full(self.nbytes, 0xFF, np.uint8)
        if layout.mask:
            free[:] = layout.mask
        free[slice(*layout.locked)] = 0
        for at, _ in layout.scales:
            free[at : at + 2] = (0, 0x80 if layout.signed else 0)
        return np.bitwise_and(self._raw(self.count - 1, 1), free)

    def _raw(self, count: int, purpose: int) -> Blocks:
        blocks: Blocks = random_bytes(count * self.nbytes, *self._key, purpose).reshape(count, self.nbytes).copy()
        return blocks
