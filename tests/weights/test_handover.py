"""Tensors for other libraries: types and shapes, no copy, names, lifetimes."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save, tiny
from safetensors.torch import load_file, save_file

from apu_engine import LLM
from apu_engine.errors import MappingError, ModelError
from apu_engine.memory.verify import anonymous_in
from models import TinyModel, tiny_gemma3_gguf, tiny_llama_gguf


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", ctx=64, **options)


def tensor(weight: Any) -> torch.Tensor:
    with pytest.warns(UserWarning, match="read-only"):
        out: torch.Tensor = weight.torch()
    return out


def test_arrays_are_the_file(tiny_llama: TinyModel) -> None:
    with opened(tiny_llama.path) as llm:
        weights = llm.weights
        assert set(weights) == set(tiny_llama.tensors) and len(weights) == len(tiny_llama.tensors)
        for name, expected in tiny_llama.tensors.items():
            weight = weights[name]
            assert (weight.dtype, weight.shape, weight.nbytes) == ("F32", expected.shape, expected.nbytes)
            view = weight.numpy()
            assert view.dtype == np.float32 and np.array_equal(view, expected)
            assert not view.flags.writeable and not view.flags.owndata
            ref, mapping = llm.runtime.model.tensors[name], llm.runtime.mappings[0]
            assert view.ctypes.data == mapping.address + ref.offset  # what the engine reads
            assert llm.runtime.weights.segments(ref)[0].address == view.ctypes.data
            assert np.asarray(weight).ctypes.data == view.ctypes.data
            assert [piece.ctypes.data for piece in weight.pieces] == [view.ctypes.data]
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
            del view


def test_types_without_numpy_are_blocks(tmp_path: Path) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", D=256, F=256, d=64, quant="Q8_0")
    with opened(tiny.path) as llm:
        weight = llm.weights["blk.0.ffn_up.weight"]
        assert (weight.dtype, weight.shape, weight.stored) == ("Q8_0", (256, 256), (256, 8, 34))
        view = weight.numpy()
        ref = llm.runtime.model.tensors["blk.0.ffn_up.weight"]
        assert view.dtype == np.uint8 and view.shape == weight.stored and not view.flags.writeable
        assert view.tobytes() == tiny.path.read_bytes()[ref.offset : ref.offset + ref.nbytes]
        assert np.array_equal(tensor(weight).numpy(), view)
        assert repr(weight) == "Weight(blk.0.ffn_up.weight, Q8_0, [256, 256])"


def test_nothing_is_copied(tmp_path: Path) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", D=256, F=1024, d=64, layers=8)
    with opened(tiny.path) as llm:
        before = llm.footprint()
        views = [weight.numpy() for weight in llm.weights.values()]
        tensors = [tensor(weight) for weight in llm.weights.values()]
        assert sum(float(view.sum()) for view in views) == pytest.approx(sum(float(t.sum()) for t in tensors), abs=1e-2)
        ranges = [(view.ctypes.data, view.ctypes.data + view.nbytes) for view in views]
        assert anonymous_in(ranges) == 0
        after = llm.footprint()
        assert [file.mapped for file in after.files] == [file.mapped for file in before.files]
        assert [t.data_ptr() for t in tensors] == [view.ctypes.data for view in views]
        assert sum(view.nbytes for view in views) > 20 << 20


def test_torch_tensors(tmp_path: Path) -> None:
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        model = tiny("llama")
        save(model, tmp_path / name, dtype)
        with opened(tmp_path / name) as llm:
            weight = llm.weights["blk.1.ffn_down.weight"]
            assert weight.dtype == name
            out = tensor(weight)
            expected = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
            assert out.dtype == dtype and torch.equal(out, expected)
            assert out.data_ptr() == weight.numpy().ctypes.data
            assert torch.equal(torch.from_dlpack(weight), expected)
            if dtype == torch.bfloat16:
                assert weight.numpy().shape == (64, 96, 2)
            del out


def test_folders_have_the_files_names_too(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    save(model, tmp_path / "whole")
    save(model, tmp_path / "shards")
    state = load_file(tmp_path / "whole" / "model.safetensors")
    move_expert(tmp_path / "shards", state, 3)
    stack = torch.stack([state[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)]).numpy()
    for folder in ("whole", "shards"):
        with opened(tmp_path / folder) as llm:
            for name, value in state.items():
                assert name in llm.weights and name not in list(llm.weights)
                assert torch.equal(tensor(llm.weights[name]), value)
            weight = llm.weights["blk.1.ffn_up_exps.weight"]
            assert (weight.dtype, weight.shape) == ("F32", stack.shape)
            assert np.array_equal(np.concatenate(weight.pieces).reshape(stack.shape), stack)
            if folder == "whole":  # one distance between experts
                assert np.array_equal(weight.numpy(), stack) and not weight.numpy().flags.c_contiguous
                assert np.array_equal(tensor(weight).numpy(), stack)
            else:
                with pytest.raises(ModelError, match=r"blk.1.ffn_up_exps.weight lies in 8 places.*pieces"):
                    weight.numpy()


def move_expert(folder: Path, state: dict[str, torch.Tensor], expert: int) -> None:
    """Puts the tensors of one expert into a shard of their own."""
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, value in state.items():
        shards["b.safetensors" if f".experts.{expert}." in name else "a.safetensors"][name] = value
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_tensor_that_is_made_is_the_engines(tmp_path: Path) -> None:
    model = tiny("gemma3")
    save(model, tmp_path)
    with opened(tmp_path) as llm:
        weight = llm.weights["blk.0.attn_norm.weight"]
        theirs = model.state_dict()["model.layers.0.input_layernorm.weight"].numpy()
        view = weight.numpy()
        assert np.array_equal(view, theirs + 1) and not view.flags.writeable
        assert view.ctypes.data == llm.runtime.weights.segments(llm.runtime.model.tensors[weight.name])[0].address
        assert np.array_equal(llm.weights["model.layers.0.input_layernorm.weight"].numpy(), theirs)
    assert np.array_equal(view, theirs + 1)


def test_odd_addresses(tmp_path: Path) -> None:
    model = tiny("llama")
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {"extra": torch.zeros(3, dtype=torch.uint8)}
    save_file(state, file)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    with opened(tmp_path) as llm:
        weight = llm.weights["output_norm.weight"]
        assert weight.numpy().ctypes.data % 4 and np.array_equal(weight.numpy(), state["model.norm.weight"].numpy())
        with pytest.raises(BufferError, match=r"output_norm.weight: 0x\w+ is no multiple of 4 bytes; copy it"):
            weight.torch()
        assert llm.weights["extra"].dtype == "U8" and not llm.weights["extra"].numpy().any()


def test_names(tiny_llama: TinyModel) -> None:
    with opened(tiny_llama.path) as llm:
        with pytest.raises(KeyError, match=r"no tensor 'blk.0.attn_k.wieght'; near it: .*blk.0.attn_k.weight"):
            llm.weights["blk.0.attn_k.wieght"]
        with pytest.raises(KeyError, match=r"no tensor 'blk.77.attn_k.weight'; near it: .*blk.0.attn_k.weight"):
            llm.weights["blk.77.attn_k.weight"]
        with pytest.raises(KeyError, match=r"no tensor 'zzz'\"$"):
            llm.weights["zzz"]
        with pytest.raises(KeyError):
            llm.weights[3]  # type: ignore[index]
        assert llm.weights.get("zzz") is None and "zzz" not in llm.weights and 3 not in llm.weights


def test_refusals(tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_llama.path) as llm:
        weight = llm.weights["output_norm.weight"]
        for thing in (weight, llm.weights):
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(thing)
            with pytest.raises(TypeError, match="pickled"):
                copy.deepcopy(thing)
        with pytest.raises(BufferError, match=r"DLPack 1\.0"):
            weight.__dlpack__()
        with pytest.raises(BufferError, match="in place"):
            weight.__dlpack__(max_version=(1, 0), copy=True)
        with pytest.raises(BufferError, match=r"on DLPack device \(1, 0\), not \(10, 0\)"):
            weight.__dlpack__(max_version=(1, 0), dl_device=(10, 0))
        with pytest.raises(BufferError, match="ROCm"):
            weight.torch("hip")
        with pytest.raises(ValueError, match="device: expected"):
            weight.torch("mps")
        with pytest.raises(ValueError, match="takes a copy"):
            np.array(weight, np.float64, copy=False)
        assert np.array(weight, np.float64).dtype == np.float64
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match=r"apu-engine\[torch\]"):
            weight.torch()


def test_numpy_takes_dlpack_read_only(tiny_llama: TinyModel) -> None:
    with opened(tiny_llama.path) as llm:
        found = np.from_dlpack(llm.weights["output_norm.weight"])
        assert not found.flags.writeable and np.array_equal(found, tiny_llama.tensors["output_norm.weight"])


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_views_outlive_the_engine(tiny_llama: TinyModel) -> None:
    llm = opened(tiny_llama.path)
    weight = llm.weights["output_norm.weight"]
    view, other = weight.numpy(), tensor(llm.weights["blk.0.attn_q.weight"])
    unused = weight.__dlpack__(max_version=(1, 0))
    llm.close()
    llm.close()
    gc.collect()
    assert mapped(tiny_llama.path) and np.array_equal(view, tiny_llama.tensors["output_norm.weight"])
    del view, unused
    assert np.array_equal(other.numpy(), tiny_llama.tensors["blk.0.attn_q.weight"])
    for use in (weight.numpy, weight.torch, lambda: weight.__dlpack__(max_version=(1, 0))):
        with pytest.raises(MappingError, match="the model is closed"):
            use()
    del other
    assert not mapped(tiny_llama.path)
    with opened(tiny_llama.path) as again:  # the range is no longer guarded: it can be again
        assert again.weights["output_norm.weight"].numpy().any()
    assert not mapped(tiny_llama.path)


_AFTER = """
import sys, warnings
import numpy as np
from apu_engine import LLM

