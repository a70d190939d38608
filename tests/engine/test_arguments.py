"""Arguments of the Python API that are wrong in type or value, and a process that was forked after loading."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apu_engine import LLM, ApuError, ConfigError
from models import TinyModel


@pytest.fixture(scope="module")
def llama(tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, threads=2, ctx=256, batch=32) as llm:
        yield llm


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda llm: llm.generate([1], 2, stop=5), "stop"),
        (lambda llm: llm.chat("a", 2, stop=5), "stop"),
        (lambda llm: llm.generate([1], 2, logit_bias={"a": 1}), "logit_bias"),
        (lambda llm: llm.generate([1], 2, logit_bias=[1]), "logit_bias"),
        (lambda llm: llm.generate([1], 2, logit_bias={1: "x"}), "logit_bias"),
        (lambda llm: llm.generate([1], 2, logit_bias={1: math.nan}), "logit_bias"),
        (lambda llm: llm.generate([1], 2, logit_bias={1: math.inf}), "logit_bias"),
        (lambda llm: llm.generate([1], 2, logit_bias={True: 1}), "logit_bias"),
        (lambda llm: llm.chat(None, 2), "messages"),
        (lambda llm: llm.chat(5, 2), "messages"),
        (lambda llm: llm.detokenize(None), "ids"),
        (lambda llm: llm.detokenize(["a"]), "ids"),
        (lambda llm: llm.detokenize([1.5]), "ids"),
        (lambda llm: llm.tokenize(None), "text"),
        (lambda llm: llm.tokenize(b"x"), "text"),
        (lambda llm: LLM(5), "model"),
    ],
)
def test_wrong_arguments_are_named(llama: LLM, call: Callable[[LLM], Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: expected") as caught:
        call(llama)
    assert caught.value.option == option
    assert len(llama.generate([1], 2, logit_bias={5: -math.inf}, ignore_eos=True).tokens) == 2


def test_a_forked_process_is_told_to_load_again(llama: LLM) -> None:
    llama.generate([1], 1)
    answers, answer = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            llama.generate([1], 1)
        except ApuError as error:
            answer.send(str(error))
        llama.close()  # must neither wait for threads that are not here nor end what belongs to the parent
        os._exit(0)
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the forked process hangs")
    assert "forked" in answers.recv()
    assert len(llama.generate([1], 2, ignore_eos=True).tokens) == 2
