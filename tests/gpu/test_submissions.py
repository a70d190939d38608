"""Submissions on a GPU: order, timeouts, cancelling, states, forks, and what happens when the runtime misbehaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hip_double import HipDouble
from rig import NONE, Plan, Rig, Step

from apu_engine._native import (
    CancelledError,
    Device,
    DeviceError,
    NativeError,
    OutOfMemoryError,
    WaitTimeout,
    check,
    ffi,
    lib,
)


def chain(ops: int = 6) -> Rig:
    """x = table[token]; then `ops` products with the identity, in layers of their own."""
    rig = Rig(rows=16)
    x = rig.input(np.arange(64, dtype=np.float32)[:, None].repeat(32, 1))
    y = rig.scratch("y", 32)
    w = rig.weight("w", np.eye(32, dtype=np.float32))
    for i in range(ops):
        rig.op(lib.APU_OP_MATMUL, ins=((x, y)[i % 2],), outs=((y, x)[i % 2],), weights=(NONE, w), layer=i)
    return rig


def wait(event: Any, timeout_us: int = 60_000_000) -> None:
    check(lib.apu_event_wait(event, timeout_us))


def test_more_submissions_than_slots_run_in_order(gpu: Device) -> None:
    rig = chain(2)
    with rig.build(gpu) as plan:
        events = [plan.submit(Step().sequence(range(i, i + 1 + i % 12))) for i in range(23)]
        for event in events:
            wait(event)
        assert plan.read(0 + 1, 11)[:, 0].tolist() == list(range(22, 33))


def test_each_bucket_is_captured_once_and_the_oldest_makes_room(hip: HipDouble, hip_device: Device) -> None:
    rig = Rig(rows=512, vocabulary=64)
    rig.input(np.zeros((64, 4), np.float32))
    before = hip.live()["execs"]
    with rig.build(hip_device) as plan:
        for _ in range(3):
            for rows in (1, 2, 8, 9, 16, 13):
                plan.run(Step().sequence([0] * rows))
        assert hip.live()["execs"] - before == 4
        for position in (255, 256, 511, 512, 2047):
            plan.run(Step().sequence([0], position))
        assert hip.live()["execs"] - before == 7
        for rows in range(1, 9):
            for position in (0, 300, 600, 1100, 2100, 4090):
                for first in (0, 1):
                    plan.run(Step().sequence([0] * rows, min(position, 4088)), first, 1)
        assert hip.live()["execs"] - before == 64
    assert hip.live()["execs"] == before


@pytest.mark.parametrize("where", ["begin", "end", "instantiate"])
def test_without_capture_kernels_are_launched_one_by_one(
    hip: HipDouble, hip_device: Device, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with chain().build(hip_device) as plan:
        hip.set(capture=where)
        for rows in (1, 3, 12):
            plan.run(Step().sequence(range(rows)))
            assert plan.read(1, rows)[:, 0].tolist() == list(range(rows))
    assert capfd.readouterr().err.count("steps cannot be captured as graphs") == 1


def test_a_failed_launch_names_op_layer_and_kernel_and_the_plan_goes_on(
    hip: HipDouble, hip_device: Device, capfd: pytest.CaptureFixture[str]
) -> None:
    rig = chain()
    kernel = "matvec_f32_r1"
    for flags in (0, lib.APU_PLAN_NO_GRAPH):
        rig.limits["flags"] = flags
        with rig.build(hip_device) as plan:
            pending = plan.submit(Step().sequence([7]), 0, 1)
            hip.set(launch=kernel)
            with pytest.raises(
                DeviceError, match=rf"op 1 MATMUL \(layer 0\), kernel {kernel}: .*hipErrorLaunchFailure"
            ):
                plan.submit(Step().sequence([5]))
            hip.set()
            wait(pending)
            plan.run(Step().sequence([9]))
            assert plan.read(1, 1)[0, 0] == 9
    capfd.readouterr()


def test_a_failed_graph_launch_is_named(hip: HipDouble, hip_device: Device) -> None:
    with chain().build(hip_device) as plan:
        plan.run(Step().sequence([1]))
        hip.set(graph_launch=1)
        with pytest.raises(DeviceError, match=r"the graph of op 0 EMBED to op 6 MATMUL \(layer 5\): .*LaunchFailure"):
            plan.submit(Step().sequence([5]))
        hip.set()
        plan.run(Step().sequence([9]))
        assert plan.read(1, 1)[0, 0] == 9


def broken(hip: HipDouble, device: Device, flags: int, **fault: object) -> str:
    """The message of a submission whose third op meets a fault, after which the plan is of no use."""
    rig = chain()
    rig.limits["flags"] = flags
    plan = rig.build(device)
    plan.run(Step().sequence([1]))
    hip.set(**fault)
    events = [plan.submit(Step().sequence([2])) for _ in range(2)]
    with pytest.raises(DeviceError) as caught:
        wait(events[0])
    with pytest.raises(DeviceError):
        wait(events[1])
    with pytest.raises(DeviceError):
        plan.run(Step().sequence([3]))
    hip.set()  # the double forgives, so that all can be freed
    plan.__exit__()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["fault", "exception"])
def test_a_fault_names_the_kernel_or_says_how(hip: HipDouble, hip_device: Device, kind: str) -> None:
    kernel = "matvec_f32_r1"
    single = broken(hip, hip_device, lib.APU_PLAN_NO_GRAPH, **{kind: kernel})
    assert single.startswith(f"op 1 MATMUL (layer 0), kernel {kernel}: ")
    captured = broken(hip, hip_device, 0, **{kind: kernel})
    assert captured.startswith("op 0 EMBED to op 6 MATMUL (layer 5), in one graph: ")
    assert "--no-graph" in captured


def test_a_hang_is_a_timeout_that_names_the_kernel(hip: HipDouble, hip_device: Device) -> None:
    rig = chain()
    rig.limits["flags"] = lib.APU_PLAN_NO_GRAPH
    with rig.build(hip_device) as plan:
        hip.set(hang="matvec_f32_r1")
        event = plan.submit(Step().sequence([3]))
        with pytest.raises(
            WaitTimeout, match=r"after 200000 us; it is at op 1 MATMUL \(layer 0\), kernel matvec_f32_r1"
        ):
            wait(event, 200_000)
        hip.set()  # the double lets the submission go on without that kernel
        wait(event)


def test_cancelling_spares_what_comes_after(hip: HipDouble, hip_device: Device) -> None:
    with chain().build(hip_device) as plan:
        plan.run(Step().sequence([1]))
        hip.set(hang="matvec_f32_r1")
        events = [plan.submit(Step().sequence([2 + i])) for i in range(3)]
        with pytest.raises(WaitTimeout):
            wait(events[0], 200_000)  # it has begun by then
        check(lib.apu_plan_cancel(plan.handle))
        hip.set()
        for event in events:
            with pytest.raises(CancelledError, match="the submission was cancelled"):
                wait(event)
        assert plan.read(1, 1)[0, 0] == 1  # the first was under way, without its first product; the others did nothing
        plan.run(Step().sequence([9]))
        assert plan.read(1, 1)[0, 0] == 9
        check(lib.apu_plan_cancel(plan.handle))
        event = plan.submit(Step().sequence([4]))
        wait(event)


def test_events_outlive_the_plan(gpu: Device) -> None:
    plan = chain().build(gpu)
    events = [plan.submit(Step().sequence([2])) for _ in range(4)]
    plan.__exit__()
    for event in events:
        assert lib.apu_event_wait(event, -1) in (lib.APU_OK, lib.APU_E_CANCELLED)


def test_a_plan_that_does_not_fit_leaves_nothing_behind(hip: HipDouble, hip_device: Device) -> None:
    rig = chain()
    plan = rig.build(hip_device)
    plan.__exit__()
    before = hip.live()
    for number in range(1, 40):
        hip.set(oom_at=number)
        try:
            rig.build(hip_device).__exit__()
        except OutOfMemoryError as error:
            assert "hipErrorOutOfMemory" in str(error)
        else:
            assert number > 8
            break
        assert hip.live() == before
    hip.set(pinned_memory=100)
    with pytest.raises(OutOfMemoryError):
        rig.build(hip_device)
    hip.set()
    assert hip.live() == before


def test_a_missing_kernel_is_named(hip_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hip_double import code_object
    from shim import KERNELS

    files = [file for file in KERNELS.glob("*.hip") if not file.name.startswith("matvec")]
    code_object(tmp_path, files=files)
    monkeypatch.setenv("APU_KERNELS", str(tmp_path))
    with Device("hip") as device, pytest.raises(NativeError, match=r"op 1 MATMUL \(layer 0\): kernel matvec_f32"):
        chain().build(device)


def test_pinned_memory_at_another_address(hip: HipDouble, hip_device: Device) -> None:
    hip.set(moved=1)
    with chain().build(hip_device) as plan:
        plan.run(Step().sequence([5, 6]))
        assert plan.read(1, 2)[:, 0].tolist() == [5, 6]


def test_profile(gpu: Device) -> None:
    with chain().build(gpu) as plan:
        times = np.zeros(7, np.uint64)
        check(lib.apu_plan_profile(plan.handle, 1, ffi.NULL))
        plan.run(Step().sequence(range(9)))
        check(lib.apu_plan_profile(plan.handle, 0, ffi.from_buffer("uint64_t[]", times)))
        assert (times > 0).all()
        assert plan.read(1, 9)[:, 0].tolist() == list(range(9))


def states(device: Device) -> tuple[Rig, Plan]:
    rig = Rig()
    rig.input(np.zeros((64, 4), np.float32))
    for name, group, pages in (("a", 0, 4), ("b", 0, 3), ("c", 1, 5)):
        memory = rig.memory(rig.state(name, 2, 8, pages, group=group))
        memory[...] = np.random.default_rng(pages).standard_normal(memory.shape)
    return rig, rig.build(device)


def test_states_are_moved_in_the_order_of_the_stream(gpu: Device) -> None:
    rig, plan = states(gpu)
    a, b, c = (rig.memory(i) for i in range(3))
    old = a.copy()
    with plan:
        events = [plan.submit(Step(2).sequence([0], 0, [[0], [0]])) for _ in range(3)]
        check(lib.apu_state_copy(plan.handle, 0, 1, 2))
        check(lib.apu_state_reset(plan.handle, 0, 1))
        size = a[0].nbytes + b[0].nbytes
        page = bytearray(size)
        check(lib.apu_state_export(plan.handle, 0, 2, ffi.from_buffer(page), size))
        check(lib.apu_state_import(plan.handle, 0, 0, ffi.from_buffer(page), size))
        for array in (a, b, c):
            plan.fetch(array)
        assert np.array_equal(a[2], old[1]) and np.array_equal(a[0], old[1]) and not a[1].any()
        assert bytes(page) == a[2].tobytes() + b[2].tobytes()
        assert np.array_equal(a[3], old[3]) and c.all()
        for event in events:
            wait(event)


def test_a_forked_child_is_told(hip: HipDouble, hip_kernels: Path) -> None:
    code = """
import os, numpy as np
from apu_engine._native import Device, lib, ffi
from rig import Rig, Step
rig = Rig(); rig.input(np.zeros((64, 4), np.float32))
device = Device("hip")
plan = rig.build(device)
event = plan.submit(Step().sequence([0]))
pid = os.fork()
if pid == 0:
    out = ffi.new("apu_event **")
    for status in (lib.apu_plan_submit(plan.handle, Step().sequence([0]).struct(), 0, 1, out),
                   lib.apu_event_wait(event, 1000)):
        text = ffi.string(lib.apu_last_error()).decode()
        if status != lib.APU_E_DEVICE or "forked" not in text:
            os._exit(1)
    plan.__exit__()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    native = Path(__file__).resolve().parents[1] / "native"
    import os

    environment = os.environ | {"APU_KERNELS": str(hip_kernels)}
    done = subprocess.run([sys.executable, "-c", code], cwd=native, timeout=60, check=False, env=environment)
    assert done.returncode == 0
