"""Doctor: looks at the machine and says what stands in the way of a fast, safe run, and the exact remedy for each.

`examine` makes the report of `apu-engine doctor`, `verdict_line` the one line of every start. Both read files only
(below the machine's root, so that tests bring their own machines); `full` adds measurements on the devices. A check
that meets something unreadable says so and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from apu_engine.doctor.report import Check, Report

if TYPE_CHECKING:
    from apu_engine.access import Rights
    from apu_engine.config import EngineConfig
    from apu_engine.doctor.context import Context, Request
    from apu_engine.memory.machine import Machine

Look = Callable[["Context"], "Check"]
START_DEADLINE_S = 0.03  # at a start, for looking who holds GTT


def groups() -> tuple[tuple[str, tuple[Look, ...]], ...]:
    """All checks that read files, in the order of docs/doctor.md."""
    from apu_engine.doctor import file_checks as files
    from apu_engine.doctor import gpu_checks as gpu
    from apu_engine.doctor import machine_checks as machine

    return (
        ("Machine", (machine.cpu, machine.power, machine.kernel, machine.container, machine.iommu)),
        ("GPU", (gpu.gpu, gpu.driver, gpu.kfd, gpu.render, gpu.kernels, files.rocm, gpu.mes, gpu.svm)),
        ("Memory", (machine.memory, machine.memlock, gpu.carve_out, gpu.kfd_limit, gpu.gtt, gpu.ttm)),
        ("Files", (files.file_system, files.disk, files.model, files.budget, files.page_cache)),
    )


def examine(machine: Machine, request: Request, rights: Rights | None = None) -> Report:
    """Runs all checks. Never raises for what it finds: a check that fails says "could not look"."""
    from apu_engine.doctor.context import Context

    ctx = Context(machine, request, rights)
    found = [(name, tuple(_run(look, ctx) for look in looks)) for name, looks in groups()]
    if request.full:
        from apu_engine.doctor.full import measure

        found.append(("Measured", tuple(measure(ctx))))
    return Report(tuple(found), request.full)


def _run(look: Look, ctx: Context) -> Check:
    try:
        return look(ctx)
    except Exception as error:  # whatever a broken /proc or /sys leads to: the other checks still count
        return Check(look.__name__, "info", f"could not look: {type(error).__name__}: {str(error)[:200]}")


def request_of(config: EngineConfig, full: bool = False) -> Request:
    """What to look at for a configuration."""
    from apu_engine.doctor.context import Request

    model = Path(os.path.realpath(config.model)) if config.model else None  # download caches hold links
    kernels = Path(config.kernels) if config.kernels else None
    folder = _models_folder() if model is None else model if model.is_dir() else model.parent
    return Request(model, folder, config.device, kernels, full)


def _models_folder() -> Path:
    from apu_engine import catalog
    from apu_engine.errors import ApuError

    try:
        return catalog.models_dir()
    except ApuError:  # no home
        return Path.cwd()


def verdict_line(config: EngineConfig, machine: Machine | None = None) -> str:
    """The line that every start prints; takes some milliseconds and never raises."""
    from apu_engine.memory.machine import Machine

    try:
        request = request_of(config)
        request.deadline_s, request.quick = START_DEADLINE_S, True
        return examine(machine or Machine(), request).line()
    except Exception as error:  # a start must not fail for the sake of advice
        return f"doctor: could not look: {type(error).__name__}: {str(error)[:200]}"
