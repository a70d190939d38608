"""Submissions: order, timeouts, cancelling, idle workers, states between steps, truncated weights."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rig import NONE, Rig, Step

from apu_engine._native import CancelledError, Device, InvalidError, WaitTimeout, check, ffi, lib


def heavy(rows: int = 256, ops: int = 400) -> Rig:
    """Seconds of matrix products on any machine; the last op reads token 0's row back."""
    rng = np.random.default_rng(0)
    rig = Rig(rows=rows, vocabulary=rows)
    x = rig.input(rng.standard_normal((rows, 1024)).astype(np.float32))
    y = rig.scratch("y", 1024)
    w = rig.weight("w", (rng.standard_normal((1024, 1024)) / 32).astype(np.float32))
    for i in range(ops):
        rig.op(lib.APU_OP_MATMUL, ins=((x, y)[i % 2],), outs=((y, x)[i % 2],), weights=(NONE, w))
    return rig


def wait(event: object, timeout_us: int = -1) -> None:
    check(lib.apu_event_wait(event, timeout_us))


@pytest.mark.alone
def test_submit_returns_at_once_and_wait_times_out(device: Device) -> None:
    with heavy().build(device) as plan:
        start = time.perf_counter()
        event = plan.submit(Step().sequence(range(256)))
        assert time.perf_counter() - start < 0.1
        start = time.perf_counter()
        with pytest.raises(WaitTimeout, match="has not ended after 20000 us"):
            wait(event, 20_000)
        assert 0.015 < time.perf_counter() - start < 0.2
        with pytest.raises(WaitTimeout):
            wait(event, 0)
        check(lib.apu_plan_cancel(plan.handle))
        with pytest.raises(CancelledError, match="the submission was cancelled"):
            wait(event)


@pytest.mark.alone
def test_cancel_acts_within_100_ms_and_spares_what_comes_after(device: Device) -> None:
    rig = heavy()
    with rig.build(device) as plan:
        events = [plan.submit(Step().sequence(range(256))) for _ in range(3)]
        time.sleep(0.05)
        start = time.perf_counter()
        check(lib.apu_plan_cancel(plan.handle))
        for event in events:
            with pytest.raises(CancelledError):
                wait(event)
        assert time.perf_counter() - start < 0.1
        plan.run(Step().sequence([3]), 0, 5)


@pytest.mark.alone
def test_destroy_cancels_and_waits() -> None:
    with Device("cpu", threads=2) as device:
        plan = heavy().build(device)
        events = [plan.submit(Step().sequence(range(256))) for _ in range(2)]
        start = time.perf_counter()
        plan.__exit__()
        assert time.perf_counter() - start < 0.2
        for event in events:  # they outlive the plan
            with pytest.raises(CancelledError):
                wait(event)


def test_queue_is_bounded_and_in_order(device: Device) -> None:
    rig = Rig(vocabulary=64)
    x = rig.input(np.arange(64, dtype=np.float32)[:, None].repeat(4, 1))
    with rig.build(device) as plan:
        events = [plan.submit(Step().sequence([i])) for i in range(40)]  # more than are kept: submit waits for room
        for event in events:
            wait(event)
        assert plan.read(x, 1)[0, 0] == 39


def test_two_plans_and_threads_share_a_device() -> None:
    with Device("cpu", threads=3) as device:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                rng = np.random.default_rng(seed)
                x, w = (rng.standard_normal((n, 64)).astype(np.float32) for n in (64, 200))
                rig = Rig()
                out = rig.scratch("out", 200)
                rig.op(lib.APU_OP_MATMUL, ins=(rig.input(x),), outs=(out,), weights=(NONE, rig.weight("w", w)))
                with rig.build(device) as plan:
                    for i in range(150):
                        rows = 1 + (i * 7 + seed) % 16  # other numbers of workers from step to step
                        plan.run(Step().sequence(range(rows)))
                        np.testing.assert_allclose(plan.read(out, rows), x[:rows] @ w.T, atol=1e-4)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]


