"""HTTP: OpenAI-compatible endpoints over the engine. It never sees a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apu_engine.config import EngineConfig


def run(config: EngineConfig) -> int:
    """Serves `config.model`, which must be set, until a signal; imports the HTTP stack only now."""
    from apu_engine.server.app import run as serve

    return serve(config)
