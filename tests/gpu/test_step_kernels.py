"""The kernels at both ends of a submission: a packed step reaches its sections, results come back, turns are kept."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from shim import Buffer, Shim

SLOTS, UNIT, HEADER, BLOCKS, THREADS = 4, 16, 128, 4, 256
GROUPS = 2
RAN, CANCELLED, LOST = 0, 1, 2


@pytest.fixture(params=[(32, False), (32, True), (64, False), (64, True)], ids=lambda p: f"w{p[0]}{'r' * p[1]}")
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim(["step.hip"], wave=request.param[0], reverse=request.param[1])


class Pinned:
    """Four slots as the host packs them, the sections on the device, and what the kernels answer."""

    def __init__(self, shim: Shim, turn: int, rows: int, sequences: int, outputs: int, pages: int, extras: int) -> None:
        self.shim, self.turn = shim, turn
        self.counts = {"rows": rows, "sequences": sequences, "outputs": outputs, "pages": pages}
        rng = np.random.default_rng(turn)
        sizes = [rows * 16, sequences * 8, sequences * GROUPS * 16, pages * 4, outputs * 80]
        self.sections = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        packed = b"".join(section.tobytes() + bytes(-len(section) % UNIT) for section in self.sections)
        room = max(len(packed), BLOCKS * THREADS * UNIT)
        self.ending_at = HEADER + room
        self.slot_bytes = -(-(self.ending_at + 16 + outputs * 16) // 256) * 256
        self.extras = rng.integers(0, 256, extras * UNIT, dtype=np.uint8)
        self.extras_to = shim.output(extras * UNIT + UNIT, np.uint8)
        header = shim.args(
            "StepHeader",
            turn=turn,
            extras_units=extras,
            counts=self.counts,
            extras_from=shim.input(np.append(self.extras, np.zeros(UNIT, np.uint8))).address,
            extras_to=self.extras_to.address,
            top_ids=0x1000,
            top_logprobs=0x2000,
            logits=0x3000,
            hidden=0x4000,
        )
        host = np.full(SLOTS * self.slot_bytes, 0xEE, np.uint8)
        slot = host[turn % SLOTS * self.slot_bytes :]
        slot[: ctypes.sizeof(header)] = np.frombuffer(bytes(header), np.uint8)
        slot[HEADER : HEADER + len(packed)] = np.frombuffer(packed, np.uint8)
        self.slots = shim.input(host, readonly=False)
        self.state = shim.input(shim.args("StepState", turn=turn), readonly=False)
        self.targets = [shim.output(-(-size // UNIT) * UNIT, np.uint8) for size in sizes]
        self.cells = shim.input(np.zeros(2, np.uint32), readonly=False)  # ended, cancelled

    def begin(self) -> Any:
        names = ("rows", "sequences", "slots", "pages", "outputs")
        args = self.shim.args(
            "StepBeginArgs",
            state=self.state,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            cancelled=self.cells.address + 4,
            to=dict(zip(names, (t.address for t in self.targets), strict=True)),
            groups=GROUPS,
        )
        self.shim.launch("step_begin", BLOCKS, THREADS, args)
        return self.shim.struct("StepState").from_buffer_copy(self.state.bytes)

    def end(self, results: Buffer) -> tuple[list[int], bytes]:
        args = self.shim.args(
            "StepEndArgs",
            state=self.state,
            results=results,
            endings=self.slots.address + self.ending_at,
            slot_bytes=self.slot_bytes,
            ended=self.cells,
        )
        self.shim.launch("step_end", 1, THREADS, args)
        at = self.turn % SLOTS * self.slot_bytes + self.ending_at
        ending = self.slots.bytes[at : at + 16 + self.counts["outputs"] * 16]
        return ending[:8].view(np.uint32).tolist(), ending[16:].tobytes()


@pytest.mark.parametrize(
    ("turn", "rows", "sequences", "outputs", "pages", "extras"),
    [(0, 1, 1, 1, 2, 0), (3, 9, 3, 0, 13, 0), (6, 700, 5, 40, 301, 70), (7, 1, 1, 300, 1, 1500)],
)
def test_a_step_there_and_back(
    shim: Shim, turn: int, rows: int, sequences: int, outputs: int, pages: int, extras: int
) -> None:
    pinned = Pinned(shim, turn, rows, sequences, outputs, pages, extras)
    state = pinned.begin()
    assert (state.status, state.turn) == (RAN, turn)
    assert {name: getattr(state.counts, name) for name in pinned.counts} == pinned.counts
    assert state.extras == pinned.extras_to.address
    assert (state.top_ids, state.top_logprobs, state.logits, state.hidden) == (0x1000, 0x2000, 0x3000, 0x4000)
    for target, section in zip(pinned.targets, pinned.sections, strict=True):
        assert np.array_equal(target.bytes[: len(section)], section)
    assert np.array_equal(pinned.extras_to.bytes[: extras * UNIT], pinned.extras)
    assert (pinned.extras_to.bytes[extras * UNIT :] == 0xFF).all()

    results = np.random.default_rng(1).integers(0, 256, outputs * 16 + 16, dtype=np.uint8)
    ending, copied = pinned.end(shim.input(results))
    assert ending == [turn, RAN]
    assert copied == results[: outputs * 16].tobytes()
    assert pinned.cells.array[0] == turn + 1
    assert shim.struct("StepState").from_buffer_copy(pinned.state.bytes).turn == turn + 1


@pytest.mark.parametrize("before", [8, 5])
def test_a_cancelled_step_has_nothing_to_do(shim: Shim, before: int) -> None:
    pinned = Pinned(shim, 5, 3, 1, 2, 1, 0)
    pinned.cells.array[1] = before
    state = pinned.begin()
    assert state.status == (CANCELLED if before > 5 else RAN)
    assert state.counts.rows == (0 if before > 5 else 3)
    ending, copied = pinned.end(shim.input(np.zeros(32, np.uint8)))
    assert ending == [5, state.status]
    assert (copied == b"\xee" * 32) == (before > 5)


def test_a_slot_of_another_turn_is_not_run(shim: Shim) -> None:
    pinned = Pinned(shim, 5, 3, 1, 2, 1, 0)
    pinned.state.bytes[:] = np.frombuffer(bytes(shim.args("StepState", turn=9)), np.uint8)
    state = pinned.begin()
    assert (state.status, state.counts.rows) == (LOST, 0)
    assert (pinned.targets[0].bytes == 0xFF).all()


@pytest.mark.parametrize("width", [1, 77, 5000])
def test_rows_of_outputs_that_want_them(shim: Shim, width: int) -> None:
    parts = min(max(-(-width // 1024), 1), 64)
    wants = [1, 4, 12, 8, 4]
    outputs = [shim.args("Output", want=want) for want in wants]
    rows = np.random.default_rng(width).standard_normal((6, width)).astype(np.float32)
    out = shim.output((6, width), np.float32)
    counts = shim.input(shim.args("StepCounts", rows=1, outputs=5))
    args = shim.args(
        "StepRowsArgs",
        step={"counts": counts, "outputs": shim.input(outputs)},
        **{"from": shim.input(rows)},
        to=shim.input(np.array([out.address], np.uint64)),
        width=width,
        parts=parts,
        want=4,
    )
    shim.launch("step_rows", (6, parts), THREADS, args)
    for i, want in enumerate([*wants, 0]):
        assert np.array_equal(out.array[i], rows[i]) if want & 4 else np.isnan(out.array[i]).all()


def test_mark(shim: Shim) -> None:
    cell = shim.output(1, np.uint32)
    shim.launch("step_mark", 1, 64, shim.args("StepMarkArgs", at=cell, value=17))
    assert cell.array[0] == 17