warnings.simplefilter("ignore")
path, way = sys.argv[1:]
llm = LLM(path, device="cpu", ctx=64)
weight = llm.weights["token_embd.weight"]
view = {"numpy": weight.numpy, "torch": weight.torch, "dlpack": lambda: np.from_dlpack(weight)}[way]()
del weight
llm.close()
del llm
print(float(view.sum()))
open(path, "r+b").truncate(4096)  # also pages that are gone read as zeros
print(float(view[-1].sum()))
kept = view  # still alive when the interpreter ends
"""


@pytest.mark.parametrize("way", ["numpy", "torch", "dlpack"])
def test_a_process_survives_views_of_a_closed_engine(tmp_path: Path, way: str) -> None:
    path = tiny_llama_gguf(tmp_path / "model.gguf", V=4096).path
    found = subprocess.run([sys.executable, "-c", _AFTER, str(path), way], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    whole, after = map(float, found.stdout.split())
    assert whole != 0 and after == 0


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    path = tiny_gemma3_gguf(tmp_path / "model.gguf").path
    llm = opened(path)
    path.write_bytes(path.read_bytes())
    with pytest.raises(MappingError, match="written to"):
        llm.weights["output_norm.weight"].numpy()
    llm.close()


def test_warns_where_the_caller_is(tiny_llama: TinyModel) -> None:
    with opened(tiny_llama.path) as llm, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        llm.weights["output_norm.weight"].torch("cpu")
        assert [Path(item.filename).name for item in found] == [Path(__file__).name]
