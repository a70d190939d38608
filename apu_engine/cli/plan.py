"""`apu-engine plan`: what a model's step is made of, from its header alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from apu_engine.cli.app import add, require_model, with_config
from apu_engine.config import EngineConfig


@with_config(
    "model",
    "engine",
    "output",
    exclude=(
        *("device", "kernels", "threads", "isa", "pin", "memory", "memory_way", "mlock", "prefetch"),
        *("queue", "max_tokens", "watchdog", "log_level", "timings"),
    ),
    model_argument=True,
)
def plan(
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per op.")] = False,
) -> None:
    """List the ops of a model with shapes, types and the bytes that each reads per decode step."""
    from apu_engine import arch
    from apu_engine.engine.context import fit
    from apu_engine.plan import dump
    from apu_engine.weights.opening import open_model

    model = open_model(require_model(config, "plan"))
    fitted = fit(config, model)
    spec = arch.plan(model, fitted.options)
    if as_json:
        for line in dump.lines(spec):
            print(json.dumps(asdict(line)))
        return
    print(dump.render(spec, context=fitted.context.tokens))


def register(app: typer.Typer) -> None:
    add(app, "plan", plan, short_help="List the ops of a model.")
