"""The model's tensors for other libraries, without a copy: `llm.weights["blk.0.attn_q.weight"].numpy()`.

A view borrows the mapping that the engine reads (or one of its own where a GPU holds a copy), so it is read-only. It
may outlive the engine: the file then stays mapped until the last view is gone, and what a GPU reads in place stays
registered until the last tensor over it is. A page of a file that was truncated reads as zeros.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import ModelError
from apu_engine.weights import dlpack
from apu_engine.weights.ggml_types import TYPES
from apu_engine.weights.model_file import ModelFile, TensorRef

if TYPE_CHECKING:
    import torch

    from apu_engine.engine.load import Runtime
    from apu_engine.memory.strategies import Weights

# Types that numpy has; of others the view is bytes.
_NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
    "C64": "<c8",
}
_CARRIERS = {1: 24, 2: 25, 4: 26, 8: 27}  # bytes of an element -> GGUF's integer type of that size
_READ_ONLY = (
    "the weights are pages of a read-only file, and torch does not support read-only tensors: "
    "writing to this tensor ends the process; clone it before changing it"
)
_NUMBER = re.compile(r"\d+")
_MOST_NAMES = 4096
Run = tuple[int, int, int]  # where the first row is, rows, bytes from one row to the next


class WeightMap(Mapping[str, "Weight"]):
    """All tensors of a model by name, as the engine calls them: GGUF's names. Of a Hugging Face folder the files' own
    names find what is in the files, as it is there; iterating gives the engine's names only.

    KeyError for an unknown name says which ones are near.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._model = runtime.model
        self._weights = runtime.weights
        device = runtime.device
        self._index = device.index if device.props.kind == "hip" else None
        self._own: dict[str, tuple[TensorRef, str, tuple[int, ...]]] | None = None

    def __getitem__(self, name: str) -> Weight:
        if (ref := self._model.tensors.get(name)) is not None:
            return Weight(name, ref.type_name, ref.shape, ref, self._model, self._weights, self._index)
        if (own := self._own_tensors().get(name)) is not None:
            ref, dtype, shape = own
            return Weight(name, dtype, shape, ref, self._model, self._weights, self._index)
        names = [*self._model.tensors, *self._own_tensors()]
        numbers = _NUMBER.findall(str(name))
        same = [other for other in names if _NUMBER.findall(other) == numbers]  # of the same layer and expert: a folder
        near = difflib.get_close_matches(str(name), same or names[:_MOST_NAMES], n=3)  # may have 100,000 names
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise KeyError(f"{self._model.path}: no tensor {name!r:.200}{hint}")

    def __contains__(self, name: object) -> bool:
        return name in self._model.tensors or name in self._own_tensors()

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.tensors)

    def __len__(self) -> int:
        return len(self._model.tensors)

    def __repr__(self) -> str:
        return f"WeightMap({self._model.path}, {len(self):,} tensors)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("weights are views of a mapped file and cannot be pickled; open the model there instead")

    def _own_tensors(self) -> dict[str, tuple[TensorRef, str, tuple[int, ...]]]:
        """Tensors by the names of a folder's files: where they are, type, shape. Headers are read at first use."""
        if self._own is None:
            self._own = {}
            if self._model.path.is_dir() and any(path.suffix == ".safetensors" for path in self._model.files):
                from apu_engine.weights.folder import file_tensors
                from apu_engine.weights.safetensors import DTYPES

                for name, (shard, entry) in file_tensors(self._model.path).items():
                    size, shape = DTYPES[entry.dtype] // 8, entry.shape
                    if not size:  # several elements share bytes
                        size, shape = 1, (entry.nbytes,)
                    ref = TensorRef(name, _CARRIERS[size], shape, shard, entry.offset, entry.nbytes)
                    self._own[name] = ref, entry.dtype, entry.shape
        return self._own


