"""Attention over scattered pages against a naive float64 softmax; bits that do not depend on the company of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import NO_PAGE, NONE, Q8_0, Plan, Rig, Step

from apu_engine._native import Device, InvalidError, lib

PAGES = 40
VOCABULARY = 64


@dataclass
class Case:
    """One attention op over random pages; row r of a step has the query of token r % 64."""

    heads: int = 6
    kv_heads: int = 2
    d: int = 32
    dv: int = 32
    window: int = 0
    kv: Any = np.float32
    cap: float = 0.0
    sinks: bool = False
    rows: int = 64

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.rig = Rig(rows=self.rows, vocabulary=VOCABULARY, positions=PAGES * 128)
        self.q = rng.standard_normal((VOCABULARY, self.heads * self.d)).astype(np.float32) * 2
        q = self.rig.input(self.q, "q")
        options = {"dtype": self.kv, "window": self.window}
        self.k_state = self.rig.state("k", self.kv_heads, self.d, PAGES, keys=True, **options)
        self.v_state = self.rig.state("v", self.kv_heads, self.dv, PAGES, **options)
        self.k, self.v = (
            self.rig.fill(state, rng.standard_normal((PAGES, self.kv_heads, 128, size)))
            for state, size in ((self.k_state, self.d), (self.v_state, self.dv))
        )
        self.sink = rng.standard_normal(self.heads).astype(np.float32) if self.sinks else None
        self.scale = self.d**-0.5
        self.out = self.rig.scratch("out", self.heads * self.dv)
        self.rig.op(
            lib.APU_OP_ATTENTION,
            ins=(q,),
            outs=(self.out,),
            weights=(NONE if self.sink is None else self.rig.weight("sinks", self.sink),),
            states=(self.k_state, self.v_state),
            floats=(self.scale, self.cap),
        )

    def expected(self, token: int, position: int, table: list[int]) -> NDArray[np.float64]:
        """(H * dv) of one row."""
        first = max(0, position - self.window + 1) if self.window else 0
        rows = [(table[p // 128], p % 128) for p in range(first, position + 1)]
        pages, offsets = (np.array(x) for x in zip(*rows, strict=True))
        out = []
        for h in range(self.heads):
            kv = h * self.kv_heads // self.heads
            k, v = self.k[pages, kv, offsets], self.v[pages, kv, offsets]
            s = k @ self.q[token].reshape(self.heads, self.d)[h].astype(np.float64) * self.scale
            s = self.cap * np.tanh(s / self.cap) if self.cap else s
            top = max(s.max(), self.sink[h]) if self.sink is not None else s.max()
            e = np.exp(s - top)
            total = e.sum() + (np.exp(self.sink[h] - top) if self.sink is not None else 0)
            out.append(e @ v / total)
        return np.concatenate(out)

    def run(self, plan: Plan, sequences: list[tuple[int, int, list[int]]]) -> NDArray[np.float32]:
        """(T, H * dv) of a step with (position, rows, table) per sequence."""
        step, row = Step(1), 0
        for position, count, table in sequences:
            step.sequence([(row + i) % VOCABULARY for i in range(count)], position, [table])
            row += count
        plan.run(step)
        return plan.read(self.out, row)

    def check(self, plan: Plan, sequences: list[tuple[int, int, list[int]]]) -> None:
        found, row = self.run(plan, sequences), 0
        for position, count, table in sequences:
            for i in range(count):
                expected = self.expected(row % VOCABULARY, position + i, table)
                # Q8_0: 16 bits of queries whose largest element in 32 is about 6.
                np.testing.assert_allclose(found[row], expected, atol=3e-4 if self.kv == Q8_0 else 3e-5)
                row += 1


SCATTERED = [np.random.default_rng(i).permutation(PAGES).tolist() for i in range(2)]
A, B, C = SCATTERED[0][:16], SCATTERED[0][16:28], SCATTERED[0][28:]
RAGGED = [(0, 1, B), (1000, 37, A), (255, 3, C)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv": np.float16},
        {"kv": Q8_0},
        {"heads": 8, "kv_heads": 8},
        {"heads": 8, "kv_heads": 8, "kv": Q8_0, "d": 64, "dv": 96},
        {"heads": 14, "kv_heads": 2, "kv": Q8_0, "d": 128, "dv": 256},
        {"heads": 8, "kv_heads": 1, "d": 48, "dv": 80},
        {"heads": 40, "kv_heads": 1, "d": 16, "dv": 16},
        {"window": 100},
        {"heads": 5, "kv_heads": 1, "kv": np.float16, "d": 20, "dv": 7},
        {"window": 300, "kv": np.float16},
        {"window": 300, "kv": Q8_0},
        {"cap": 1.5},
        {"sinks": True},
        {"sinks": True, "window": 64, "cap": 3.0},
    ],
    ids=str,
)
def test_against_naive(options: dict[str, Any], threads: int) -> None:
    case = Case(**options)
    with Device("cpu", threads=threads) as device, case.rig.build(device) as plan:
        for sequences in (
            [(0, 1, A)],
            [(127, 1, A)],
            [(128, 2, A)],
            [(1999, 1, A)],
            [(250, 60, A)],
            [(0, 64, A)],
            RAGGED,
            [(900, 1, A), (130, 1, B), (511, 1, C)],
        ):
            case.check(plan, sequences)


@pytest.mark.parametrize("kv", [np.float16, Q8_0])
@pytest.mark.parametrize("window", [0, 200])
def test_bits_depend_on_nothing_else(window: int, kv: Any) -> None:
    """A row alone, in a prefill, beside others, with other page ids, on any number of workers."""
    results: dict[str, list[NDArray[np.float32]]] = {"prefill": [], "single": [], "ragged": [], "few": []}
    for threads in (1, 2, 4):
        case = Case(window=window, kv=kv)
        with Device("cpu", threads=threads) as device, case.rig.build(device) as plan:
            results["prefill"].append(case.run(plan, [(600, 64, A)])[:4])
            single = []
            for i in range(4):
                step = Step(1).sequence([i], 600 + i, [A])
                plan.run(step)
                single.append(plan.read(case.out, 1)[0])
            results["single"].append(np.stack(single))
            results["few"].append(case.run(plan, [(600, 4, A)]))
            results["ragged"].append(case.run(plan, [(600, 4, A), (7, 33, B), (511, 20, C)])[:4])
    for name, values in results.items():
        for value in values:
            assert np.array_equal(value, results["prefill"][0]), name


def test_freed_pages_are_not_read(device: Device) -> None:
    case = Case(window=100)
    with case.rig.build(device) as plan:
        table = [NO_PAGE, NO_PAGE, *A[2:4]]
        case.check(plan, [(400, 10, table)])  # the first row sees 301 and on
        with pytest.raises(InvalidError, match="sequence 0 needs page 1 of group 0, which was freed"):
            case.run(plan, [(354, 1, table)])


@pytest.mark.parametrize("kv", [np.float16, Q8_0])
def test_long_context_uses_spread(device: Device, kv: Any) -> None:
    """One row over 5,000 positions: many spans, folded as in a prefill's row."""
    case = Case(kv=kv)
    table = SCATTERED[1]
    with case.rig.build(device) as plan:
        case.check(plan, [(5000, 1, table)])
        alone = case.run(plan, [(5000, 1, table)])[0]
        block = case.run(plan, [(5000, 64, table)])[0]
        assert np.array_equal(alone, block)
