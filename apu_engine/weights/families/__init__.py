"""Hugging Face models by config.json's `model_type`. A new one is an entry in one of these modules, or a module."""

from __future__ import annotations

from apu_engine.weights.families import deepseek, gemma, llama, qwen
from apu_engine.weights.families.family import Family, Parts
from apu_engine.weights.families.hyper import Hyper

FAMILIES: dict[str, Family] = {
    name: family for module in (llama, qwen, gemma, deepseek) for name, family in module.FAMILIES.items()
}

__all__ = ["FAMILIES", "Family", "Hyper", "Parts"]
