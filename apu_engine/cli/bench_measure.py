"""Timed runs of a loaded model: seconds, the read limit in the same moment, and nanoseconds per op.

The engine's scheduler and runner are driven from the calling thread, without its queue. The read limit is measured
immediately before and after what is timed, on the model's own weights where they lie: on shared machines it changes
from one minute to the next, so that only the ratio of the two says how good a kernel is. Weights that fit in a cache
are read from it again and again, by the limit as by decoding.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import NO_PAGE, lib
from apu_engine.cli.bench import Case
from apu_engine.engine.job import Job, SamplingParams
from apu_engine.engine.pages import PagePool
from apu_engine.engine.runner import PlanRunner
from apu_engine.engine.scheduler import Scheduler
from apu_engine.engine.sequence import Sequence as Running
from apu_engine.plan import Plan, PlanSpec
from apu_engine.plan.cost import Cost, Rows, cost, decode_bytes, family, is_matrix, matrix_types
from apu_engine.plan.spec import State

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.engine.load import Runtime

READ_BYTES = 1 << 30  # of one measurement of the limit: 20 to 50 ms
MOST_PASSES = 64
GAP = 1 << 16  # weights that lie closer together are read as one range


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: seconds, the mean read limit (bytes/s) around it, and its profile when there is one."""

    seconds: float
    read_limit: float
    steps: tuple[Rows, ...] = ()
    step_seconds: tuple[float, ...] = ()
    nanoseconds: NDArray[np.uint64] | None = None  # (steps, ops)


