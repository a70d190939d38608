"""What `--full` finds out about memory strategies: each way of reading file pages in place, and staging, on real files.

The files are the named model's, else one of noise in the models' folder (`trial` in memory/probe.py). Results of the
ways replace those that `--memory auto` keeps.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from apu_engine.doctor.context import Context
from apu_engine.doctor.report import Check, Verdict, rounded
from apu_engine.errors import ApuError

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.memory.probe import Probe, Way
    from apu_engine.memory.strategies import Job
    from apu_engine.memory.watchdog import Task

NOISE_BYTES = 128 << 20  # of the file that stands for a model
STAGED_BYTES = 128 << 20  # of it that are staged


def strategies(ctx: Context, device: Device, task: Task) -> Check:
    """Each way's bandwidth in place as a share of device memory's, and how fast a copy is staged; all verified."""
    from apu_engine.memory.probe import candidates, probe, trial

    model = None if isinstance(ctx.opened, str) else ctx.opened
    with trial(device, model, ctx.request.folder, NOISE_BYTES, task) as job:
        found = probe(job, fresh=True)
        task.beat("staging a part of a file")
        staged, problem = _staged(job)
    chosen = candidates("auto", "auto", found, device.props.ways)[0]
    data = {
        "device_gb_per_s": rounded(found.device_gb_per_s),
        "ways": [_numbers(found, way) for way in found.ways],
        "staged_gib_per_s": None if problem else rounded(staged),
        "staged_problem": problem,
        "auto": chosen.title,
    }
    told = [_told(found, way) for way in found.ways] or ["no way of reading in place"]
    told.append(f"staged: {problem}" if problem else f"staged {staged:.1f} GiB/s")
    value = f"auto takes {chosen.title}{': ' if chosen.why else ''}{chosen.why}; {'; '.join(told)}"
    sound = any(not way.problem for way in found.ways)
    verdict: Verdict = "ok"
    remedy: tuple[str, ...] = ()
    if problem:
        verdict = "warn" if sound else "bad"
        remedy = ("run with --device cpu and report this with the output of doctor --json",)
    elif device.props.integrated and not sound:
        verdict, remedy = "warn", ("weights will be held as a copy, which GTT must have room for: see ttm.pages_limit",)
    return Check("strategies", verdict, value, remedy, data)


def _told(probe: Probe, way: Way) -> str:
    if way.problem:
        return f"{way.title}: {way.problem}"
    grain = "" if way.grain == "unknown" else f", {way.grain}-grained"
    return f"{way.title} {way.gb_per_s:.1f} GB/s ({probe.share(way):.0%}{grain})"


def _numbers(probe: Probe, way: Way) -> dict[str, object]:
    return {
        "name": way.name,
        "problem": way.problem,
        "grain": way.grain,
        "gb_per_s": rounded(way.gb_per_s),
        "share": rounded(probe.share(way)),
        "register_s_per_gib": rounded(way.register_s_per_gib),
        "first_touch_s_per_gib": rounded(way.first_touch_s_per_gib),
    }


def _staged(job: Job) -> tuple[float, str]:
    """GiB/s from the file to device memory through a pinned ring, and what went wrong."""
    from apu_engine._native import Region, Stager
    from apu_engine.memory.files import open_regular
    from apu_engine.memory.mapping import Mapping
    from apu_engine.memory.verify import checksum

    largest = max((extent for ref in job.refs for extent in ref.extents), key=lambda item: item.end - item.offset)
    path, nbytes = job.files[largest.shard], min(largest.end - largest.offset, STAGED_BYTES)
    region: Region | None = None
    fd = -1
    try:
        region = Region.alloc(job.device, nbytes)
        fd, _ = open_regular(path)
        begin = time.monotonic()
        with Stager(job.device, min(STAGED_BYTES // 4, 32 << 20)) as stager:
            stager.read(fd, str(path), largest.offset, nbytes, region.address)
            stager.wait()
        rate = nbytes / (time.monotonic() - begin) / (1 << 30)
        found = job.device.checksum(region.address, nbytes)
        with Mapping.open(path) as mapping:
            expected = checksum(mapping.array(largest.offset, nbytes))
        return rate, "" if found == expected else "the device has other bytes than the file"
    except ApuError as error:
        return 0.0, str(error).partition("\n")[0]
    finally:
        if fd >= 0:
            os.close(fd)
        if region is not None:
            region.free()
