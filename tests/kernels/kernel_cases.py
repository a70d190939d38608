"""Weights of every type, kernels at one instruction-set level, and memory with a forbidden page behind it.

Weights are random valid blocks: any bit pattern of the integers, scales of ordinary size. They reach values that
quantisers avoid (-128 in Q8_0) and cover the types that the gguf package cannot quantise. Truth is always the gguf
package's dequantiser, in float64.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q

from apu_engine import _native
from apu_engine._native import Device, check, ffi, lib

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT_TYPES = (Q.F32, Q.F16, Q.BF16)
BLOCK_TYPES = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
SUPERBLOCK_TYPES = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)
CODE_TYPES = (
    Q.IQ1_S, Q.IQ1_M, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S,
    Q.IQ4_NL, Q.IQ4_XS, Q.TQ1_0, Q.TQ2_0, Q.MXFP4, Q.NVFP4,
)  # fmt: skip
QUANTIZED_TYPES = BLOCK_TYPES + SUPERBLOCK_TYPES + CODE_TYPES
DEFAULT, EXACT, FINE = lib.APU_PRECISION_DEFAULT, lib.APU_PRECISION_EXACT, lib.APU_PRECISION_FINE
LEVELS = tuple(level for level in _native.ISA if level != "auto")

# Byte offsets of the F16 fields in a block.
F16_FIELDS = {
    Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q8_0: (0,),
    Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,),
    Q.IQ1_S: (0,), Q.IQ1_M: (), Q.IQ2_XXS: (0,), Q.IQ2_XS: (0,), Q.IQ2_S: (0,), Q.IQ3_XXS: (0,), Q.IQ3_S: (0,),
    Q.IQ4_NL: (0,), Q.IQ4_XS: (0,), Q.TQ1_0: (52,), Q.TQ2_0: (64,),
}  # fmt: skip


def sizes(dtype: Q) -> tuple[int, ...]:
    """Row lengths to test: full groups of eight blocks, and every kind of rest the type allows."""
    if dtype in FLOAT_TYPES:
        return (1, 5, 16, 31, 96, 288, 577, 1536)
    elements = gguf.GGML_QUANT_SIZES[dtype][0]
    if elements == 32:
        return (32, 64, 96, 224, 256, 288, 576, 1536)
    if elements == 64:
        return (64, 128, 192, 256, 320, 576, 1536)
    return (256, 512, 768, 1536)


def random_weights(dtype: Q, n: int, k: int, seed: int = 0) -> Bytes:
    """(n, bytes of a row) random valid blocks."""
    rng = np.random.default_rng((int(dtype), n, k, seed))
    if dtype in FLOAT_TYPES:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if dtype is Q.F32:
            return values.view(np.uint8)
        if dtype is Q.F16:
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elements, size = gguf.GGML_QUANT_SIZES[dtype]
    blocks = rng.integers(0, 256, (n * k // elements, size), dtype=np.uint8)
    _set_scales(dtype, blocks, rng)
    return blocks.reshape(n, -1)


def _set_scales(dtype: Q, blocks: Bytes, rng: np.random.Generator) -> None:
    """Blocks' float scales to ordinary sizes of any sign."""
    if dtype is Q.MXFP4:  # a power of two, a few of them denormal
        blocks[:, 0] = rng.choice((0, 1, *range(116, 126)), len(blocks), p=(0.02, 0.02, *[0.096] * 10))
        return
    if dtype is Q.NVFP4:  # E4M3: any, the low ones denormal
        blocks[:, :4] = rng.integers(0, 128, (len(blocks), 4))
        return
    for offset in F16_FIELDS[dtype]:
        blocks[:, offset : offset + 2] = _random_f16(rng, len(blocks))
    if dtype is Q.IQ1_M:  # nibbles of the scale are the top ones of four 16-bit words
        scale = _random_f16(rng, len(blocks)).view(np.uint16)[:, 0]
        for i in range(4):
            nibble = (scale >> 4 * i & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | nibble << 4


def _random_f16(rng: np.random.Generator, count: int) -> Bytes:
    scale = rng.uniform(0.001, 0.02, count) * rng.choice((-1, 1), count)
    return scale.astype(np.float16).view(np.uint8).reshape(-1, 2)


def filled_weights(dtype: Q, n: int, k: int, fill: int) -> Bytes:
    """(n, bytes of a row) blocks with every byte `fill` but those of the float scales."""
    elements, size = gguf.GGML_QUANT_SIZES[dtype]
    blocks = np.full((n * k // elements, size), fill, np.uint8)
    _set_scales(dtype, blocks, np.random.default_rng(fill))
    return blocks.reshape(n, -1)


def truth(dtype: Q, weights: Bytes) -> Floats:
    """(n, k) as the gguf package dequantises it."""
    if dtype is Q.F32:
        return weights.view(np.float32)
    if dtype is Q.F16:
        return weights.view(np.float16).astype(np.float32)
    return gguf.dequantize(weights, dtype)


def random_activations(rows: int, k: int, seed: int = 0) -> Floats:
    """(rows, k) normal values with outliers, a zero block, a tiny one, and one whose halves are a million apart."""
    rng = np.random.default_rng((rows, k, seed))
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[rng.random((rows, k)) < 0.01] *= 50
    x[rows // 2, : min(32, k)] = 0
    x[rows // 3, : min(32, k)] *= 1e-20
    x[rows // 4, : min(16, k)] *= 1e6
    return x


def bits(a: Floats) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(a).view(np.uint32)


@dataclass
class Level:
    name: str
    device: Device

    def matmul(self, dtype: Q, w: Bytes, x: Floats, precision: int = DEFAULT) -> Floats:
        """x (T, K) times w (N, K) transposed."""
        n, stride = w.shape
        y = np.full((len(x), n), np.nan, np.float32)
        self.matmul_at(dtype, w.ctypes.data, stride, x.ctypes.data, y.ctypes.data, *x.shape, n, precision)
        return y

    def matmul_at(
        self, dtype: Q, w: int, stride: int, x: int, y: int, rows: int, k: int, n: int, precision: int = DEFAULT
    ) -> None:
        """The same on raw addresses."""
        x_ptr, y_ptr = ffi.cast("float *", x), ffi.cast("float *", y)
        w_ptr = ffi.cast("void *", w)
        check(lib.apu_kernel_matmul(self.device.handle, int(dtype), precision, w_ptr, stride, x_ptr, y_ptr, rows, n, k))


class GuardedBuffer:
    """Memory whose last byte is followed by a page that must not be touched."""

    def __init__(self, nbytes: int) -> None:
        self._usable = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._usable + mmap.PAGESIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._protect(0)
        self.address = self._start + self._usable - nbytes
        self.array = np.frombuffer(self._map, np.uint8, nbytes, self._usable - nbytes)

    def _protect(self, flags: int) -> None:
        guard = ctypes.c_void_p(self._start + self._usable)
        if self._libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), flags) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
