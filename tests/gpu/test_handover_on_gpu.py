"""Tensors handed over where a GPU reads them: DLPack's struct for ROCm, and what stays while a consumer holds it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save, tiny
from hip_double import HipDouble

from apu_engine import LLM
from apu_engine.errors import ModelError
from apu_engine.weights.dlpack import BFLOAT, READ_ONLY, ROCM, DLManagedTensor, DLManagedTensorVersioned, DLTensor
from models import TinyModel, tiny_llama_gguf

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Consumer:
    """What a library does with a capsule: takes it over, reads the struct, calls the deleter once at the end."""

    NAMES = ((b"dltensor_versioned", b"used_dltensor_versioned"), (b"dltensor", b"used_dltensor"))

    def __init__(self, capsule: Any, versioned: bool = True) -> None:
        name, used = self.NAMES[0 if versioned else 1]
        self.address = _api.PyCapsule_GetPointer(capsule, name)
        _api.PyCapsule_SetName(capsule, used)
        kind = DLManagedTensorVersioned if versioned else DLManagedTensor
        self.managed: Any = kind.from_address(self.address)
        self.tensor: DLTensor = self.managed.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[: self.tensor.ndim])

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.tensor.strides[: self.tensor.ndim])

    def drop(self) -> None:
        self.managed.deleter(self.address)


@pytest.fixture
def kernels(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HipDouble]:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    yield hip


def opened(path: Path, memory: str = "registered") -> LLM:
    return LLM(path, device="hip:0", ctx=64, memory=memory)


@pytest.mark.parametrize("memory", ["registered", "staged"])
def test_the_struct(kernels: HipDouble, tiny_llama: TinyModel, memory: str) -> None:
    with opened(tiny_llama.path, memory) as llm:
        for name, expected in tiny_llama.tensors.items():
            weight = llm.weights[name]
            assert weight.__dlpack_device__() == (ROCM, 0)
            segment = llm.runtime.weights.segments(llm.runtime.model.tensors[name])[0]
            found = Consumer(weight.__dlpack__(max_version=(1, 1), stream=0))
            assert (found.managed.major, found.managed.flags & READ_ONLY) == (1, READ_ONLY)
            assert (found.tensor.device_type, found.tensor.device_id) == (ROCM, 0)
            assert found.tensor.data == segment.address and found.tensor.byte_offset == 0
            assert (found.tensor.code, found.tensor.bits, found.tensor.lanes) == (2, 32, 1)
            assert found.shape == expected.shape
            assert found.strides == tuple(stride // 4 for stride in expected.strides)
            data = np.empty_like(expected)  # what the device has there
            llm.runtime.device.copy(data.ctypes.data, found.tensor.data, data.nbytes, to_host=True)
            assert np.array_equal(data, expected)
            found.drop()
            view = weight.numpy()  # the file's pages too
            assert np.array_equal(view, expected) and not view.flags.writeable
            assert np.array_equal(np.from_dlpack(weight, device="cpu"), expected)
            del view


def test_types(kernels: HipDouble, tmp_path: Path) -> None:
    quantised = tiny_llama_gguf(tmp_path / "model.gguf", quant="Q4_0").path
    with opened(quantised) as llm:
        found = Consumer(llm.weights["blk.0.ffn_up.weight"].__dlpack__(max_version=(1, 0)))
        assert (found.tensor.code, found.tensor.bits, found.shape) == (1, 8, (96, 2, 18))
        found.drop()
    save(tiny("qwen3_moe"), tmp_path / "folder", torch.bfloat16)
    with opened(tmp_path / "folder") as llm:
        found = Consumer(llm.weights["blk.0.ffn_up_exps.weight"].__dlpack__(max_version=(1, 0)))
        assert (found.tensor.code, found.tensor.bits, found.shape) == (BFLOAT, 16, (8, 48, 64))
        assert found.strides == (3 * 48 * 64, 64, 1)
        found.drop()
        one = Consumer(llm.weights["model.layers.0.mlp.experts.2.up_proj.weight"].__dlpack__(max_version=(1, 0)))
        assert (one.tensor.code, one.shape) == (BFLOAT, (48, 64))
        one.drop()


def test_the_device_stays_while_a_tensor_lives(kernels: HipDouble, tiny_llama: TinyModel) -> None:
    before = kernels.live()
    llm = opened(tiny_llama.path)
    weight = llm.weights["output_norm.weight"]
    first, second = (Consumer(weight.__dlpack__(max_version=(1, 0))) for _ in range(2))
    weights, device = llm.runtime.weights, llm.runtime.device
    llm.close()
    llm.close()
    assert weights.registered_bytes and device.handle is not None
    data = np.empty(first.shape, np.float32)
    device.copy(data.ctypes.data, first.tensor.data, data.nbytes, to_host=True)
    assert np.array_equal(data, tiny_llama.tensors["output_norm.weight"])
    with pytest.raises(ModelError, match="the model is closed"):
        weight.__dlpack__(max_version=(1, 0))
    first.drop()
    assert device.handle is not None
    second.drop()
    assert device.handle is None and not weights.registered_bytes and kernels.live() == before
    assert str(tiny_llama.path) not in Path("/proc/self/maps").read_text()


def test_a_capsule_that_nobody_takes(kernels: HipDouble, tiny_llama: TinyModel) -> None:
    llm = opened(tiny_llama.path)
    capsule = llm.weights["output_norm.weight"].__dlpack__(max_version=(1, 0))
    device = llm.runtime.device
    llm.close()
    assert device.handle is not None
    del capsule
    assert device.handle is None


def test_torch_takes_the_gpus_where_it_is_built_for_rocm(
    kernels: HipDouble, tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Consumer] = []

    def from_dlpack(capsule: Any) -> Consumer:
        taken.append(Consumer(capsule, versioned=False))
        return taken[-1]

    with opened(tiny_llama.path) as llm:
        weight = llm.weights["output_norm.weight"]
        with pytest.warns(UserWarning, match="read-only"):
            assert weight.torch().data_ptr() == weight.numpy().ctypes.data  # torch without ROCm
        with pytest.raises(BufferError, match="torch built for ROCm"):
            weight.torch("hip")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr("torch.utils.dlpack.from_dlpack", from_dlpack)
        with pytest.warns(UserWarning, match="read-only"):
            weight.torch()
            weight.torch("hip")
            weight.torch("cpu")
        address = llm.runtime.weights.segments(llm.runtime.model.tensors["output_norm.weight"])[0].address
        assert [found.tensor.device_type for found in taken] == [ROCM, ROCM, 1]
        assert [found.tensor.data for found in taken[:2]] == [address, address]
        for found in taken:
            found.drop()


def test_a_tensor_that_is_made(kernels: HipDouble, tmp_path: Path) -> None:
    save(tiny("gemma3"), tmp_path)
    with opened(tmp_path) as llm:
        weight = llm.weights["blk.0.attn_norm.weight"]
        with pytest.raises(ModelError, match=r"is in no file: it is made .*norm \+ 1 of blk.0.attn_norm.weight"):
            weight.numpy()
        found = Consumer(weight.__dlpack__(max_version=(1, 0)))
        assert (found.tensor.device_type, found.shape) == (ROCM, (64,))
        found.drop()
