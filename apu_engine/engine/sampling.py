"""Which sampling parameters a request gets when it names none: options, then the file's own keys, then fixed
values.

The keys are GGUF's `general.sampling.*`. A key with an impossible value is passed over with a warning: a
model whose author mistyped a default still answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from apu_engine.config import EngineConfig, spec
from apu_engine.engine.job import SamplingParams
from apu_engine.errors import ConfigError
from apu_engine.weights.model_file import ModelFile

log = logging.getLogger("apu_engine.engine")

_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
NAMES = (*_KEYS, "frequency_penalty", "presence_penalty", "seed")


def sampling_defaults(config: EngineConfig, model: ModelFile | None = None) -> SamplingParams:
    """The parameters of a request that names none."""
    chosen: dict[str, Any] = {}
    for name, key in _KEYS.items():
        if model is not None and key in model.metadata:
            value = model.metadata[key]
            try:
                chosen[name] = spec(name).convert(value)
            except (ValueError, TypeError, OverflowError):
                log.warning("%s: %s: expected %s, found %r; ignored", model.path, key, spec(name).expected, value)
    for name in NAMES:
        value = getattr(config, name)
        if value is not None:
            chosen[name] = value
    return SamplingParams(**chosen)


def with_overrides(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """`defaults` with the given values that are not None, each checked like an option of the same name.

    Raises ConfigError for an unknown name or a value out of range.
    """
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in NAMES:
            changes[name] = spec(name).check(value, "argument")
        elif name == "logit_bias":
            changes[name] = _checked_bias(value)
        elif name == "logprobs":
            changes[name] = bool(value)
        elif name == "top_logprobs":
            if not isinstance(value, int) or not 0 <= value <= 20:
                raise ConfigError(f"top_logprobs: expected an integer from 0 to 20, found {value!r}", name)
            changes[name] = value
        else:
            known = ", ".join((*NAMES, "logit_bias", "logprobs", "top_logprobs"))
            raise ConfigError(f"{name}: is no sampling parameter; there are {known}", name)
    return replace(defaults, **changes)


def _checked_bias(value: Any) -> dict[int, float]:
    """A copy of {token id: bias}; a bias is a finite number, or -inf for a token that must not be drawn."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias: expected token ids with numbers, found {str(value)[:80]}", "logit_bias")
    for token, bias in value.items():
        written = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10  # JSON's keys
        if not written and (isinstance(token, bool) or not isinstance(token, (int, np.integer))):
            raise ConfigError(f"logit_bias: expected integers as token ids, found {token!r}", "logit_bias")
        number = isinstance(bias, (int, float, np.number)) and not isinstance(bias, bool)
        if not number or not float(bias) < math.inf:
            raise ConfigError(f"logit_bias: expected a finite number or -inf for {token}, found {bias!r}", "logit_bias")
    return {int(token): float(bias) for token, bias in value.items()}
