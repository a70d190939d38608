"""Arena placement: what lives together never overlaps, and nothing is much larger than it must be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from apu_engine._native import lib
from apu_engine.plan.liveness import ALIGNMENT, aligned, lifetimes, place
from apu_engine.plan.spec import Op, Tensor


def _tensor(number: int, size: int) -> Tensor:
    return Tensor(number, f"t{number}", "T D", (1, size), lib.APU_F32, lib.APU_ROWS_STEP)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Tensor], list[Op]]:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=14))
    tensors = [_tensor(i, size) for i, size in enumerate(sizes)]
    ids = st.integers(0, len(sizes) - 1)
    ops = draw(st.lists(st.tuples(st.lists(ids, max_size=3), st.lists(ids, min_size=1, max_size=3)), max_size=20))
    return tensors, [Op(lib.APU_OP_MATMUL, 0, tuple(reads), tuple(writes)) for reads, writes in ops]


@settings(max_examples=300, deadline=None)
@given(programs())
def test_living_tensors_never_overlap(program: tuple[list[Tensor], list[Op]]) -> None:
    tensors, ops = program
    total = place(tensors, ops)
    spans = lifetimes(ops)
    placed = [tensor for tensor in tensors if tensor.id in spans]
    for a in placed:
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.nbytes <= total
        for b in placed:
            together = spans[a.id][0] <= spans[b.id][1] and spans[b.id][0] <= spans[a.id][1]
            if a.id < b.id and together:
                assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    assert total <= sum(aligned(tensor.nbytes) for tensor in placed)


def test_a_chain_reuses_two_buffers() -> None:
    tensors = [_tensor(i, 256) for i in range(6)]
    ops = [Op(lib.APU_OP_MATMUL, 0, (i,), (i + 1,)) for i in range(5)]
    assert place(tensors, ops) == 2 * 1024


def test_in_place_is_one_tensor() -> None:
    tensors = [_tensor(0, 64), _tensor(1, 64)]
    ops = [Op(lib.APU_OP_RMS_NORM, 0, (0, 0), (0,)), Op(lib.APU_OP_MATMUL, 0, (0,), (1,))]
    place(tensors, ops)
    assert {tensors[0].offset, tensors[1].offset} == {0, 256}
