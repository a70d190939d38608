"""Hugging Face models by config.json's `model_type`. A new one is an entry in one of these modules, or a module."""

from __future__ import annotations

from apu_engine.weights.families import deepseek, gemma, glm, gpt_oss, llama, qwen
from apu_engine.weights.families.family import Family, Parts, Rewritten, Rule
from apu_engine.weights.families.hyper import Hyper

FAMILIES: dict[str, Family] = {
    name: family for module in (llama, qwen, gemma, deepseek, glm, gpt_oss) for name, family in module.FAMILIES.items()
}

__all__ = ["FAMILIES", "Family", "Hyper", "Parts", "Rewritten", "Rule"]
