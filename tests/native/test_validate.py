"""Broken plans and steps, one field each: refused with a message that names the op, tensor or row and both values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rig import NO_PAGE, NONE, OUTPUT, Rig, Step, refused

from apu_engine._native import Device, InvalidError, NativeError, UnsupportedError, ffi, lib

D, HEADS, KV_HEADS, SIZE, VOCABULARY, FEED = 32, 4, 2, 8, 64, 96


def model() -> Rig:
    """One layer of everything; op numbers: 0 embed, 1 qkv, 2 rope, 3 attention, 4 o, 5 gate-up, 6 down, 7 norm,
    8 gather, 9 head, 10 sample."""
    rng = np.random.default_rng(0)

    def rand(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal(shape).astype(np.float32)

    rig = Rig(rows=8, sequences=2, outputs=4, vocabulary=VOCABULARY, positions=512)
    x, q = rig.scratch("x", D), rig.scratch("q", HEADS * SIZE)
    k, v = rig.scratch("k", KV_HEADS * SIZE), rig.scratch("v", KV_HEADS * SIZE)
    a, h = rig.scratch("a", HEADS * SIZE), rig.scratch("h", FEED)
    last, logits = rig.scratch("last", D, OUTPUT), rig.scratch("logits", VOCABULARY, OUTPUT)
    table, norm = rig.weight("table", rand(VOCABULARY, D)), rig.weight("norm", rand(D))
    wq, wk, wv = (rig.weight(n, rand(s, D)) for n, s in (("wq", HEADS * SIZE), ("wk", 16), ("wv", 16)))
    wo, gate, up = (
        rig.weight("wo", rand(D, HEADS * SIZE)),
        rig.weight("gate", rand(FEED, D)),
        rig.weight("up", rand(FEED, D)),
    )
    down, bias = rig.weight("down", rand(D, FEED)), rig.weight("bias", rand(D))
    head_norm = rig.weight("head_norm", rand(SIZE))
    ks, vs = rig.state("keys", KV_HEADS, SIZE, 6), rig.state("values", KV_HEADS, SIZE, 6)
    rig.op(lib.APU_OP_EMBED, outs=(x,), weights=(table,), floats=(1.0,))
    rig.op(lib.APU_OP_MATMUL, ins=(x,), outs=(q, k, v), weights=(norm, wq, wk, wv), floats=(1e-5,), layer=0)
    rope = (SIZE, lib.APU_ROPE_PAIRS, 256)
    rig.op(
        lib.APU_OP_ROPE_STORE,
        ins=(q, k, v),
        outs=(q,),
        weights=(head_norm, NONE, NONE),
        states=(ks, vs),
        ints=rope,
        floats=(1e-5, 1e4, 0.5, 1.0, 1.0, 32.0, 1.0),
        layer=0,
    )
    rig.op(lib.APU_OP_ATTENTION, ins=(q,), outs=(a,), states=(ks, vs), floats=(0.3,), layer=0)
    rig.op(lib.APU_OP_MATMUL, ins=(a, x), outs=(x,), weights=(NONE, wo, NONE, NONE, NONE, bias), layer=0)
    rig.op(
        lib.APU_OP_MATMUL,
        ins=(x,),
        outs=(h,),
        weights=(norm, gate, up),
        ints=(lib.APU_ACT_SILU,),
        floats=(1e-5,),
        layer=0,
    )
    rig.op(lib.APU_OP_MATMUL, ins=(h, x), outs=(x,), weights=(NONE, down), layer=0)
    rig.op(lib.APU_OP_RMS_NORM, ins=(x,), outs=(x,), weights=(norm,), floats=(1e-5,))
    rig.op(lib.APU_OP_GATHER_NORM, ins=(x,), outs=(last,), weights=(norm,), floats=(1e-5,))
    rig.op(lib.APU_OP_MATMUL, ins=(last,), outs=(logits,), weights=(NONE, table))
    rig.op(lib.APU_OP_SAMPLE, ins=(logits,))
    return rig


def named(rig: Rig, name: str) -> dict[str, Any]:
    return next(item for item in (*rig.tensors, *rig.states) if item["name"] == name)


def ident(rig: Rig, name: str) -> int:
    return next(i for i, item in enumerate(rig.tensors) if item["name"] == name)


def segment(rig: Rig, name: str) -> dict[str, Any]:
    return rig.segments[rig.planes[named(rig, name)["plane_begin"]]["segment_begin"]]


def put(target: Callable[[Rig], dict[str, Any]], key: str, value: Any) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        target(rig)[key] = value(rig) if callable(value) else value

    return change


def operand(op: int, field: str, index: int, value: Any) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.ops[op][field][index] = value(rig) if callable(value) else value

    return change


def tensor(name: str, key: str, value: Any) -> Callable[[Rig], None]:
    return put(lambda rig: named(rig, name), key, value)


def part(name: str, key: str, value: Any) -> Callable[[Rig], None]:
    return put(lambda rig: segment(rig, name), key, value)


def plane(name: str, key: str, value: Any) -> Callable[[Rig], None]:
    return put(lambda rig: rig.planes[named(rig, name)["plane_begin"]], key, value)


def both(*changes: Callable[[Rig], None]) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        for one in changes:
            one(rig)

    return change


def as_integers(name: str) -> Callable[[Rig], None]:
    return both(tensor(name, "dtype", lib.APU_I32), plane(name, "dtype", lib.APU_I32))


def limit(**limits: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.limits.update(limits)


BROKEN: list[tuple[Callable[[Rig], None], str]] = [
    # the plan as a whole
    (limit(tensors=ffi.NULL), "tensors is NULL, but its count is"),
    (limit(names_bytes=1), "names does not end in NUL"),
    (limit(max_rows=0), "max_rows is 0, expected 1 to 65536"),
    (limit(max_rows=9), r'tensor "x" \(8, 32\): expected 9 rows, the plan\'s maximum'),
    (limit(max_sequences=9), r"max_sequences is 9, expected 1 to max_rows \(8\)"),
    (limit(max_outputs=3), r'"last" \(4, 32\): expected 3 rows'),
    (limit(vocabulary=0), "vocabulary is 0"),
    (limit(vocabulary=65), r'op 0 EMBED: w0 "table" \(64, 32\): expected at least 65 rows, the vocabulary'),
    (limit(vocabulary=63), r'op 10 SAMPLE: in0 "logits": expected 63 elements a row, found 64'),
    (limit(max_positions=0), "max_positions is 0"),
    (limit(op_count=0), "it has no ops"),
    (limit(group_count=0), 'state "keys": group 0, but there are 0'),
    (limit(group_count=2), "no state is in group 1"),
    (limit(group_count=3), "3 groups of 2 states"),
    (limit(arena_bytes=1024), r'tensor "\w+": \d+ bytes at \d+ do not fit into the arena of 1024 bytes'),
    # tensors
    (tensor("x", "name_offset", 10**6), r"tensor 0: its name is at 1000000 of \d+ bytes of names"),
    (tensor("x", "ndim", 0), 'tensor "x": 0 dimensions, expected 1 to 4'),
    (tensor("x", "ndim", 5), 'tensor "x": 5 dimensions, expected 1 to 4'),
    (tensor("x", "kind", 7), 'tensor "x": unknown kind 7'),
    (tensor("x", "rows", 3), 'tensor "x": unknown kind of rows 3'),
    (tensor("x", "dtype", lib.APU_F16), r'tensor "x": scratch of dtype F16 \(1\), expected F32 or I32'),
    (tensor("x", "offset", 32), 'tensor "x": offset 32 is not a multiple of 64'),
    (tensor("x", "offset", 2**63), "do not fit into the arena"),
    (tensor("x", "shape", (8, 0)), r'tensor "x": shape \(8, 0\) is empty or too large'),
    (tensor("x", "shape", (8, 2**24 + 1)), r'"x" \(8, 16777217\): expected at most 65536 rows of 16777216 elements'),
    (
        both(tensor("x", "rows", lib.APU_ROWS_FIXED), tensor("x", "shape", (2**26, 1))),
        r'"x" \(67108864, 1\): expected at most 65536 rows',
    ),
    (tensor("wq", "shape", (2**40, 2**40)), r'tensor "wq": shape .* is empty or too large'),
    (tensor("wq", "dtype", 99), 'tensor "wq": dtype 99 is not supported'),
    (tensor("wq", "dtype", lib.APU_Q4_K), 'tensor "wq": rows of 32 elements are not whole blocks of Q4_K'),
    (tensor("wq", "plane_count", 3), 'tensor "wq": 3 planes, expected 1 or 2'),
    (tensor("wq", "plane_count", 2), 'tensor "wq": second plane of kind 0, expected scales'),
    (tensor("wq", "plane_begin", 99), r'tensor "wq": plane 99, but there are \d+'),
    (plane("wq", "kind", lib.APU_PLANE_SCALE), 'tensor "wq": plane of kind 1, expected data'),
    (plane("wq", "dtype", lib.APU_F16), 'tensor "wq": its plane is F16, expected F32'),
    (plane("wq", "segment_begin", 99), r'tensor "wq": segments 99 to 100, but there are \d+'),
    (plane("wq", "segment_count", 2**32 - 1), r'tensor "wq": segments \d+ to \d+, but there are \d+'),
    (plane("wq", "segment_count", 0), 'tensor "wq": its segments hold 0 rows, expected 32'),
    (part("wq", "row_begin", 1), 'tensor "wq": segment 0 begins at row 1, expected 0: segments must adjoin'),
    (part("wq", "row_count", 31), 'tensor "wq": its segments hold 31 rows, expected 32'),
    (part("wq", "row_count", 33), 'tensor "wq": segment 0 has 33 rows, expected 1 to 32'),
    (part("wq", "row_count", 0), 'tensor "wq": segment 0 has 0 rows, expected 1 to 32'),
    (part("wq", "address", 0), 'tensor "wq": segment 0 has address 0'),
    (part("wq", "row_stride", 127), 'tensor "wq": segment 0 has rows of 128 bytes at a stride of 127'),
    (part("wq", "row_stride", 2**63), 'tensor "wq": segment 0 wraps around the address space'),
    (part("wq", "address", 2**64 - 64), 'tensor "wq": segment 0 wraps around the address space'),
    # states
    (tensor("keys", "kind", 2), 'state "keys": unknown kind 2'),
    (tensor("keys", "dtype", lib.APU_Q8_0), 'state "keys": heads of 8 elements are not whole blocks of Q8_0'),
    (tensor("keys", "dtype", 99), 'state "keys": dtype 99 is not supported'),
    (tensor("keys", "dtype", lib.APU_BF16), r'state0 "keys": expected F32, F16 or Q8_0, found BF16 \(30\)'),
    (tensor("keys", "heads", 0), 'state "keys": 0 heads of 8 elements in 6 pages: expected at least 1 of each'),
    (tensor("keys", "heads", 3), 'state "keys": pages of 8192 bytes, expected at least 12288'),
    (tensor("keys", "rows_per_page", 100), 'state "keys": 100 rows a page, expected a divisor of 128'),
    (tensor("keys", "rows_per_page", 32), 'state0 "keys": expected 128 rows a page, found 32'),
    (tensor("keys", "page_bytes", 8194), 'state "keys": address .* or page size 8194 is 0 or no multiple of 4'),
    (tensor("keys", "address", 0), 'state "keys": address 0 or page size'),
    (tensor("keys", "address", 2**64 - 4096), 'state "keys": its pages wrap around the address space'),
    (tensor("values", "window", 7), r'state0 "keys" \(group 0, 2 heads, window 0\) and state1 "values" \(.*window 7\)'),
    (tensor("values", "kind", lib.APU_STATE_FIXED), 'state "values": group 0 mixes paged and fixed states'),
    # operands
    (put(lambda rig: rig.ops[3], "kind", 99), "op 3: unknown kind 99"),
    (operand(1, "in", 0, 999), r"op 1 MATMUL \(layer 0\): in0 is 999, but there are \d+ tensors"),
    (operand(1, "in", 0, -2), "in0 is -2, but there are"),
    (operand(1, "in", 0, NONE), r"op 1 MATMUL \(layer 0\): in0 is missing"),
    (operand(1, "in", 2, 0), "in2 is 0, but this op does not use it: expected -1"),
    (operand(1, "state", 0, 0), "state0 is 0, but this op does not use it"),
    (operand(1, "w", 1, lambda rig: ident(rig, "x")), 'w1 "x": expected a weight, found scratch'),
    (operand(1, "out", 0, lambda rig: ident(rig, "wq")), 'out0 "wq": expected a scratch tensor, found a weight'),
    (operand(7, "f", 0, float("nan")), "op 7 RMS_NORM: f0 is nan, expected a finite number"),
    (operand(7, "f", 0, -1.0), r"op 7 RMS_NORM: f0 \(eps\) is -1, expected at least 0"),
    (as_integers("table"), r'op 0 EMBED: w0 "table": no kernel reads dtype I32 \(26\)'),
    (as_integers("wq"), r'op 1 MATMUL \(layer 0\): w1 "wq": no kernel reads dtype I32 \(26\)'),
    (as_integers("norm"), r'op 1 MATMUL \(layer 0\): w0 "norm": no kernel reads dtype I32 \(26\)'),
    # shapes
    (operand(0, "w", 0, lambda rig: ident(rig, "bias")), r'op 0 EMBED: w0 "bias": expected shape'),
    (operand(0, "out", 0, lambda rig: ident(rig, "h")), 'op 0 EMBED: out0 "h": expected 32 elements a row, found 96'),
    (operand(0, "out", 0, lambda rig: ident(rig, "last")), 'op 0 EMBED: out0 "last": expected step rows, found output'),
    (operand(7, "w", 0, lambda rig: ident(rig, "head_norm")), r'w0 "head_norm": expected shape \(32\), found \(8\)'),
    (operand(7, "in", 1, lambda rig: ident(rig, "last")), r'in1 "last" \(4, 32\): its rows differ from those of "x"'),
    (operand(1, "w", 1, lambda rig: ident(rig, "down")), r'w1 "down": expected shape \(any, 32\), found \(32, 96\)'),
    (operand(1, "w", 0, lambda rig: ident(rig, "head_norm")), r'w0 "head_norm": expected shape \(32\), found \(8\)'),
    (operand(1, "out", 1, lambda rig: ident(rig, "h")), 'out1 "h": expected 16 elements a row, found 96'),
    (operand(1, "out", 1, NONE), "out1 is missing"),
    (operand(1, "out", 3, lambda rig: ident(rig, "h")), "out3 has no matrix w4"),
    (operand(1, "w", 1, NONE), "w1 is missing"),
    (operand(1, "w", 2, NONE), "out1 has no matrix w2"),
    (operand(1, "w", 8, lambda rig: ident(rig, "bias")), "w8 is a bias without its matrix w4"),
    (operand(4, "w", 5, lambda rig: ident(rig, "head_norm")), r'w5 "head_norm": expected shape \(32\), found \(8\)'),
    (operand(4, "in", 1, lambda rig: ident(rig, "h")), 'in1 "h": expected 32 elements a row, found 96'),
    (operand(5, "w", 2, NONE), r"w2 \(up\) of the gated pair is missing"),
    (
        operand(5, "w", 2, lambda rig: ident(rig, "wq")),
        r'w1 "gate" \(96, 32\) and w2 "wq" \(32, 32\): expected as many',
    ),
    (operand(5, "w", 3, lambda rig: ident(rig, "wq")), "w3: a gated pair takes no other matrix"),
    (operand(5, "out", 1, lambda rig: ident(rig, "a")), "out1: a gated pair has one output"),
    (operand(5, "i", 0, 5), r"i0 \(activation\) is 5, expected 0 to 4"),
    (operand(5, "i", 1, 3), r"i1 \(precision\) is 3, expected 0 to 2"),
    (operand(9, "f", 1, -1.0), r"f1 \(soft cap\) is -1, expected at least 0"),
    (operand(2, "in", 0, lambda rig: ident(rig, "last")), 'op 2 ROPE_STORE .*: in0 "last": expected step rows'),
    (operand(2, "out", 0, lambda rig: ident(rig, "a")), r"out0 is \d+, expected in0 \(\d+\): q is rotated in place"),
    (operand(2, "in", 1, lambda rig: ident(rig, "x")), 'in1 "x": expected 16 elements a row, found 32'),
    (operand(2, "state", 1, NONE), "state1 is missing"),
    (operand(2, "state", 1, 5), "state1 is 5, but there are 2 states"),
    (operand(2, "state", 1, 0), 'state0 and state1 are both "keys"'),
    (operand(2, "w", 0, lambda rig: ident(rig, "bias")), r'w0 "bias": expected shape \(8\), found \(32\)'),
    (operand(2, "w", 2, lambda rig: ident(rig, "head_norm")), r'w2 "head_norm": expected shape \(4\), found \(8\)'),
    (operand(2, "i", 0, 10), r"i0 \(rotary dims\) is 10, expected 0 to 8"),
    (operand(2, "i", 0, 7), r"i0 \(rotary dims\) is 7, expected an even number"),
    (operand(2, "i", 1, 2), r"i1 \(rotary style\) is 2, expected 0 to 1"),
    (operand(2, "i", 2, 0), r"i2 \(original context\) is 0, expected 1 to"),
    (operand(2, "f", 1, 0.0), r"f1 \(base\) is 0, expected more than 0"),
    (operand(2, "f", 2, 0.0), r"f2 \(frequency scale\) is 0, expected more than 0"),
    (operand(2, "f", 4, 0.0), r"f4 \(magnitude\) is 0, expected more than 0"),
    (operand(2, "f", 5, 0.0), r"f5 \(beta_fast\) is 0, expected more than 0"),
    (operand(3, "in", 0, lambda rig: ident(rig, "k")), 'out0 "a": expected 16 elements a row, found 32'),
    (
        operand(3, "in", 0, lambda rig: ident(rig, "h")),
        'op 3 ATTENTION .*: out0 "a": expected 96 elements a row, found 32',
    ),
    (operand(3, "out", 0, lambda rig: ident(rig, "h")), 'out0 "h": expected 32 elements a row, found 96'),
    (operand(3, "w", 0, lambda rig: ident(rig, "bias")), r'w0 "bias": expected shape \(4\), found \(32\)'),
    (operand(8, "out", 0, lambda rig: ident(rig, "x")), 'op 8 GATHER_NORM: out0 "x": expected output rows, found step'),
    (operand(10, "in", 0, lambda rig: ident(rig, "last")), 'op 10 SAMPLE: in0 "last": expected 64 elements a row'),
    # aliases
    (operand(3, "out", 0, lambda rig: ident(rig, "q")), 'op 3 ATTENTION .*: out0 "q" lies on in0 "q" in the arena'),
    (tensor("a", "offset", lambda rig: named(rig, "q")["offset"]), 'out0 "a" lies on in0 "q" in the arena'),
    (tensor("a", "offset", lambda rig: named(rig, "q")["offset"] + 64), 'out0 "a" lies on in0 "q" in the arena'),
    (tensor("v", "offset", lambda rig: named(rig, "k")["offset"]), 'out2 "v" lies on out1 "k" in the arena'),
    (
        operand(4, "in", 0, lambda rig: ident(rig, "x")),
        r'op 4 MATMUL \(layer 0\): out0 "x" lies on in0 "x" in the arena',
    ),
]


def test_the_model_itself_is_valid(device: Device) -> None:
    rig = model()
    rig.memory(0)[...] = rig.memory(1)[...] = 0  # positions below 126 are read
    with rig.build(device) as plan:
        step = good()
        step.output(2)
        plan.run(step)
        assert 0 <= int(step.results[0]["token"][0]) < VOCABULARY
        assert lib.apu_plan_scratch_bytes(plan.handle) >= plan.rig.arena


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_broken_plan(device: Device, change: Callable[[Rig], None], message: str) -> None:
    rig = model()
    refused(rig, device, lambda: change(rig), message)


def test_more_units_than_workers_can_count(device: Device) -> None:
    """Products of valid numbers that would overflow where work is divided."""
    rig = Rig(rows=65536, vocabulary=4)
    q, k, v = rig.scratch("q", 256 * 2), rig.scratch("k", 2), rig.scratch("v", 2)
    states = rig.state("keys", 1, 2, 1), rig.state("values", 1, 2, 1)
    rig.op(lib.APU_OP_ROPE_STORE, ins=(q, k, v), outs=(q,), states=states, ints=(2,), floats=(0, 1e4, 1, 0, 1), layer=0)
    with pytest.raises(InvalidError, match="257 heads in each of 65536 rows: expected at most 16777216 in all"):
        rig.build(device)

    rig = Rig(outputs=65536, vocabulary=2**20 + 1)
    rig.op(lib.APU_OP_SAMPLE, ins=(rig.scratch("logits", rig.vocabulary, OUTPUT),))
    with pytest.raises(InvalidError, match="65536 outputs of 1048577 logits, expected at most 68719476736 in all"):
        rig.build(device)


def test_single_row_without_a_stride() -> None:
    x = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
    row = np.ones((1, 32), np.float32)
    for isa in ("portable", "avx2", "avx2vnni", "avx512"):
        try:
            device = Device(isa=isa, threads=1)
        except UnsupportedError:
            continue
        with device:
            rig = Rig(vocabulary=16)
            out = rig.scratch("out", 1)
            rig.op(lib.APU_OP_MATMUL, ins=(rig.input(x),), outs=(out,), weights=(NONE, rig.weight("w", row)))
            segment(rig, "w")["row_stride"] = 0
            with rig.build(device) as plan:
                plan.run(Step().sequence(list(range(16))))
                np.testing.assert_allclose(plan.read(out, 16)[:, 0], x.sum(1), rtol=1e-5, atol=1e-5)


def good() -> Step:
    """Rows 0-2: sequence 0 at 126, 127, 128; row 3: sequence 1 at 0."""
    return Step(1).sequence([1, 2, 3], 126, [[0, 1]]).sequence([5], 0, [[2]])


def row(index: int, key: str, value: int) -> Callable[[Step], None]:
    return lambda step: step.rows[index].__setitem__(key, value)


def sequence(index: int, key: str, value: int) -> Callable[[Step], None]:
    return lambda step: step.sequences[index].__setitem__(key, value)


def slot(index: int, key: str, value: int) -> Callable[[Step], None]:
    return lambda step: step.slots[index].__setitem__(key, value)


def page(index: int, value: int) -> Callable[[Step], None]:
    return lambda step: step.pages.__setitem__(index, value)


def out(at: int = 0, want: int = lib.APU_OUT_SAMPLE, **options: Any) -> Callable[[Step], None]:
    return lambda step: (
        step.output(at, want, **{k: v for k, v in options.items() if k not in RAW}),
        step.outputs[-1].update({k: v for k, v in options.items() if k in RAW}),
        None,
    )[-1]


RAW = ("token", "top_ids", "logits", "hidden_pointer", "history_count", "bias_count")

BAD_STEPS: list[tuple[Callable[[Step], None], str]] = [
    (lambda s: s.rows.clear(), "step: 0 rows, expected 1 to 8"),
    (lambda s: s.rows.extend(s.rows * 3), "step: 16 rows, expected 1 to 8"),
    (lambda s: s.sequences.clear(), "step: 0 sequences, expected 1 to 2"),
    (lambda s: s.sequences.extend(s.sequences), "step: 4 sequences, expected 1 to 2"),
    (lambda s: [s.output(0) for _ in range(5)], "step: 5 outputs, expected at most 4"),
    (row(1, "token", 64), "step: row 1 has token 64, expected 0 to 63, or -1"),
    (row(1, "token", -2), "step: row 1 has token -2"),
    (row(1, "token", -1), "row 1 takes the token of output -1, but the step before sampled 0"),
    (row(1, "position", 128), "row 1 of sequence 0 is at position 128, expected 127"),
    (row(3, "position", 512), "row 3 is at position 512, expected below 512"),
    (row(1, "sequence", 1), "row 1 lies in sequence 0 but names sequence 1"),
    (sequence(0, "row_count", 0), "sequence 0 has rows 0 to 0"),
    (sequence(0, "row_count", 2), "its sequences hold 3 rows, expected 4"),
    (sequence(0, "row_count", 4), "row 3 lies in sequence 0 but names sequence 1"),
    (sequence(1, "row_begin", 2**32 - 1), "sequence 1 has rows 4294967295 to 4294967296, but the step has 4"),
    (sequence(1, "row_begin", 4), "sequence 1 has rows 4 to 5, but the step has 4"),
    (slot(0, "page_count", 1), "sequence 0 reaches position 128, but its table of group 0 has 1 pages: expected 2"),
    (slot(0, "page_begin", 4), "pages 4 to 6 of sequence 0, group 0, but the step has 3"),
    (slot(1, "page_count", 2**32 - 1), "of sequence 1, group 0, but the step has 3"),
    (page(0, 6), "page 0 of sequence 0 is 6, but group 0 has 6"),
    (page(0, NO_PAGE), "sequence 0 needs page 0 of group 0, which was freed"),
    (page(2, 1), "page 1 of group 0 is written twice, by sequences 0 and 1"),
    (page(1, 0), "page 0 of group 0 is written twice, by sequences 0 and 0"),
    (out(4), "output 0: row 4, but the step has 4"),
    (out(0, 16), "output 0: unknown bits in want, 0x10"),
    (out(token=ffi.NULL), "output 0: token is NULL, but want asks for it"),
    (out(want=lib.APU_OUT_LOGITS), "output 0: logits is NULL"),
    (out(want=lib.APU_OUT_HIDDEN), "output 0: hidden is NULL"),
    (out(want=lib.APU_OUT_TOP), "output 0: top_ids is NULL"),
    (out(want=lib.APU_OUT_TOP, top_n=65), "output 0: top_n is 65, expected 1 to 64"),
    (out(temperature=float("nan")), "output 0: temperature is nan, expected 0 to"),
    (out(temperature=-1.0), "output 0: temperature is -1"),
    (out(top_p=1.5), "output 0: top_p is 1.5, expected 0 to 1"),
    (out(min_p=-0.1), "output 0: min_p is -0.1, expected 0 to 1"),
    (out(repeat_penalty=0.0), "output 0: repeat_penalty is 0, expected"),
    (out(presence_penalty=float("inf")), "output 0: presence_penalty is inf"),
    (out(frequency_penalty=float("nan")), "output 0: frequency_penalty is nan"),
    (out(history={64: 1}), "output 0: token 64 in its history, expected 0 to 63"),
    (out(history={-1: 1}), "output 0: token -1 in its history"),
    (out(history={3: 0}), "output 0: token 3 occurs 0 times in its history, expected at least 1"),
    (out(bias={64: 1.0}), "output 0: bias for token 64, expected 0 to 63"),
    (out(bias={1: float("nan")}), "output 0: the bias of token 1 is nan, expected a finite number or -inf"),
    (out(history_count=1), "output 0: history_ids or history_counts is NULL, but history_count is 1"),
    (out(bias_count=1), "output 0: bias_ids or bias_values is NULL, but bias_count is 1"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STEPS, ids=[str(i) for i in range(len(BAD_STEPS))])
def test_broken_step(device: Device, change: Callable[[Step], None], message: str) -> None:
    with model().build(device) as plan:
        step = good()
        change(step)
        with pytest.raises(InvalidError) as error:
            plan.run(step)
        assert re.search(message, str(error.value)), str(error.value)
        plan.run(good())


def test_page_of_another_sequence(device: Device) -> None:
    """Reading a page that another sequence writes in the same step would leak between conversations."""
    with model().build(device) as plan:
        step = Step(1).sequence([1], 130, [[0, 1]]).sequence([5], 200, [[1, 2]])
        with pytest.raises(InvalidError, match="sequence 1 reads page 1 of group 0, which sequence 0 writes"):
            plan.run(step)
        plan.run(Step(1).sequence([1], 130, [[0, 1]]).sequence([5], 200, [[0, 2]]))  # a shared prefix is fine


def test_slices_and_null_arguments(device: Device) -> None:
    with model().build(device) as plan:
        for first, last in ((3, 2), (0, 12), (12, 12)):
            with pytest.raises(InvalidError, match=rf"ops {first} to {last}, but the plan has 11"):
                plan.run(good(), first, last)
        plan.run(good(), 4, 4)
        plan.run(good(), 0, 5)
        plan.run(good(), 5, 11)
        assert lib.apu_plan_submit(ffi.NULL, ffi.NULL, 0, 0, ffi.NULL) == lib.APU_E_INVALID
        assert lib.apu_event_wait(ffi.NULL, 0) == lib.APU_E_INVALID
        assert lib.apu_plan_create(device.handle, ffi.NULL, ffi.NULL) == lib.APU_E_INVALID
    lib.apu_plan_destroy(ffi.NULL)


def test_device_options() -> None:
    for options, message in (
        ({"threads": 10**6}, "threads is 1000000, expected 0"),
        ({"spin_us": 10**7}, "spin_us is 10000000"),
    ):
        with pytest.raises(InvalidError, match=message):
            Device("cpu", **options)
    with pytest.raises(NativeError, match='device kind "tpu" is not in this build'):
        Device("tpu")
    with pytest.raises(InvalidError, match="index 1 does not exist"):
        Device("cpu", 1)
    with Device("cpu", threads=3, pin=True) as device:
        assert device.props.threads == 3 and device.props.memory_bytes > 0 and device.props.arch in device.props.isa
