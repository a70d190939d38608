"""What `--full` measures on the devices: reads of CPU and GPU, graphs against single launches, memory strategies.

Each part frees what it took, and one that fails is a finding, not an end. Nothing takes more than an eighth of the
memory that is available. The GPU is the one that --device names; without one only the CPU is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from apu_engine.doctor.context import Context
from apu_engine.doctor.report import Check, absent, rounded
from apu_engine.doctor.strategies import strategies
from apu_engine.errors import ApuError, brief
from apu_engine.memory.bandwidth import PASSES, range_bytes
from apu_engine.memory.watchdog import MEASURING_SECONDS, Task, Watchdog
from apu_engine.options import format_size

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.plan import Plan
    from apu_engine.plan.spec import PlanSpec, Segment, Tensor
    from apu_engine.weights.model_file import TensorRef

# GB/s that users read on such machines, or the sum of their memory's data rates; far below, something is wrong
_USUAL = {"gfx1151": 204, "gfx1150": 120}
_LOW_SHARE = 0.7


def measure(ctx: Context) -> list[Check]:
    """All measurements, in the order of docs/doctor.md. A device that hangs ends the process with the watchdog's
    status: it cannot be waited for.
    """
    watchdog = Watchdog(MEASURING_SECONDS, cleanup=())
    try:
        with watchdog.during("reading memory with the CPU") as task:
            return _measure(ctx, task)
    finally:
        watchdog.close()


def _measure(ctx: Context, task: Task) -> list[Check]:
    found = [_try("cpu_bandwidth", lambda: cpu_bandwidth(ctx))]
    task.beat(f"opening device {ctx.request.device}")
    device, problem = _open(ctx)
    if device is None:
        names = ("gpu_bandwidth", "graph", "strategies")
        return found + [problem] + [absent(name, problem.value) for name in names]
    try:
        found.append(_runtime(device))
        task.beat("reading memory with the GPU")
        found.append(_try("gpu_bandwidth", lambda: gpu_bandwidth(ctx, device)))
        task.beat("running a tiny model on the GPU")
        found.append(_try("graph", lambda: graph(device)))
        found.append(_try("strategies", lambda: strategies(ctx, device, task)))
    finally:
        device.close()
    return found


def _try(id_: str, part: Callable[[], Check]) -> Check:
    try:
        return part()
    except (ApuError, OSError, MemoryError) as error:
        return Check(id_, "bad", f"failed: {brief(error)}")


def _open(ctx: Context) -> tuple[Device | None, Check]:
    """The GPU, or the check that says why there is none."""
    from apu_engine.device import open_device

    try:
        kernels = str(ctx.request.kernels) if ctx.request.kernels else None
        device, choice = open_device(ctx.request.device, kernels=kernels, threads=1)
    except ApuError as error:
        return None, Check("runtime", "bad", str(error).splitlines()[0])
    if device.props.kind != "cpu":
        return device, Check("runtime", "ok", device.props.name)
    device.close()
    if ctx.gpu is not None and ctx.request.device != "cpu":
        return None, Check("runtime", "bad", choice.reason)
    return None, absent("runtime", choice.reason)


def _runtime(device: Device) -> Check:
    props = device.props
    data = {
        "kind": props.kind,
        "name": props.name,
        "arch": props.arch,
        "version": props.driver_version,
        "ways": list(props.ways),
        "pageable": props.pageable,
    }
    ways = ", ".join(props.ways) or "none"
    value = f"{_version(props.kind, props.driver_version)}: {props.name}, {props.arch}; ways of registering: {ways}"
    return Check("runtime", "ok", value, data=data)


def _version(kind: str, number: int) -> str:
    """HIP counts 60443484 for 6.4.43484, CUDA 12080 for 12.8."""
    if kind == "hip":
        return f"HIP {number // 10**7}.{number // 10**5 % 100}.{number % 10**5}"
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def cpu_bandwidth(ctx: Context) -> Check:
    """Plain reads by all workers of memory that was written before."""
    from apu_engine._native import Device

    nbytes = range_bytes(ctx.machine.available)
    data = np.ones(nbytes, np.uint8)
    with Device("cpu") as device:
        rate = device.read_rate(data.__array_interface__["data"][0], nbytes, PASSES)
        threads = device.props.threads
    numbers = {"gb_per_s": rounded(rate / 1e9), "threads": threads, "bytes": nbytes}
    return Check("cpu_bandwidth", "ok", f"{rate / 1e9:.1f} GB/s with {threads} threads", data=numbers)


def gpu_bandwidth(ctx: Context, device: Device) -> Check:
    """Plain reads by the whole GPU of an allocation of its own."""
    from apu_engine._native import Region

    nbytes = range_bytes(device.free_memory())
    region = Region.alloc(device, nbytes)
    try:
        rate = device.read_rate(region.address, nbytes, PASSES) / 1e9
    finally:
        region.free()
    numbers = {"gb_per_s": rounded(rate), "bytes": nbytes}
    usual = _USUAL.get(device.props.arch, 0)
    value = f"{rate:.1f} GB/s of {format_size(nbytes)}"
    if rate < usual * _LOW_SHARE:
        remedy = ("see the power profile, the carve-out and other programs that use the GPU",)
        return Check(
            "gpu_bandwidth", "warn", f"{value}; about {usual} GB/s is usual for {device.props.arch}", remedy, numbers
        )
    return Check("gpu_bandwidth", "ok", value, data=numbers)


# ---------------------------------------------------------------- graphs


_DIMS = {"D": 128, "H": 2, "K": 1, "d": 64, "F": 256, "V": 256}
_LAYERS = 2
_PROMPT = (3, 141, 59, 26, 53, 58, 97, 93)
_DECODED = 8


def graph(device: Device) -> Check:
    """A tiny model of random weights, run as captured graphs and as single launches: the same bits."""
    with _tiny_plan(device, graph=True) as replayed:
        first = replayed()
    with _tiny_plan(device, graph=False) as eager:
        second = eager()
    same = first.tobytes() == second.tobytes()
    data = {"equal": same, "steps": len(first)}
    if not np.isfinite(first).all():
        return Check("graph", "bad", "the model's results are no numbers", ("run with --device cpu",), data)
    if same:
        return Check("graph", "ok", f"bit for bit, {len(first)} steps", data=data)
    differ = int((first.view(np.uint32) != second.view(np.uint32)).sum())
    value = f"{differ} of {first.size} results differ between graph and single launches"
    return Check("graph", "bad", value, ("run with --no-graph", "report this with the output of doctor --json"), data)


@contextmanager
def _tiny_plan(device: Device, *, graph: bool) -> Iterator[Callable[[], NDArray[np.float32]]]:
    """A function that runs the model and returns the logits of all steps, (steps, V)."""
    from apu_engine._native import Region, check, lib
    from apu_engine.plan import Plan, reserve_states

    weights = _Weights()
    spec = _build(weights)
    regions: list[Region] = []
    plan: Plan | None = None
    try:
        regions.append(Region.alloc(device, weights.data.nbytes))
        base = regions[0].address
        check(lib.apu_memory_copy(device.handle, base, weights.data.ctypes.data, weights.data.nbytes, 0, 1))
        for tensor in spec.tensors:
            tensor.segments = tuple(s._replace(address=s.address + base) for s in tensor.segments)
        regions += reserve_states(device, spec)
        plan = Plan(device, spec, graph=graph)
        yield lambda: _decode(plan)
    finally:
        if plan is not None:
            plan.destroy()
        for region in regions:
            region.free()


class _Weights:
    """A binder that puts random float32 weights one after another; addresses count from 0."""

    def __init__(self) -> None:
        from apu_engine.weights.model_file import TensorRef

        shapes = {"embed": "V D", "head_norm": "D"}
        for layer in range(_LAYERS):
            matrices = {"norm": "D", "q": "H*d D", "k": "K*d D", "v": "K*d D", "o": "D H*d", "up": "F D", "gate": "F D"}
            shapes |= {f"{layer}.{name}": letters for name, letters in {**matrices, "down": "D F"}.items()}
        self.refs: dict[str, TensorRef] = {}
        self.letters = shapes
        offset = 0
        for name, letters in shapes.items():
            shape = tuple(int(np.prod([_DIMS[letter] for letter in axis.split("*")])) for axis in letters.split())
            nbytes = 4 * int(np.prod(shape))
            self.refs[name] = TensorRef(name, 0, shape, 0, offset, nbytes)
            offset += (nbytes + 255) // 256 * 256
        data = np.random.default_rng(20).standard_normal(offset // 4, np.float32)
        self.data: NDArray[np.float32] = data / np.float32(8)

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        from apu_engine.plan.spec import Segment

        rows = ref.nbytes // ref.row_bytes
        return (Segment(ref.offset, 0, rows, ref.row_bytes, 0),)


def _build(weights: _Weights) -> PlanSpec:
    """Llama's layer, from every kind of op that a dense model has."""
    from apu_engine._native import lib
    from apu_engine.plan.builder import PlanBuilder
    from apu_engine.plan.operands import Rope
    from apu_engine.plan.spec import Limits

    limits = Limits(max_rows=len(_PROMPT), max_sequences=1, max_outputs=1, max_positions=128, vocabulary=_DIMS["V"])
    b = PlanBuilder(weights, limits, _DIMS)

    def weight(name: str) -> Tensor:
        return b.weight(weights.refs[name], weights.letters[name])

    x = b.embed(weight("embed"))
    for layer in range(_LAYERS):
        b.layer = layer
        cache = b.kv_cache(0, 0, 1, lib.APU_F16)
        own = {name: weight(f"{layer}.{name}") for name in ("norm", "q", "k", "v", "o", "up", "gate", "down")}
        q, k, v = b.matmul(("q", "k", "v"), x, (own["q"], own["k"], own["v"]), norm=own["norm"], eps=1e-5)
        b.rope_store(q, k, v, Rope(_DIMS["d"]), cache)
        attended = b.attention(q, cache, _DIMS["d"] ** -0.5)
        (x,) = b.matmul(("x",), attended, (own["o"],), residual=x)
        hidden = b.glu("hidden", x, own["gate"], own["up"], "silu", norm=own["norm"], eps=1e-5)
        (x,) = b.matmul(("y",), hidden, (own["down"],), residual=x)
    b.layer = -1
    (logits,) = b.matmul(("logits",), b.gather_norm(x, weight("head_norm"), 1e-5), (weight("embed"),), head=True)
    b.sample(logits)
    return b.finish()


def _decode(plan: Plan) -> NDArray[np.float32]:
    """The prompt, then greedy steps of one row."""
    from apu_engine.plan.step import LOGITS, SAMPLE

    step = plan.new_step()
    found = []
    tokens, position = list(_PROMPT), 0
    for _ in range(_DECODED):
        step.clear()
        begin = step.add_sequence(tokens, position, [[0]])
        step.add_output(begin + len(tokens) - 1, SAMPLE + LOGITS)
        plan.run(step)
        found.append(step.logits[0].copy())
        position += len(tokens)
        tokens = [int(step.tokens[0])]
    return np.stack(found)
