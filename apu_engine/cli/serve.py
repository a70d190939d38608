"""`apu-engine serve`: the HTTP server."""

from __future__ import annotations

import typer

from apu_engine.cli.app import add, require_model, with_config
from apu_engine.config import EngineConfig


@with_config(
    "model", "engine", "sampling", "text", "server", "output", exclude=("system", "timings"), model_argument=True
)
def serve(config: EngineConfig) -> int | None:
    """Serve a model over HTTP: OpenAI's chat and completion endpoints, /health, /tokenize."""
    require_model(config, "serve")
    from apu_engine import server

    return server.run(config)


def register(app: typer.Typer) -> None:
    add(app, "serve", serve, short_help="Serve a model over HTTP, as OpenAI's API does.")
