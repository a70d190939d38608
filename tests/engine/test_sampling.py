"""Sampling defaults: options over the file's keys over fixed values; a request's own over all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from apu_engine.config import EngineConfig
from apu_engine.engine.job import SamplingParams
from apu_engine.engine.sampling import sampling_defaults, with_overrides
from apu_engine.errors import ConfigError
from apu_engine.weights.model_file import ModelFile


def model(**keys: Any) -> ModelFile:
    metadata = {f"general.sampling.{key}": value for key, value in keys.items()}
    return ModelFile(Path("m.gguf"), (Path("m.gguf"),), (0,), 3, 32, metadata, {})


def test_fixed_values() -> None:
    assert sampling_defaults(EngineConfig(), model()) == SamplingParams()


def test_the_files_keys_and_options_over_them() -> None:
    file = model(temp=0.6, top_k=20, top_p=0.9, min_p=0.0, penalty_repeat=1.1, penalty_last_n=128)
    params = sampling_defaults(EngineConfig(top_k=7, seed=3, presence_penalty=0.5), file)
    assert params == SamplingParams(0.6, 7, 0.9, 0.0, 1.1, 128, 0.0, 0.5, 3)


def test_impossible_keys_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        params = sampling_defaults(EngineConfig(), model(temp="hot", top_p=1.5, top_k=-4))
    assert params == SamplingParams()
    assert "general.sampling.top_p: expected a number from 0 to 1, found 1.5" in caplog.text


def test_a_requests_own() -> None:
    params = with_overrides(
        SamplingParams(temperature=1), top_k=3, temperature=None, logit_bias={"5": 1}, logprobs=True, top_logprobs=2
    )
    assert (params.temperature, params.top_k, params.logit_bias) == (1, 3, {5: 1.0})
    assert params.logprobs and params.top_logprobs == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -1}, "temperature: expected a number from 0 to 100, found -1"),
        ({"top_kk": 1}, "top_kk: is no sampling parameter; there are temperature"),
        ({"top_logprobs": 99}, "top_logprobs: expected an integer from 0 to 20"),
    ],
)
def test_a_requests_mistakes(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_overrides(SamplingParams(), **given)