class ReadLimit:
    """Plain reads of a model's weights in place, by all workers of its device."""

    def __init__(self, device: Device, spec: PlanSpec, parts: Sequence[int] = ()) -> None:
        self._device = device
        self.ranges = weight_ranges(spec, parts)
        size = sum(nbytes for _, nbytes in self.ranges)
        self._passes = min(max(1, READ_BYTES // max(size, 1)), MOST_PASSES)

    def measure(self) -> float:
        """Bytes per second over about READ_BYTES: the weights several times, or the first part of larger ones."""
        total, seconds = 0, 0.0
        for _ in range(self._passes):
            for address, nbytes in self.ranges:
                part = min(nbytes, READ_BYTES - total) if self._passes == 1 else nbytes
                if part <= 0:
                    break
                seconds += part / self._device.read_rate(address, part)
                total += part
        return total / seconds


def weight_ranges(spec: PlanSpec, parts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(address, bytes) where a plan's weights lie, in order, neighbours joined; not across the beginning of one of the
    `parts` that were given to the device: what lies before it may be nobody's.
    """
    begins = sorted(parts)
    segments = sorted((s.address, s.row_count * s.row_stride) for tensor in spec.tensors for s in tensor.segments)
    joined: list[tuple[int, int]] = []
    for address, nbytes in segments:
        begin = joined[-1][0] if joined else 0
        same = bisect_right(begins, begin) == bisect_right(begins, address)
        if joined and same and address <= sum(joined[-1]) + GAP:
            joined[-1] = (begin, max(sum(joined[-1]), address + nbytes) - begin)
        else:
            joined.append((address, nbytes))
    return joined


def fill_context(plan: Plan, sequence: Running, tokens: int, max_rows: int) -> None:
    """Gives a new sequence `tokens` tokens of context of random rows, in every page that a step can still see."""
    rng = np.random.default_rng(tokens)
    fp4 = {op.states[1] for op in plan.spec.ops if op.kind == lib.APU_OP_COMPRESS and op.ints[3] == lib.APU_ROUND_FP4}
    for group, table in enumerate(sequence.tables):
        for start in range(0, tokens, max_rows):
            table.cover(start, min(start + max_rows, tokens))
        states = [state for state in plan.spec.states if state.group == group]
        for page in table.entries:
            if page != NO_PAGE:
                plan.import_page(group, int(page), b"".join(_random_page(rng, s, s.id in fp4) for s in states))
    sequence.position = tokens
    sequence.last_token = int(sequence.prompt[-1])


def _random_page(rng: np.random.Generator, state: State, fp4: bool) -> bytes:
    """In whatever order a device keeps it: numbers that FP4 has; else bytes whose second highest bit is clear, so that
    F32, F16 and scales of blocks are finite and below 2.
    """
    if fp4 and state.dtype in (lib.APU_F32, lib.APU_F16):
        dtype = np.dtype(np.float32 if state.dtype == lib.APU_F32 else np.float16)
        levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype) / 8
        return levels[rng.integers(0, 16, state.page_bytes // dtype.itemsize)].tobytes()
    return (rng.integers(0, 256, state.page_bytes, np.uint8) & 0xBF).tobytes()


def measure(runtime: Runtime, test: Case, limit: ReadLimit, profile: bool = False, fill: bool = False) -> Sample:
    """One run of a test: the context is read or filled, then the limit, the test and the limit again."""
    runner = PlanRunner(runtime.loaded)
    plan = runtime.loaded.plan
    scheduler = Scheduler(PagePool(runner.groups), 1, runner.max_rows, runner.max_outputs)
    n_prompt, n_gen, n_depth = test
    rng = np.random.default_rng(n_depth)
    tokens = rng.integers(0, runner.vocabulary, max(n_depth + n_prompt, 1)).astype(np.int32)
    job = Job(
        tokens[: max(n_depth, 1)].tolist(), SamplingParams(temperature=0), n_gen + 1, frozenset(), lambda *_: None
    )
    reserved = scheduler.reserve(n_depth + n_prompt + n_gen)
    assert reserved is not None, "the context was made for the longest test"
    sequence = Running(job, 0.0, scheduler.pool.tables(), reserved)
    scheduler.add(sequence)
    steps: list[Rows] = []
    step_seconds: list[float] = []
    nanoseconds: list[NDArray[np.uint64]] = []

    def step() -> None:
        begin = time.perf_counter()
        (chunk,) = scheduler.next_step()
        runner.submit([chunk])
        for event in runner.wait():
            sequence.last_token = event.token
        sequence.position += chunk.count
        if profile:
            step_seconds.append(time.perf_counter() - begin)
            steps.append(Rows(chunk.count, int(chunk.sample), sequence.position))
            nanoseconds.append(plan.profile(True))

    if fill and n_depth:
        fill_context(plan, sequence, n_depth, runner.max_rows)
    while n_depth and sequence.in_prefill:
        step()
    if n_prompt:
        sequence.prompt = tokens
    plan.profile(profile)
    for record in (steps, step_seconds, nanoseconds):
        record.clear()
    try:
        before = limit.measure()
        start = time.perf_counter()
        while n_prompt and sequence.in_prefill:
            step()
        for _ in range(n_gen):
            step()
        seconds = time.perf_counter() - start
        around = (before + limit.measure()) / 2
    finally:
        plan.profile(False)
    return Sample(seconds, around, tuple(steps), tuple(step_seconds), np.array(nanoseconds) if profile else None)


def token_bytes(spec: PlanSpec, test: Case) -> tuple[int, int]:
    """(weight bytes, KV bytes) read per drawn token of a test, the KV cache by its mean length."""
    first, last = test.n_depth + 1, test.n_depth + test.n_gen
    contexts = np.unique(np.linspace(first, last, min(test.n_gen, 64)).round().astype(int))
    reads = [decode_bytes(spec, int(context)) for context in contexts]
    return reads[0][0], round(mean(kv for _, kv in reads))


# ---- profiles


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """The ops of one family: per drawn token of a generation test, per whole prompt of a prompt test.

    Rates and shares are medians over the runs; `share_of_limit` is against the read limit around the same run.
    """

    family: str
    op: str
    types: str  # of its matrices
    ops: int
    ms: float
    share: float  # of the time
    bytes: int
    gb_s: float
    share_of_limit: float
    gop_s: float  # multiplications and additions, 1e9 a second; 0 for what multiplies no matrix

    def as_dict(self) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


OUTSIDE = "outside ops"  # Python, submission, waking of workers
ALL_MATRICES = "all matrices"
ALL_ELSE = "all else"


def profile_lines(spec: PlanSpec, test: Case, samples: Sequence[Sample]) -> list[ProfileLine]:
    """Families by descending time and what no op accounts for; then sums: the ops with matrices by the types of those,
    all of them, and everything else.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    by_type: dict[str, list[int]] = {}
    matrices = []
    for index, op in enumerate(spec.ops):
        types = matrix_types(spec, op)
        groups.setdefault((family(spec, op), op.name, types), []).append(index)
        if is_matrix(op):
            by_type.setdefault(types, []).append(index)
            matrices.append(index)
    lines = [_line(spec, test, samples, *names, indices) for names, indices in groups.items()]
    lines.sort(key=lambda line: -line.ms)
    walls = [_wall_ms(test, sample) for sample in samples]
    outside = median(_outside_ms(test, sample) for sample in samples)
    rest = ProfileLine(OUTSIDE, "", "", 0, max(outside, 0.0), max(outside, 0.0) / median(walls), 0, 0.0, 0.0, 0.0)
    sums = [_line(spec, test, samples, ALL_MATRICES, "", types, indices) for types, indices in by_type.items()]
    sums.sort(key=lambda line: -line.ms)
    if len(sums) != 1:
        sums.append(_line(spec, test, samples, ALL_MATRICES, "", "", matrices))
    others = [index for index, op in enumerate(spec.ops) if not is_matrix(op)]
    else_ = _line(spec, test, samples, ALL_ELSE, "", "", others)
    else_ = replace(else_, ms=else_.ms + rest.ms, share=else_.share + rest.share)
    return [*lines, rest, *sums, else_]


def _line(
    spec: PlanSpec, test: Case, samples: Sequence[Sample], name: str, op: str, types: str, indices: Sequence[int]
) -> ProfileLine:
    ms, share, rates, of_limit, gops = [], [], [], [], []
    nbytes = 0
    for sample in samples:
        spent = float(_op_ms(test, sample)[list(indices)].sum())
        total = _total_cost(spec, test, sample, indices)
        nbytes = total.nbytes
        rate = nbytes / spent * 1e3 if spent else 0.0
        ms.append(spent)
        share.append(spent / _wall_ms(test, sample))
        rates.append(rate)
        of_limit.append(rate / sample.read_limit)
        gops.append(2e-6 * total.multiply_adds / spent if spent else 0.0)
    rate, limit, speed = median(rates) / 1e9, median(of_limit), median(gops)
    return ProfileLine(name, op, types, len(indices), median(ms), median(share), nbytes, rate, limit, speed)


def _op_ms(test: Case, sample: Sample) -> NDArray[np.float64]:
    """(ops) milliseconds per token or prompt. The median over decode steps leaves out those that were interrupted."""
    assert sample.nanoseconds is not None, "profile_lines needs samples taken with profile=True"
    per_op = sample.nanoseconds.sum(0) if test.n_prompt else np.median(sample.nanoseconds, 0)
    return np.asarray(per_op * 1e-6, np.float64)


def _outside_ms(test: Case, sample: Sample) -> float:
    """What a step takes beside its ops, or all of a prompt's: within one step, as medians of ops do not add up."""
    assert sample.nanoseconds is not None
    beside = 1e3 * np.asarray(sample.step_seconds) - sample.nanoseconds.sum(1) * 1e-6
    return float(beside.sum() if test.n_prompt else np.median(beside))


def _wall_ms(test: Case, sample: Sample) -> float:
    return 1e3 * (sum(sample.step_seconds) if test.n_prompt else median(sample.step_seconds))


def _total_cost(spec: PlanSpec, test: Case, sample: Sample, indices: Sequence[int]) -> Cost:
    """Of all steps of a prompt, or of the middle one of a generation."""
    steps = sample.steps if test.n_prompt else (sample.steps[len(sample.steps) // 2],)
    costs = [cost(spec, spec.ops[index], step) for step in steps for index in indices]
    return Cost(*(sum(part) for part in zip(*costs, strict=True))) if costs else Cost()
