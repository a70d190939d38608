"""`apu-engine footprint`: which memory a process holds, from /proc: mapped weights, copies, anonymous memory."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from apu_engine.cli.app import add, with_config
from apu_engine.config import EngineConfig
from apu_engine.errors import ConfigError


@with_config("model", "engine", "output", exclude=("queue", "max_tokens", "log_level", "timings"), model_argument=True)
def footprint(
    config: EngineConfig,
    pid: Annotated[
        int | None, typer.Option("--pid", metavar="PID", help="A running process, such as a server.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in bytes instead of a table.")] = False,
) -> None:
    """Show the memory of a running process (--pid), or of a model that is loaded for this and run once (-m).

    Of each model file: resident pages are in memory now; Pss counts a page that n processes map as 1/n; private
    pages are mapped by no other process, which is no copy. Dirty and copied should be 0: no weight exists twice.
    """
    from apu_engine.memory import footprint as memory

    if pid is not None:
        found = memory.footprint(pid, memory.weight_files(pid))
    elif config.model:
        from apu_engine.engine.llm import LLM

        with LLM.from_config(config) as llm:
            llm.generate([0], 2, ignore_eos=True)  # one pass, so that every weight was read
            found = llm.footprint()
    else:
        raise ConfigError("nothing to look at; try `apu-engine footprint --pid PID` or `-m MODEL.gguf`", "pid")
    print(json.dumps(found.as_dict()) if as_json else found.table())


def register(app: typer.Typer) -> None:
    add(app, "footprint", footprint, short_help="Show the memory of a process or model.")