@pytest.mark.alone
def test_idle_workers_use_no_cpu() -> None:
    with Device("cpu", threads=4) as device:
        rig = Rig()
        rig.input(np.zeros((64, 4), np.float32))
        with rig.build(device) as plan:
            plan.run(Step().sequence([0]))
            time.sleep(0.02)
            before = time.process_time()
            time.sleep(0.3)
            assert time.process_time() - before < 0.02


def test_profile(device: Device) -> None:
    rig = heavy(rows=16, ops=4)
    with rig.build(device) as plan:
        times = np.zeros(5, np.uint64)
        check(lib.apu_plan_profile(plan.handle, 1, ffi.NULL))
        plan.run(Step().sequence(range(16)))
        check(lib.apu_plan_profile(plan.handle, 0, ffi.from_buffer("uint64_t[]", times)))
        assert (times > 0).all() and times[1:].min() > 1000


def test_forked_child_is_told(device: Device) -> None:
    code = """
import os, numpy as np
from apu_engine._native import Device, lib, ffi
from rig import Rig, Step
rig = Rig(); rig.input(np.zeros((64, 4), np.float32))
device = Device("cpu", threads=2)
plan = rig.build(device)
plan.run(Step().sequence([0]))
pid = os.fork()
if pid == 0:
    out = ffi.new("apu_event **")
    status = lib.apu_plan_submit(plan.handle, Step().sequence([0]).struct(), 0, 1, out)
    text = ffi.string(lib.apu_last_error()).decode()
    os._exit(0 if status == lib.APU_E_DEVICE and "forked" in text else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, timeout=60, check=False)
    assert done.returncode == 0


# ---- states ----------------------------------------------------------------------------------------------------------


def states(device: Device) -> Rig:
    rig = Rig()
    rig.input(np.zeros((64, 4), np.float32))
    for name, group, pages in (("a", 0, 4), ("b", 0, 3), ("c", 1, 5)):
        memory = rig.memory(rig.state(name, 2, 8, pages, group=group))
        memory[...] = np.random.default_rng(pages).standard_normal(memory.shape)
    return rig


def test_state_copy_reset_export_import(device: Device) -> None:
    rig = states(device)
    a, b, c = (rig.memory(i) for i in range(3))
    with rig.build(device) as plan:
        check(lib.apu_state_copy(plan.handle, 0, 1, 2))
        assert np.array_equal(a[2], a[1]) and np.array_equal(b[2], b[1]) and not np.array_equal(c[2], c[1])
        check(lib.apu_state_copy(plan.handle, 0, 1, 1))
        kept = a[2].copy()
        check(lib.apu_state_reset(plan.handle, 0, 1))
        assert not a[1].any() and not b[1].any() and c[1].any() and np.array_equal(a[2], kept)
        size = a[0].nbytes + b[0].nbytes
        page = bytearray(size)
        check(lib.apu_state_export(plan.handle, 0, 2, ffi.from_buffer(page), size))
        assert bytes(page) == a[2].tobytes() + b[2].tobytes()
        check(lib.apu_state_import(plan.handle, 0, 0, ffi.from_buffer(page), size))
        assert np.array_equal(a[0], a[2]) and np.array_equal(b[0], b[2])
        for call, message in (
            (lambda: lib.apu_state_copy(plan.handle, 0, 3, 0), "apu_state_copy: page 3, but group 0 has 3"),
            (lambda: lib.apu_state_copy(plan.handle, 2, 0, 0), "apu_state_copy: group 2, but the plan has 2"),
            (lambda: lib.apu_state_reset(plan.handle, 1, 5), "apu_state_reset: page 5, but group 1 has 5"),
            (
                lambda: lib.apu_state_export(plan.handle, 0, 0, ffi.from_buffer(page), size - 1),
                f"apu_state_export: expected {size} bytes for group 0, found {size - 1}",
            ),
            (
                lambda: lib.apu_state_import(plan.handle, 1, 0, ffi.from_buffer(page), size),
                f"expected {c[0].nbytes} bytes for group 1, found {size}",
            ),
            (lambda: lib.apu_state_import(plan.handle, 1, 0, ffi.NULL, size), "buffer must not be NULL"),
        ):
            with pytest.raises(InvalidError, match=message):
                check(call())


def test_fixed_states(device: Device) -> None:
    rig = states(device)
    rig.groups = 3
    memory = np.arange(3 * 2 * 16, dtype=np.float32)
    rig.states.append(
        {
            "kind": lib.APU_STATE_FIXED,
            "dtype": lib.APU_F32,
            "layer": 0,
            "group": 2,
            "rows_per_page": 0,
            "window": 0,
            "heads": 2,
            "head_size": 8,
            "address": memory.ctypes.data,
            "page_bytes": 64,
            "page_count": 3,
            "versions": 2,
            "name": "recurrent",
        }
    )
    slots = memory.reshape(3, 32)
    with rig.build(device) as plan:
        check(lib.apu_state_copy(plan.handle, 2, 0, 2))  # both versions
        assert np.array_equal(slots[2], slots[0])
        check(lib.apu_state_reset(plan.handle, 2, 0))
        assert not slots[0].any() and slots[1].any()

        def step(*slots: tuple[int, int]) -> Step:
            out = Step(3)
            for i, (read, write) in enumerate(slots):
                out.sequence([0], 0, [[i], [i], []])
                out.slots[-1].update(read_slot=read, write_slot=write)
            return out

        plan.run(step((0, 0), (1, 2)))
        for slots_, message in (
            (((0, 3),), "sequence 0 reads slot 0 and writes slot 3 of group 2, which has 3"),
            (((0, 1), (2, 1)), "sequences 0 and 1 both write slot 1 of group 2"),
            (((0, 1), (1, 2)), "sequence 1 reads slot 1 of group 2, which sequence 0 writes"),
        ):
            with pytest.raises(InvalidError, match=message):
                plan.run(step(*slots_))


# ---- a file that shrinks under the plan ------------------------------------------------------------------------------

TRUNCATED = """
import mmap, os, sys
import numpy as np
from apu_engine._native import Device, MappingError, guard, unguard, lib
from rig import NONE, Rig, Step

