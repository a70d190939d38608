"""gpu::Driver against the stand-in for libamdhip64: what works, and every way in which a real runtime fails.

Each failure must be an error that names the runtime's own error and what was being done, and leave nothing behind:
the fixture `hip` counts the double's objects.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble, code_object, library
from probe import DEVICE, INVALID, MEMORY, UNSUPPORTED, Probe, ProbeError, Sums

FILE = Path(__file__).with_name("shim_kernels.hip")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return code_object(tmp_path_factory.mktemp("code"), files=[FILE]).read_bytes()


@pytest.fixture
def probe(hip: HipDouble) -> Probe:
    return Probe()


@pytest.fixture
def sums(hip: HipDouble, probe: Probe, image: bytes) -> Iterator[Sums]:
    with probe.using("module", image, len(image)) as module, probe.using("stream") as stream:
        made = Sums(probe, module, stream)
        yield made
        hip.set()
        made.close()


def test_properties(probe: Probe) -> None:
    assert probe.props() == {
        "arch": "gfx1151",
        "integrated": 1,
        "wave_size": 32,
        "compute_units": 4,
        "lds_bytes": 65536,
        "lds_of_unit": 65536,
        "threads_of_unit": 2048,
        "memory": 64 << 30,
        "l2": 2 << 20,
    }


def test_target_features_are_no_part_of_the_architecture(hip: HipDouble, probe: Probe) -> None:
    hip.set(arch="gfx90a")  # reported as gfx90a:sramecc+:xnack-
    assert (probe.props()["arch"], probe.props()["wave_size"]) == ("gfx90a", 64)


def test_a_runtime_before_rocm_6(hip: HipDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Probe().props()
    monkeypatch.setenv("APU_HIP_LIBRARY", str(library(hide=["hipGetDevicePropertiesR0600"])))
    assert Probe().props() == new


def test_a_launch_and_copies(sums: Sums) -> None:
    sums.launch()
    assert np.array_equal(sums.result(), sums.x.sum(1))
    probe, stream = sums.probe, sums.stream
    probe.call("on_device", sums.output, sums.input, 32, stream)
    assert np.array_equal(sums.result(), sums.x[0, :8])
    probe.call("fill", sums.output, 0, 32, stream)
    assert not sums.result().any()
    total = probe.made("memory", np.zeros(1, np.uint64).ctypes.data)
    assert total == 64 << 30


def test_events(sums: Sums) -> None:
    probe = sums.probe
    with probe.using("event", 1) as begin, probe.using("event", 1) as end:
        probe.call("event_record", begin, sums.stream)
        sums.launch()
        probe.call("event_record", end, sums.stream)
        probe.call("event_wait", end)
        assert probe.ended(begin) and probe.ended(end)
        ms = np.zeros(1, np.float32)
        probe.call("event_elapsed", begin, end, ms.ctypes.data)
        assert 0 < ms[0] < 10_000
    with probe.using("event", 0) as untimed:
        probe.call("event_record", untimed, sums.stream)
        with pytest.raises(ProbeError, match=r"hipErrorInvalidHandle \(400\) measuring time"):
            probe.call("event_elapsed", untimed, untimed, np.zeros(1, np.float32).ctypes.data)


def test_a_graph_replays_what_was_captured(sums: Sums) -> None:
    probe, stream = sums.probe, sums.stream
    probe.call("fill", sums.output, 0, 32, stream)
    probe.call("capture_begin", stream)
    sums.launch()
    graph = probe.made("capture_end", stream)
    assert not sums.result().any()  # captured, not run
    for factor in (1, 3):
        probe.to_device(sums.input, sums.x * np.float32(factor), stream)
        probe.call("graph_launch", graph, stream)
        assert np.array_equal(sums.result(), sums.x.sum(1) * factor)
    probe.call("graph_destroy", graph)


@pytest.mark.parametrize("when", ["begin", "end", "instantiate"])
def test_a_capture_that_is_refused(hip: HipDouble, sums: Sums, when: str) -> None:
    probe, stream = sums.probe, sums.stream
    hip.set(capture=when)
    text = {
        "begin": r"hipErrorStreamCaptureUnsupported \(900\) beginning a capture",
        "end": r"hipErrorStreamCaptureInvalidated \(901\) ending a capture",
        "instantiate": r"hipErrorOutOfMemory \(2\) instantiating a graph",
    }
    with pytest.raises(ProbeError, match=text[when]):
        probe.call("capture_begin", stream)
        sums.launch()
        probe.made("capture_end", stream)
    assert hip.live()["graphs"] == hip.live()["execs"] == 0
    sums.launch()  # the stream works as before
    assert np.array_equal(sums.result(), sums.x.sum(1))


def test_what_the_capturing_thread_may_not_do(sums: Sums) -> None:
    probe, stream = sums.probe, sums.stream
    probe.call("capture_begin", stream)
    with pytest.raises(ProbeError, match=r"hipErrorStreamCaptureUnsupported \(900\) allocating 64 bytes"):
        probe.made("alloc", 64)
    with pytest.raises(ProbeError, match="hipErrorStreamCaptureInvalidated"):
        probe.made("capture_end", stream)


def test_a_launch_that_fails(hip: HipDouble, sums: Sums) -> None:
    hip.set(launch="shim_block_sum")
    with pytest.raises(
        ProbeError, match=r"device hip: hipErrorLaunchFailure \(719\) launching 8 x 1 x 1 blocks of 256"
    ):
        sums.launch()


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (1 << 24, 1, 1), (0, 1, 1)])
def test_grids_that_hardware_refuses(sums: Sums, grid: tuple[int, int, int]) -> None:
    with pytest.raises(ProbeError, match="hipErrorInvalidValue"):
        sums.launch(grid)


@pytest.mark.parametrize(
    ("kind", "name"), [("fault", "hipErrorIllegalAddress"), ("exception", "hipErrorLaunchFailure")]
)
def test_a_kernel_that_faults(hip: HipDouble, sums: Sums, kind: str, name: str) -> None:
    """Every call fails from then on, none hangs."""
    probe = sums.probe
    with probe.using("event", 0) as event:
        hip.set(**{kind: "shim_block_sum"})
        sums.launch()
        with pytest.raises(ProbeError, match=rf"device hip: {name} \(\d+\) \w+ing") as error:
            probe.call("event_record", event, sums.stream)  # shows here already, or
            probe.call("event_wait", event)
        assert error.value.status == DEVICE
        for call in (
            lambda: probe.ended(event),
            lambda: probe.call("stream_wait", sums.stream),
            lambda: probe.made("alloc", 64),
            lambda: probe.call("use", 0),
            sums.launch,
            sums.result,
        ):
            with pytest.raises(ProbeError, match=name):
                call()
        hip.set()


def test_a_kernel_that_reads_past_its_buffers(hip: HipDouble, sums: Sums) -> None:
    sums.launch(x=sums.input + 4096)
    with pytest.raises(ProbeError, match="hipErrorIllegalAddress"):
        sums.result()
    assert "shim_block_sum" in hip.error() and "memory fault" in hip.error()


def test_a_kernel_that_never_ends(hip: HipDouble, sums: Sums) -> None:
    """No call fails; the event does not pass until the device is released."""
    probe = sums.probe
    hip.set(hang="shim_block_sum")
    with probe.using("event", 0) as event:
        sums.launch()
        probe.call("event_record", event, sums.stream)
        assert [probe.ended(event) for _ in range(100)] == [False] * 100
        hip.set()
        probe.call("event_wait", event)
        assert probe.ended(event)


def test_device_memory_that_ends(hip: HipDouble, probe: Probe) -> None:
    hip.set(memory=1 << 20)
    first = probe.made("alloc", 1 << 19)
    with pytest.raises(ProbeError, match=r"hipErrorOutOfMemory \(2\) allocating 1048576 bytes of device mem") as error:
        probe.made("alloc", 1 << 20)
    assert error.value.status == MEMORY
    probe.call("free", first)
    hip.set(oom_at=2)
    first = probe.made("alloc", 64)
    with pytest.raises(ProbeError, match="hipErrorOutOfMemory"):
        probe.made("alloc", 64)
    probe.call("free", first)
    hip.set(pinned_memory=100)
    with pytest.raises(ProbeError, match=r"hipErrorOutOfMemory \(2\) allocating 200 bytes of pinned memory"):
        probe.host_alloc(200)


def test_pinned_memory_at_another_address(hip: HipDouble, sums: Sums) -> None:
    hip.set(moved=1)
    host, device = sums.probe.host_alloc(sums.x.nbytes)
    assert host != device
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * sums.x.size).from_address(host))
    view[:] = 1
    sums.launch(x=device)
    assert np.array_equal(sums.result(), np.full(8, 256))
    sums.probe.call("host_free", host)


def test_wrong_addresses(probe: Probe) -> None:
    data = np.zeros(64, np.uint8)
    with probe.using("stream") as stream, probe.using("alloc", 32) as memory:
        with pytest.raises(ProbeError, match=r"hipErrorInvalidValue \(1\) copying 64 bytes to the device"):
            probe.to_device(memory, data, stream)
        with pytest.raises(ProbeError, match="hipErrorInvalidValue"):
            probe.to_host(data, data.ctypes.data, stream)
        with pytest.raises(ProbeError, match=r"hipErrorInvalidValue \(1\) freeing device memory"):
            probe.call("free", memory + 8)


def test_code_objects_that_do_not_load(hip: HipDouble, probe: Probe, image: bytes) -> None:
    with pytest.raises(ProbeError, match=r"hipErrorInvalidImage \(200\) loading a code object"):
        probe.made("module", b"\x7fELF" + bytes(60), 64)
    hip.set(arch="gfx1201")
    with pytest.raises(ProbeError, match=r"hipErrorNoBinaryForGpu \(209\)"):
        probe.made("module", image, len(image))
    hip.set()
    missing = r"hipErrorNotFound \(500\) looking up kernel no_such_kernel"
    with probe.using("module", image, len(image)) as module, pytest.raises(ProbeError, match=missing):
        probe.made("function", module, b"no_such_kernel")


# Opening


def refused(kind: str = "hip") -> ProbeError:
    with pytest.raises(ProbeError) as error:
        Probe(kind)
    assert error.value.status == UNSUPPORTED
    return error.value


def test_no_library(hip: HipDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_HIP_LIBRARY", "/nowhere/libamdhip64.so.9")
    assert "/nowhere/libamdhip64.so.9 was not found; install ROCm's HIP runtime" in str(refused())


def test_a_library_that_does_not_load(hip: HipDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libamdhip64.so.7"
    path.write_bytes(b"no library")
    monkeypatch.setenv("APU_HIP_LIBRARY", str(path))
    assert "libamdhip64.so.7 cannot be loaded" in str(refused())


@pytest.mark.parametrize("missing", ["hipGraphLaunch", "hipGetErrorName", "hipGetDeviceProperties"])
def test_missing_functions(hip: HipDouble, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    hidden = [missing, "hipGetDevicePropertiesR0600"] if "Properties" in missing else [missing]
    monkeypatch.setenv("APU_HIP_LIBRARY", str(library(hide=hidden)))
    assert f"lacks {missing}; install" in str(refused())


@pytest.mark.parametrize(
    ("where", "text"), [("init", r"hipErrorInvalidDevice \(101\)"), ("count", r"hipErrorNoDevice \(100\)")]
)
def test_no_device(where: str, text: str) -> None:
    """In processes of their own: a driver that has been opened stays open."""
    error = in_process(f'os.environ["APU_HIP_DOUBLE"] = "devices=0 no_device={where}"\nDevice("hip")')
    assert "shows no usable device" in error
    assert text.replace("\\", "") in error


def test_the_runtimes_own_choice_of_devices(hip: HipDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    hip.set(devices=3)
    assert Probe().made("count") == 3
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,0")
    assert Probe().made("count") == 2
    with pytest.raises(ProbeError, match=r"hipErrorInvalidDevice \(101\) choosing device 2"):
        Probe().call("use", 2)


def test_unknown_kinds(hip: HipDouble) -> None:
    assert 'expected "hip" or "cuda"' in str(refused("vulkan"))


def test_after_fork() -> None:
    """The child is told so; it does not touch the runtime's copy."""
    error = in_process(
        """
        device = Device("hip")
        if os.fork() == 0:
            try:
                _native.Region.alloc(device, 64)
            finally:
                device.close()
        os.wait()
        """,
        kernels=True,
    )
    assert "this process was forked after the device was opened" in error


