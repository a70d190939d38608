"""The builder refuses shapes that do not fit, and the arena and dump of a real plan hold together."""

from __future__ import annotations

import pytest

from apu_engine import arch
from apu_engine._native import NONE, lib
from apu_engine.errors import ApuError, ModelError
from apu_engine.plan import Limits, OfflineBinder, PlanBuilder, PlanSpec, Tensor
from apu_engine.plan.cost import decode_bytes
from apu_engine.plan.dump import lines, render
from apu_engine.plan.liveness import lifetimes
from apu_engine.plan.weights import segments_in
from apu_engine.weights.model_file import TensorRef
from apu_engine.weights.opening import open_model
from models import TinyModel

DIMS = {"D": 8, "H": 2, "K": 1, "d": 4, "F": 16, "V": 10}


def _builder() -> PlanBuilder:
    return PlanBuilder(OfflineBinder(), Limits(4, 2, 3, 100, 10), DIMS)


def _weight(b: PlanBuilder, name: str, letters: str, shape: tuple[int, ...] | None = None) -> Tensor:
    shape = shape or b.shape(letters)
    nbytes = 4
    for size in shape:
        nbytes *= size
    return b.weight(TensorRef(name, 0, shape, 0, 64, nbytes), letters)


def _plan(tiny: TinyModel) -> PlanSpec:
    return arch.plan(open_model(tiny.path), arch.PlanOptions(ctx=300, max_rows=16, max_outputs=8))


def test_letters() -> None:
    assert _builder().shape("T H*d") == (4, 8)
    assert _builder().shape("O V") == (3, 10)


@pytest.mark.parametrize(
    ("emit", "says"),
    [
        (lambda b, x: b.embed(_weight(b, "table", "V D", (10, 7))), "table.*expected shape"),
        (lambda b, x: b.matmul(("y",), x, [_weight(b, "m", "F D", (16, 9))]), "m: expected"),
        (lambda b, x: b.matmul(("y",), x, []), "1 to 4 matrices"),
        (lambda b, x: b.rms_norm("n", x, _weight(b, "w", "F"), 1e-5), "w.*expected shape"),
        (lambda b, x: b.gather_norm(x, _weight(b, "w", "F"), 1e-5), "w.*expected shape"),
        (lambda b, x: b.matmul(("y",), x, [_weight(b, "m", "F D")], residual=x), "another shape"),
        (lambda b, x: b.sample(x), "expected shape"),
    ],
)
def test_shapes_that_do_not_fit(emit, says: str) -> None:  # type: ignore[no-untyped-def]
    b = _builder()
    x = b.embed(_weight(b, "token_embd", "V D"))
    with pytest.raises(ApuError, match=says):
        emit(b, x)


def test_a_plan_ends_with_sample() -> None:
    b = _builder()
    b.embed(_weight(b, "token_embd", "V D"))
    with pytest.raises(ApuError, match="sample"):
        b.finish()


def test_operands_of_a_real_plan(tiny_llama: TinyModel) -> None:
    spec = _plan(tiny_llama)
    assert spec.slices == {"forward": (0, len(spec.ops) - 1), "sample": (len(spec.ops) - 1, len(spec.ops))}
    written: set[int] = set()
    for op in spec.ops:
        assert set(op.reads()) <= written, f"{op.name} reads what nothing wrote"
        written |= set(op.writes())
        for weight in op.weights:
            assert weight == NONE or spec.tensors[weight].is_weight
    assert spec.ops[0].kind == lib.APU_OP_EMBED and spec.ops[-1].kind == lib.APU_OP_SAMPLE
    assert sum(tensor.is_weight for tensor in spec.tensors) == len(tiny_llama.tensors)
    spans = lifetimes(spec.ops)
    live = max(
        sum(t.nbytes for t in spec.tensors if t.id in spans and spans[t.id][0] <= at <= spans[t.id][1])
        for at in range(len(spec.ops))
    )
    assert live <= spec.arena_bytes <= 1.5 * live


def test_decode_reads_every_matrix_once(tiny_llama: TinyModel, tiny_gemma3: TinyModel) -> None:
    weights, kv = decode_bytes(_plan(tiny_llama), 200)
    table = tiny_llama.tensors["token_embd.weight"]
    everything = sum(values.nbytes for values in tiny_llama.tensors.values())
    assert weights == everything - table.nbytes + table[0].nbytes
    assert kv == 200 * 2 * 2 * 2 * 16 * 4
    _, kv = decode_bytes(_plan(tiny_gemma3), 200)
    assert kv == (5 * 24 + 200) * 2 * 32 * 4


def test_dump(tiny_gemma3: TinyModel) -> None:
    spec = _plan(tiny_gemma3)
    text = render(spec)
    assert "the same in layers 0-4" in text
    assert "window 24" in text and "attn_q (128 64) F32" in text and "D = 64" in text
    assert sum(line.weight_bytes for line in lines(spec)) == decode_bytes(spec, 1)[0]


def test_split_cuts_between_rows_at_chunk_ends() -> None:
    ref = TensorRef("w", 0, (10, 8), 0, 100, 320)
    first, second = segments_in(ref, lambda _: [(0, 5000, 228), (228, 9000, 1000)])
    assert first == (5100, 0, 4, 32, 0)
    assert second == (9000, 4, 6, 32, 1000 - 192)
    with pytest.raises(ModelError, match="row 3 of 10"):
        segments_in(ref, lambda _: [(0, 5000, 220), (220, 9000, 1000)])
    with pytest.raises(ModelError, match="row 0 of 10"):
        segments_in(ref, lambda _: [(0, 5000, 50)])