path = sys.argv[1]
matrix = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
matrix.tofile(path)
with open(path, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
weights = np.frombuffer(mapped, np.float32).reshape(matrix.shape)
address = weights.ctypes.data
guard(address, weights.nbytes, path)
rig = Rig()
out = rig.scratch("out", 4096)
x, w = rig.input(np.ones((64, 256), np.float32)), rig.weight("w", weights)
rig.op(lib.APU_OP_MATMUL, ins=(x,), outs=(out,), weights=(NONE, w))
with Device("cpu", threads=2) as device, rig.build(device) as plan:
    plan.run(Step().sequence([0]))
    whole = plan.read(out, 1)
    os.truncate(path, 65536)
    for attempt in range(2):  # the submission that met the fault, and every later one
        try:
            plan.run(Step().sequence([0]))
        except MappingError as error:
            print(error)
    assert np.array_equal(plan.read(out, 1)[0, :64], whole[0, :64])  # what was left of the file
    unguard(address)
    plan.run(Step().sequence([0]))
print("alive")
"""


def test_truncated_weights_end_in_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "alive", done.stderr
    assert len(lines) == 3 and all(str(path) in line and "truncated" in line for line in lines[:2])


CHAINED = """
import faulthandler, mmap, os, sys
from apu_engine._native import guard
faulthandler.enable()  # a handler that was there before
path = sys.argv[1]
open(path, "wb").write(bytes(8192))
file = open(path, "rb")
ours, other = (mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) for _ in range(2))
import numpy as np
guard(np.frombuffer(ours, np.uint8).ctypes.data, 8192, path)
os.truncate(path, 0)
assert np.frombuffer(ours, np.uint8)[5000] == 0
print("guarded", flush=True)
np.frombuffer(other, np.uint8)[0] + 1
"""


def test_faults_elsewhere_reach_the_handler_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAINED, str(tmp_path / "file")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "guarded" and done.returncode == -7  # SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_guard_arguments() -> None:
    data = np.zeros(3 * 4096, np.uint8)
    base = -(-data.ctypes.data // 4096) * 4096

    def guarded(address: int, size: int, path: bytes = b"model.gguf") -> None:
        check(lib.apu_mapping_guard(ffi.cast("void *", address), size, path))

    guarded(base, 4096)
    for address, size, message in (
        (base + 64, 64, "is not the start of a page"),
        (base + 4096, 0, "is empty or wraps around"),
        (base + 4096, 2**64 - 1, "is empty or wraps around"),
        (base, 64, "overlaps the guarded mapping of model.gguf"),
    ):
        with pytest.raises(InvalidError, match=message):
            guarded(address, size)
    check(lib.apu_mapping_release(ffi.cast("void *", base)))
    with pytest.raises(InvalidError, match="no mapping is guarded at"):
        check(lib.apu_mapping_release(ffi.cast("void *", base)))
    assert lib.apu_mapping_fault() == ffi.NULL


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_regions(device: Device) -> None:
    data = np.arange(1000, dtype=np.uint8)
    region = ffi.new("apu_region **")
    chunk, count = ffi.new("apu_chunk *"), ffi.new("uint32_t *", 0)
    for strategy in (lib.APU_MEMORY_AUTO, lib.APU_MEMORY_DIRECT):
        check(lib.apu_memory_register(device.handle, ffi.from_buffer(data), 1000, strategy, 0, region))
        check(lib.apu_region_chunks(region[0], ffi.NULL, count))
        assert count[0] == 1
        check(lib.apu_region_chunks(region[0], chunk, count))
        assert (chunk.host, chunk.device, chunk.bytes) == (data.ctypes.data, data.ctypes.data, 1000)
        count[0] = 0
        assert lib.apu_region_chunks(region[0], chunk, count) == lib.APU_E_INVALID
        lib.apu_region_free(region[0])
    register, pages = lib.apu_memory_register, ffi.cast("void *", data.ctypes.data & -4096)
    registered, staged = lib.APU_MEMORY_REGISTERED, lib.APU_MEMORY_STAGED
    assert register(device.handle, pages, 4096, registered, lib.APU_WAY_SVM, region) == lib.APU_E_UNSUPPORTED
    assert register(device.handle, pages, 4096, staged, 0, region) == lib.APU_E_UNSUPPORTED
    for start, nbytes, strategy, way in (
        (pages, 4096, registered, lib.APU_WAY_AUTO),
        (pages, 4096, registered, 5),
        (pages, 4095, registered, lib.APU_WAY_SVM),
        (pages + 16, 4096, registered, lib.APU_WAY_SVM),
        (pages, 4096, staged, lib.APU_WAY_SVM),
        (pages, 4096, 4, 0),
    ):
        assert register(device.handle, start, nbytes, strategy, way, region) == lib.APU_E_INVALID
    assert lib.apu_memory_register(device.handle, ffi.NULL, 1000, 0, 0, region) == lib.APU_E_INVALID
    assert lib.apu_memory_alloc(device.handle, 0, region) == lib.APU_E_INVALID
    assert lib.apu_memory_alloc(device.handle, 2**60, region) == lib.APU_E_MEMORY
    check(lib.apu_memory_alloc(device.handle, 64 << 30, region))  # reserved, not committed
    count[0] = 1
    check(lib.apu_region_chunks(region[0], chunk, count))
    check(lib.apu_memory_copy(device.handle, chunk.device + (1 << 30), data.ctypes.data, 1000, 0, 1))
    back = np.zeros(1000, np.uint8)
    check(lib.apu_memory_copy(device.handle, back.ctypes.data, chunk.device + (1 << 30), 1000, 1, 0))
    assert np.array_equal(back, data)
    lib.apu_region_free(region[0])
    lib.apu_region_free(ffi.NULL)