def test_the_host_cannot_reach_device_memory() -> None:
    """What would go unnoticed where the host's memory plays the device's."""
    error = in_process(
        """
        import ctypes, faulthandler
        faulthandler.enable()
        ctypes.memset(_native.Region.alloc(Device("hip"), 64).address, 0, 64)
        """,
        kernels=True,
    )
    assert "Segmentation fault" in error


def in_process(code: str, kernels: bool = False) -> str:
    """What it writes to standard error."""
    begin = "import os\nfrom apu_engine import _native\nfrom apu_engine._native import Device\n"
    begin += f'os.environ["APU_HIP_LIBRARY"] = {str(library())!r}\n'
    if kernels:
        from shim import CACHE

        folder = CACHE / "test-driver"
        folder.mkdir(parents=True, exist_ok=True)
        code_object(folder, files=[FILE])
        begin += f'os.environ["APU_KERNELS"] = {str(folder)!r}\n'
    run = subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode != 0 or "Traceback" in run.stderr
    return run.stderr


def test_statuses_are_apu_h(hip: HipDouble) -> None:
    from apu_engine._native import lib

    assert (lib.APU_E_INVALID, lib.APU_E_MEMORY, lib.APU_E_UNSUPPORTED, lib.APU_E_DEVICE) == (
        INVALID,
        MEMORY,
        UNSUPPORTED,
        DEVICE,
    )
