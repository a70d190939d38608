"""`apu-engine bench bw`: bandwidths of CPU and GPU, as a table or JSON; they are kept for later decisions.

The files that are read in place are the named model's, else one of noise beside the models. Without a GPU it measures
the CPU and says why there is no more. memory/bandwidth.py has the measurements.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apu_engine.cli.app import add, with_config
from apu_engine.config import EngineConfig, specs

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.memory.bandwidth import Bandwidths, Rate

NOISE_BYTES = 256 << 20  # of the file that stands for a model
_OPTIONS = ("model", "device", "kernels", "threads", "debug")
_EXCLUDED = tuple(spec.name for spec in specs() if spec.name not in _OPTIONS)
_WIDTHS = (6, 9, 20, 28, 9)  # of columns; figures come one by one


@with_config("model", "output", exclude=_EXCLUDED, model_argument=True)
def bench_bw(
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Measure bandwidths: reads and copies of the CPU (1 to -t threads) and the GPU, file pages in place, gathers.

    A GPU reads file pages in place by each way that its runtime has; gathers read parts of 1 to 16 MiB, as experts are,
    that lie anywhere. GB are 1e9 bytes; copies count the bytes copied. Results are kept in the user's cache folder.
    """
    from apu_engine.doctor import request_of
    from apu_engine.memory.bandwidth import keep, measure, titles
    from apu_engine.memory.probe import trial
    from apu_engine.memory.watchdog import MEASURING_SECONDS, Watchdog
    from apu_engine.weights.opening import open_model

    def tell(rate: Rate) -> None:
        if not as_json:
            _line(titles([rate])[0])

    device, absent = _device(config)
    watchdog = Watchdog(MEASURING_SECONDS, cleanup=())
    try:
        model, folder = open_model(Path(config.model)) if config.model else None, request_of(config).folder
        with watchdog.during("measuring bandwidths") as task, trial(device, model, folder, NOISE_BYTES, task) as job:
            if not as_json:
                print(f"{_title(device)}; files on {job.files[0].parent}")
                _line(("device", "test", "memory", "with", "bytes", "GB/s"))
            found = measure(job, config.threads, tell)
            found.absent = [*absent, *found.absent]
            kept = keep(job, found)
            title = _title(device)
    finally:
        watchdog.close()
        device.close()
    if as_json:
        print(json.dumps(_numbers(found, title, kept), indent=1))
        return
    for text in found.absent:
        print(f"absent: {text}")
    print(f"kept in {kept}" if kept else "the cache folder cannot be written: nothing is kept")


def _line(cells: tuple[str, ...]) -> None:
    print("  ".join([*(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)), cells[-1]]), flush=True)


def _numbers(found: Bandwidths, title: str, kept: Path | None) -> dict[str, Any]:
    rates = [{**asdict(rate), "gb_per_s": round(rate.gb_per_s, 2)} for rate in found.rates]
    body = {"schema": 1, "device": title, "made": round(found.made), "file": found.file, "rates": rates}
    return {**body, "absent": found.absent, "kept": str(kept) if kept else None}


def _title(device: Device) -> str:
    props = device.props
    return f"{props.kind}, {props.arch}, {props.name}"


def _device(config: EngineConfig) -> tuple[Device, list[str]]:
    """The device, and why it is no GPU."""
    from apu_engine.device import open_device
    from apu_engine.errors import GpuError

    try:
        device, choice = open_device(config.device, kernels=config.kernels, threads=1)
    except GpuError as error:
        if config.device != "auto":
            raise
        device, _ = open_device("cpu", threads=1)
        return device, [f"GPU: {error}"]
    return device, [f"GPU: {choice.reason}"] if device.props.kind == "cpu" else []


def register(app: typer.Typer) -> None:
    add(app, "bench bw", bench_bw, short_help="Measure memory bandwidths.")