class Weight:
    """One tensor. `dtype` is the type's name as the format has it ("F16", "Q4_K"), `shape` is row-major.

    `numpy()` and `np.asarray` give the array, `torch()` and any consumer of DLPack a tensor, all without a copy.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        ref: TensorRef,
        model: ModelFile,
        weights: Weights,
        index: int | None,
    ) -> None:
        self.name, self.dtype, self.shape, self.nbytes = name, dtype, shape, ref.nbytes
        self._ref, self._model, self._weights, self._index = ref, model, weights, index
        self._format = np.dtype(_NUMPY.get(dtype, "u1"))

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of `numpy()`: `shape`, or where numpy lacks the type (..., blocks of a row, bytes of a block)."""
        if self.dtype in _NUMPY:
            return self.shape
        block = TYPES[self._ref.dtype]
        *outer, last = self._ref.shape or (1,)
        blocks = (*outer, last // block.elements) if self._ref.shape else ()
        return blocks if block.nbytes == 1 else (*blocks, block.nbytes)

    def numpy(self) -> NDArray[Any]:
        """A read-only array over the file's pages; uint8 of shape `stored` for BF16 and quantised types.

        Raises ModelError for a tensor whose rows lie in several places (`pieces` has those) or that no file holds,
        MappingError when the model is closed or its file was changed.
        """
        ref = self._ref
        if ref.made is not None:
            return self._made().view(self._format).reshape(self.stored)
        if not ref.nbytes:
            return _frozen(np.empty(self.stored, self._format))
        strides = self._strides([extent[1:4] for extent in ref.extents])
        if strides is None or len({extent.shard for extent in ref.extents}) > 1:
            raise ModelError(
                f"{self._model.path}: tensor {self.name} lies in {len(ref.extents)} places: its `pieces` are arrays, "
                "or ask for the files' own names",
                (self.name,),
            )
        return self._array(ref.extents[0].shard, ref.offset, self.stored, strides)

    @property
    def pieces(self) -> tuple[NDArray[Any], ...]:
        """Its rows as the files have them, one array (rows, ...) for each run, in order."""
        if self._ref.made is not None or not self.nbytes:
            return (self.numpy(),)
        inner = self._inner
        steps = _contiguous(inner, self._format.itemsize)
        return tuple(
            self._array(extent.shard, extent.offset, (extent.rows, *inner), (extent.stride, *steps))
            for extent in self._ref.extents
        )

    def torch(self, device: str | None = None) -> torch.Tensor:
        """A tensor over the same memory: in a GPU's where the engine runs on one by HIP and torch was built for ROCm,
        else, or with `device` "cpu", in the file's pages. BF16 is bfloat16; quantised types are uint8 (`stored`).

        torch has no read-only tensors, hence the warning. Raises ImportError without torch, what `numpy` raises, and
        BufferError for a tensor at an odd address.
        """
        try:
            import torch
            from torch.utils.dlpack import from_dlpack
        except ImportError:
            raise ImportError("Weight.torch needs PyTorch: pip install 'apu-engine[torch]'", name="torch") from None
        if device not in (None, "cpu", "hip"):
            raise ValueError(f"device: expected None, 'cpu' or 'hip', found {device!r}")
        rocm = torch.version.hip is not None and self._index is not None
        if device == "hip" and not rocm:
            raise BufferError("device: hip needs an engine on a GPU by HIP and torch built for ROCm")
        on_gpu = rocm and device != "cpu"
        out = from_dlpack(self._capsule(self.__dlpack_device__() if on_gpu else (dlpack.CPU, 0), versioned=False))
        warnings.warn(_READ_ONLY, UserWarning, stacklevel=2)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        view = self.numpy()
        if copy is False and dtype is not None and np.dtype(dtype) != view.dtype:
            raise ValueError(f"tensor {self.name} is {view.dtype}: {np.dtype(dtype)} takes a copy")
        return np.array(view, dtype) if copy else np.asarray(view, dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self._index is None else (dlpack.ROCM, self._index)

    def __dlpack__(
        self,
        *,
        stream: Any = None,  # nothing ever writes to weights, so there is nothing to wait for
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The array API's exchange. Raises BufferError where the consumer cannot be told that it is read-only (DLPack
        before 1.0), for `copy`, and for a device that does not hold it.
        """
        if max_version is None or max_version < dlpack.VERSIONED:
            raise BufferError("weights are read-only, which takes DLPack 1.0 to say; Weight.torch() works without")
        if copy:
            raise BufferError("weights are handed over in place; copy the result")
        device = self.__dlpack_device__() if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        return self._capsule(device, versioned=True)

    def __repr__(self) -> str:
        return f"Weight({self.name}, {self.dtype}, {list(self.shape)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a weight is a view of a mapped file and cannot be pickled; pickle a copy: np.array(weight)")

    # ---- helpers

    @property
    def _inner(self) -> tuple[int, ...]:
        """The shape of one row in `stored`."""
        return self.stored[max(len(self._ref.shape) - 1, 0) :]

    def _strides(self, runs: Sequence[Run]) -> tuple[int, ...] | None:
        """Bytes from one element to the next in each dimension of `stored`; None where no such numbers exist."""
        inner = self._inner
        outer = self.stored[: len(self.stored) - len(inner)]
        strides = _row_strides(outer, runs)
        return None if strides is None else (*strides, *_contiguous(inner, self._format.itemsize))

    def _array(self, shard: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
        mapping = self._weights.mapping(self._model.files[shard], self._model.file_sizes[shard])
        mapping.check()
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        data = mapping.array(offset, last + self._format.itemsize)
        view: NDArray[Any] = np.ndarray(shape, self._format, buffer=data, strides=strides)
        return view

    def _made(self) -> NDArray[np.uint8]:
        assert self._ref.made is not None
        data = self._weights.made(self._ref)
        if data is None:
            sources = ", ".join(source.name for source in self._ref.made.sources)
            raise ModelError(
                f"{self._model.path}: tensor {self.name} is in no file: it is made when the model is loaded "
                f"({self._ref.made.why}{' of ' + sources if sources else ''}), and is not in the CPU's memory here",
                (self.name,),
            )
        return data

    def _capsule(self, device: tuple[int, int], versioned: bool) -> Any:
        bfloat16 = self.dtype == "BF16"
        if device == (dlpack.CPU, 0):
            view = self.numpy()
            shape, strides, address = view.shape, view.strides, view.__array_interface__["data"][0]
            owner: object = view
        elif self._index is not None and device == self.__dlpack_device__():
            owner = self._weights.lease()
            segments = self._weights.segments(self._ref)
            found = self._strides([(s.address, s.row_count, s.row_stride) for s in segments])
            if found is None:
                raise BufferError(f"tensor {self.name} lies in {len(segments)} places on the GPU; use device 'cpu'")
            shape, strides, address = self.stored, found, segments[0].address
        else:
            raise BufferError(f"tensor {self.name} is on DLPack device {self.__dlpack_device__()}, not {device}")
        kind = self._format
        if bfloat16:
            kind, shape, strides = np.dtype("<i2"), shape[:-1], strides[:-1]
        try:
            return dlpack.capsule(address, kind, shape, strides, device, owner, bfloat16, versioned)
        except BufferError as error:
            raise BufferError(f"tensor {self.name}: {error}") from None


def _contiguous(shape: tuple[int, ...], step: int) -> tuple[int, ...]:
    return tuple(step * math.prod(shape[at + 1 :]) for at in range(len(shape)))


def _row_strides(outer: tuple[int, ...], runs: Sequence[Run]) -> tuple[int, ...] | None:
    """Strides of rows in `outer` dimensions, of runs that follow each other at one distance."""
    first, rows, stride = runs[0]
    if len(runs) == 1:
        return _contiguous(outer, stride)
    step = runs[1][0] - first
    if step <= 0 or any(run != (first + at * step, rows, stride) for at, run in enumerate(runs)):
        return None
    for split in range(len(outer), -1, -1):  # dimensions from here on are within a run
        if math.prod(outer[split:]) == rows:
            return (*_contiguous(outer[:split], step), *_contiguous(outer[split:], stride))
    return None


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
