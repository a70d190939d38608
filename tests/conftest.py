"""Fixtures that all tests share: one device for the session, tiny models written once.

Where several processes share the tests (pytest -n), one that is marked `alone` waits until the others have finished a
test, and they wait for it.
"""

from __future__ import annotations

import fcntl
import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from apu_engine._native import Device
from apu_engine.catalog import fetch
from models import TinyModel, tiny_gemma3_gguf, tiny_llama_gguf, tiny_qwen3_gguf

settings.register_profile("apu", deadline=None)  # a machine that stalls for a moment is no failure
settings.load_profile("apu")

BUILD = Path(__file__).resolve().parents[1] / "build"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not hasattr(item.config, "workerinput"):  # the only process
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "turn.lock").open("w") as turn, (BUILD / "tests.lock").open("w") as tests:
        fcntl.flock(turn, fcntl.LOCK_EX)  # whoever waits for the others is next
        fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # children may have the files open still
            fcntl.flock(tests, fcntl.LOCK_UN)
            fcntl.flock(turn, fcntl.LOCK_UN)


def pytest_collection_finish() -> None:
    """What imports and the collection made stays: the collector of garbage need not go through it at every turn."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Children of the tests can be interrupted even where the tests run in a background job, which ignores SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The CPU with two workers."""
    with Device("cpu", threads=2) as cpu:
        yield cpu


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A float32 llama with GQA and a tokenizer."""
    path: Path = tmp_path_factory.mktemp("llama") / "tiny-llama.gguf"
    return tiny_llama_gguf(path)


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A float32 gemma3 whose window is shorter than the tests' sequences, with a tokenizer."""
    path: Path = tmp_path_factory.mktemp("gemma3") / "tiny-gemma3.gguf"
    return tiny_gemma3_gguf(path)


@pytest.fixture(scope="session")
def tiny_qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A float32 qwen3moe that uses 3 of 8 experts, with a tokenizer."""
    path: Path = tmp_path_factory.mktemp("qwen3moe") / "tiny-qwen3moe.gguf"
    return tiny_qwen3_gguf(path, experts=8)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, Q4_1; fetched once into models/."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The real Gemma 3 270M, Q4_K_M; fetched once into models/."""
    return fetch("gemma3-270m")
