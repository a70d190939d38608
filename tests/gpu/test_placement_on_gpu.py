"""Weights on device hip by every strategy: the same tokens, whatever is cut; nothing read beside what was registered;
and a server that hangs ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hip_double import HipDouble, library

from apu_engine import LLM
from apu_engine.memory import strategies
from apu_engine.memory.mapping import cached_bytes
from apu_engine.memory.placement import PAGE
from models import TinyModel, tiny_llama_gguf, write

PROMPT = [1, 5, 9, 13]
EVERY = [("registered", way) for way in ("svm", "advise", "lock", "register")] + [("staged", "auto"), ("auto", "auto")]


@pytest.fixture(autouse=True)
def kernels(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))


@pytest.fixture(scope="module", params=["F32", "Q4_1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Rows of every alignment that the format allows."""
    path: Path = tmp_path_factory.mktemp("placed") / "model.gguf"
    return tiny_llama_gguf(path, quant=request.param, D=96, F=160, V=330)


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[int]:
    return answer(model, device="cpu")


def answer(model: TinyModel, **options: Any) -> list[int]:
    with LLM(str(model.path), ctx=256, **options) as llm:
        return llm.generate(PROMPT, 8, temperature=0, ignore_eos=True).tokens


@pytest.fixture
def small_parts(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is a sixth of the model, so that tensors are cut and neighbours share pages."""
    limit = (model.path.stat().st_size // PAGE // 6 + 2) * PAGE
    monkeypatch.setattr(strategies, "STAGED_BYTES", limit)
    monkeypatch.setattr(strategies, "PIECE", PAGE)
    monkeypatch.setattr(strategies.registered, "__defaults__", (limit,))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("memory", "way"), EVERY)
def test_the_same_tokens(hip: HipDouble, model: TinyModel, expected: list[int], memory: str, way: str) -> None:
    with LLM(str(model.path), ctx=256, device="hip", memory=memory, memory_way=way) as llm:
        assert llm.generate(PROMPT, 8, temperature=0, ignore_eos=True).tokens == expected
        weights = llm.runtime.weights
        assert len(weights.placed) > 5
        if weights.strategy == "registered":
            assert {0, 1} <= {item.part.layer for item in weights.placed}  # of the mappings of the file
            assert hip.live()["registrations"] or hip.live()["range_bytes"] >= weights.nbytes


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(("memory", "way"), EVERY[:4])
def test_nothing_is_read_beside_the_registered_pages(
    model: TinyModel, expected: list[int], memory: str, way: str
) -> None:
    """All other pages of the mappings are taken away: a kernel that read there would fault."""
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with LLM(str(model.path), ctx=256, device="hip", memory=memory, memory_way=way) as llm:
        weights = llm.runtime.weights
        closed = 0
        for layer, mapping in enumerate(weights.mappings):
            ranges = [(item.part.first, item.part.last) for item in weights.placed if item.part.layer == layer]
            size = -(-mapping.nbytes // PAGE) * PAGE
            ends = [0, *(last for _, last in ranges)]
            begins = [*(first for first, _ in ranges), size]
            for begin, end in zip(ends, begins, strict=True):
                if end > begin:
                    assert libc.mprotect(mapping.address + begin, end - begin, 0) == 0
                    closed += end - begin
        assert closed > weights.nbytes // 2
        assert llm.generate(PROMPT, 8, temperature=0, ignore_eos=True).tokens == expected


@pytest.mark.parametrize(("memory", "way"), [("registered", "svm"), ("staged", "auto")])
def test_a_split_model(tmp_path: Path, memory: str, way: str) -> None:
    whole = tiny_llama_gguf(tmp_path / "whole.gguf")
    expected = answer(whole, device="cpu")
    split = write(replace(whole, path=tmp_path / "split.gguf"), shard_tensors=6)
    assert len(list(tmp_path.glob("split-*.gguf"))) > 2
    assert answer(split, device="hip", memory=memory, memory_way=way) == expected


def test_pages_are_dropped_or_stay(model: TinyModel) -> None:
    """One resident copy: the device's, or the page cache's."""
    for memory, cached in (("staged", False), ("registered", True)):
        with LLM(str(model.path), ctx=256, device="hip", memory=memory) as llm:
            fd = os.open(model.path, os.O_RDONLY)
            size = model.path.stat().st_size
            found = cached_bytes(fd, model.path, size)
            os.close(fd)
            assert found == (size if cached else 0)
            assert llm.memory["copied"] == (0 if cached else llm.runtime.weights.nbytes)


def test_the_ready_line_and_what_is_remembered(model: TinyModel) -> None:
    with LLM(str(model.path), ctx=256, device="hip") as llm:
        line = llm.summary()
    assert re.match(
        r"weights [\d.]+ KiB in place \(way A\), copied 0, anonymous 0, 98% of device bandwidth; ctx 256", line
    )
    with LLM(str(model.path), ctx=256, device="hip") as llm:
        assert llm.summary() == line


SERVE = ("serve", "--device", "hip", "--port", "0", "--ctx", "256", "--watchdog", "3", "--memory")


def serve(model: TinyModel, memory: str, faults: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "APU_HIP_LIBRARY": str(library()), "APU_HIP_DOUBLE": faults}
    command = [sys.executable, "-m", "apu_engine", *SERVE, memory, str(model.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_copy_that_hangs_ends_the_server(tiny_llama: TinyModel) -> None:
    process = serve(tiny_llama, "staged", "copy_hang=1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert re.search(r"no progress for 3 s while (staging tiny-llama\.gguf: \d|waiting for the last copies)", err), err


def test_a_probe_that_hangs_is_not_repeated(tiny_llama: TinyModel) -> None:
    """Whoever starts the server again gets the next way, and is told."""
    process = serve(tiny_llama, "auto", "hang=checksum")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "no progress for 3 s while probing way A" in err
    with LLM(str(tiny_llama.path), ctx=256, device="hip") as llm:
        assert llm.runtime.weights.way == "advise"
        (notice,) = (text for text in llm.runtime.notices if "way A" in text)
        assert "way A of reading weights in place is not used: the process did not survive trying it" in notice
        assert "doctor --full` tries again" in notice


def test_a_step_that_hangs_ends_the_server(tiny_llama: TinyModel) -> None:
    import urllib.request

    process = serve(tiny_llama, "registered", "hang=sample_survey")
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        url = re.search(r"; (http://\S+)$", ready.strip())
        assert url, ready
        body = json.dumps({"prompt": "a", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url[1]}/v1/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=60)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75
        assert re.search(r"no progress for 3 s while running a step of \d+ rows for 1 requests", err), err
    finally:
        process.kill()
        process.wait()
