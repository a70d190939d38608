"""`apu-engine serve`: the HTTP server."""

from __future__ import annotations

import typer

from apu_engine.cli.app import with_config
from apu_engine.config import EngineConfig
from apu_engine.errors import ConfigError


def require_model(config: EngineConfig, verb: str) -> str:
    """The model's path; ConfigError when none was named."""
    if not config.model:
        raise ConfigError(f"no model was named; try `apu-engine {verb} -m MODEL.gguf` or set APU_MODEL", "model")
    return config.model


@with_config("model", "engine", "sampling", "text", "server", "output", exclude=("system",), model_argument=True)
def serve(config: EngineConfig) -> int | None:
    """Serve a model over HTTP: OpenAI's chat and completion endpoints, /health, /tokenize."""
    require_model(config, "serve")
    from apu_engine import server

    return server.run(config)


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)
