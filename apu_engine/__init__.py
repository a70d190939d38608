"""apu_engine: runs language models whose weights are the mapped file's own pages.

    from apu_engine import LLM

    with LLM("model.gguf") as llm:
        print(llm.chat("Hi").text)

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from apu_engine.config import EngineConfig
    from apu_engine.engine.job import SamplingParams, Timings
    from apu_engine.engine.llm import LLM, Completion, Generation
    from apu_engine.errors import ApuError, BudgetError, ConfigError, FormatError, GpuError, MappingError, ModelError

_HOMES = {
    "LLM": "apu_engine.engine.llm",
    "Completion": "apu_engine.engine.llm",
    "Generation": "apu_engine.engine.llm",
    "EngineConfig": "apu_engine.config",
    "SamplingParams": "apu_engine.engine.job",
    "Timings": "apu_engine.engine.job",
    "ApuError": "apu_engine.errors",
    "BudgetError": "apu_engine.errors",
    "ConfigError": "apu_engine.errors",
    "FormatError": "apu_engine.errors",
    "GpuError": "apu_engine.errors",
    "MappingError": "apu_engine.errors",
    "ModelError": "apu_engine.errors",
}

__all__ = [
    "LLM",
    "ApuError",
    "BudgetError",
    "Completion",
    "ConfigError",
    "EngineConfig",
    "FormatError",
    "Generation",
    "GpuError",
    "MappingError",
    "ModelError",
    "SamplingParams",
    "Timings",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
