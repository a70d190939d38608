"""The sampler's kernels (sample.hip) on the shim: exact rules against numpy, tokens against the CPU backend's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rig import Rig, Step
from shim import Buffer, Shim, every_shim

from apu_engine._native import Device, lib

Array = np.ndarray[Any, Any]
SURVEY, FINISH, CHUNK, CELL = 256, 1024, 2048, 64
SAMPLE, TOP = lib.APU_OUT_SAMPLE, lib.APU_OUT_TOP
OK, NOT_FINITE, NOTHING_ALLOWED = range(3)
NONE = 0xFFFFFFFF
PLAIN = {"want": SAMPLE, "top_p": 1.0, "repeat_penalty": 1.0}


@pytest.fixture(scope="module")
def shims() -> list[Shim]:
    return list(every_shim(["sample.hip"]))


class Result:
    def __init__(self, token: int, logprob: float, status: int, ids: Array, logprobs: Array) -> None:
        self.token, self.logprob, self.status, self.ids, self.logprobs = token, logprob, status, ids, logprobs


def layout(size: int) -> dict[str, int]:
    """sample_layout of sample.h."""
    chunks = -(-size // CHUNK)
    cells = chunks * CHUNK // CELL
    out, at = {}, 0
    for name, nbytes in (
        ("stats", 32 * chunks),
        ("raw_cells", 4 * cells),
        ("cells", 4 * cells),
        ("list", 4 * cells),
        ("tile_mass", cells),
        ("adjusted", 4 * size),
    ):
        out[name] = at
        at += -(-nbytes // 64) * 64
    return {**out, "slot_bytes": at}


def run(shim: Shim, logits: Array, outputs: list[dict[str, Any]], *, position: int = 0, slots: int = 0) -> list[Result]:
    """Outputs (O) with one row of logits (O, V) each; history, bias {token: value} or pairs, and mask (V) as given."""
    count, size = logits.shape
    extras: list[int] = [0xDEADBEEF]
    tops, items = 0, []
    for i, given in enumerate(outputs):
        options = {**PLAIN, **given}
        history, bias, mask = (options.pop(name, None) for name in ("history", "bias", "mask"))
        fields: dict[str, Any] = {**options, "row": i, "history_at": NONE, "bias_at": NONE, "mask_at": NONE}
        if history:
            fields |= {"history_at": len(extras), "history_count": len(history)}
            extras += [*history, *history.values()]
        if bias:
            pairs = list(bias.items()) if isinstance(bias, dict) else bias
            fields |= {"bias_at": len(extras), "bias_count": len(pairs)}
            extras += [token for token, _ in pairs]
            extras += np.array([value for _, value in pairs], np.float32).view(np.uint32).tolist()
        if mask is not None:
            fields["mask_at"] = len(extras)
            extras += np.packbits(np.pad(mask, (0, -size % 32)), bitorder="little").view(np.uint32).tolist()
        fields["top_at"] = tops if options.get("top_n") else NONE
        tops += options.get("top_n", 0)
        items.append(shim.args("Output", **fields))
    slots = slots or count
    shape = layout(size)
    sampled = shim.output(count + 1, np.int32)
    results = shim.output((count + 1, 4), np.uint32)
    top_ids, top_logprobs = shim.output(max(tops, 1), np.int32), shim.output(max(tops, 1), np.float32)

    def pointer(buffer: Buffer) -> Buffer:
        return shim.input(np.array([buffer.address], np.uint64))

    step = shim.args(
        "StepView",
        counts=shim.input(shim.args("StepCounts", rows=count, sequences=1, outputs=count)),
        rows=shim.input([shim.args("Row", position=position + i) for i in range(count)]),
        outputs=shim.input(items),
        extras=pointer(shim.input(np.array(extras, np.uint32))),
        sampled=sampled,
        results=results,
        top_ids=pointer(top_ids),
        top_logprobs=pointer(top_logprobs),
        vocabulary=size,
    )
    scratch, x = shim.output(slots * shape["slot_bytes"], np.uint8), shim.input(logits)
    for base in range(0, count, slots):
        args = shim.args("SampleArgs", step=step, logits=x, scratch=scratch, layout=shape, base=base)
        args.chunks = -(-size // CHUNK)
        shim.launch("sample_survey", (args.chunks, slots), SURVEY, args)
        shim.launch("sample_finish", slots, FINISH, args)
    shim.clear()
    assert sampled.array[count] == -1 and (results.array[count] == NONE).all()  # beyond the count: untouched
    out = []
    for i, item in enumerate(items):
        token, logprob, status, _ = results.array[i]
        assert sampled.array[i] == np.int32(token)
        at = slice(item.top_at, item.top_at + item.top_n) if item.top_at != NONE else slice(0)
        out.append(
            Result(
                int(np.int32(token)),
                float(logprob.view(np.float32)),
                int(status),
                top_ids.array[at],
                top_logprobs.array[at],
            )
        )
    return out


def logits(size: int, seed: int = 0, scale: float = 3) -> Array:
    return (np.random.default_rng((size, seed)).standard_normal(size) * scale).astype(np.float32)


def log_softmax(z: Array) -> Array:
    wide = z.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def cpu_tokens(device: Device, z: Array, outputs: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """What the CPU backend samples for rows 0, 1, ... with the same logits."""
    rig = Rig(vocabulary=z.shape[1], outputs=16)
    rig.logits(z)
    tokens, logprobs = [], []
    with rig.build(device) as plan:
        for begin in range(0, len(outputs), 16):
            part = outputs[begin : begin + 16]
            step = Step().sequence(range(len(part)), begin)
            results = []
            for i, given in enumerate(part):
                fields = {**PLAIN, **given}
                fields.pop("want")
                fields.pop("wants_logprob", None)
                results.append(step.output(i, SAMPLE, **fields))
            plan.run(step)
            tokens += [int(r["token"][0]) for r in results]
            logprobs += [float(r["logprob"][0]) for r in results]
    return tokens, logprobs


@pytest.mark.parametrize("size", [2, 33, 2048, 2049, 9000])
def test_greedy_takes_the_first_of_equals(shims: list[Shim], size: int) -> None:
    z = np.stack([logits(size, i) for i in range(4)])
    z[1, [size // 2, size - 1]] = 99
    z[2] = -3.5
    z[3] = -np.inf
    z[3, size - 1] = -7
    for shim in shims:
        found = run(shim, z, [{"wants_logprob": 1}] * 4)
        assert [r.token for r in found] == z.argmax(1).tolist()
        assert found[1].token == size // 2 and found[2].token == 0
        np.testing.assert_allclose([r.logprob for r in found], [log_softmax(row).max() for row in z], atol=2e-6)


def test_signed_zeros_are_equal(shims: list[Shim]) -> None:
    z = np.full((1, 5000), -1, np.float32)
    z[0, [100, 4000]] = [-0.0, 0.0]
    z[0, [200, 4100]] = [0.0, -0.0]
    for shim in shims:
        (found,) = run(shim, z, [{"want": SAMPLE | TOP, "top_n": 3}])
        assert found.token == 100 and found.ids.tolist() == [100, 200, 4000]


def test_outputs_that_want_no_token(shims: list[Shim]) -> None:
    z = np.stack([logits(100), logits(100, 1)])
    for shim in shims:
        first, second = run(shim, z, [{"want": lib.APU_OUT_LOGITS}, {"want": TOP, "top_n": 2}])
        assert (first.token, first.status) == (-1, OK)
        assert second.token == -1 and second.ids.tolist() == np.argsort(-z[1])[:2].tolist()


def test_more_outputs_than_slots(shims: list[Shim]) -> None:
    z = np.stack([logits(300, i) for i in range(7)])
    for shim in shims:
        found = run(shim, z, [{"bias": {i: 50.0}} if i % 2 else {} for i in range(7)], slots=3)
        assert [r.token for r in found] == [i if i % 2 else z[i].argmax() for i in range(7)]


def test_broken_logits_and_empty_masks(shims: list[Shim]) -> None:
    z = np.stack([logits(2500, i) for i in range(6)])
    z[0, 2400], z[1, 3], z[2] = np.nan, np.inf, -np.inf
    outputs: list[dict[str, Any]] = [{"temperature": 1.0}, {}, {"want": SAMPLE | TOP, "top_n": 5}]
    outputs += [{"mask": np.zeros(2500, bool)}, {"temperature": 1.0, "bias": dict.fromkeys(range(2500), -np.inf)}, {}]
    for shim in shims:
        found = run(shim, z, outputs)
        assert [r.status for r in found] == [NOT_FINITE] * 3 + [NOTHING_ALLOWED] * 2 + [OK]
        assert [r.token for r in found] == [-1] * 5 + [z[5].argmax()]


@pytest.mark.parametrize(
    ("size", "n"), [(5, 5), (64, 20), (5000, 1), (5000, 20), (3000, 1024), (3000, 2999), (2200, 2200)]
)
def test_top_log_probabilities(shims: list[Shim], size: int, n: int) -> None:
    """Through cells, by one pass over all, sorted in LDS or in place."""
    z = np.round(logits(size), 1 if n > 1 else 4)  # many equals
    z[size // 3] = -np.inf
    order = np.lexsort((np.arange(size), -z))[:n]
    for shim in shims:
        (found,) = run(shim, z[None], [{"want": TOP, "top_n": n}])
        assert found.ids.tolist() == order.tolist()
        np.testing.assert_allclose(found.logprobs, log_softmax(z)[order], atol=3e-6)


def test_all_equal(shims: list[Shim]) -> None:
    z = np.zeros((3, 4500), np.float32)
    options = {"temperature": 1.0, "seed": 0}
    outputs = [{**options, "want": SAMPLE | TOP, "top_n": 70}, {**options, "top_k": 70}, {**options, "top_p": 0.5}]
    for shim in shims:
        found = run(shim, z, outputs)
        assert found[0].ids.tolist() == list(range(70))
        # Philox4x32-10: the published vector for key 0, counter 0 begins 6627e8d5 e169c58d
        assert found[0].token == int((0xE169C58D << 32 | 0x6627E8D5) / 2**64 * 4500)
        assert found[1].token < 70 and found[2].token < 2250


def test_penalties_bias_and_mask_are_the_cpus(device: Device, shims: list[Shim]) -> None:
    """Adjusted logits have the CPU's bits: greedy tokens agree where the best two are an ulp apart."""
    rng = np.random.default_rng(8)
    size, outputs = 4200, []
    z = np.round(np.stack([logits(size, i) for i in range(16)]), 2).astype(np.float32)
    for i in range(16):
        history = {int(t): int(c) for t, c in zip(rng.permutation(size)[:900], rng.integers(1, 9, 900), strict=True)}
        history |= {int(t): 1 for t in np.argsort(-z[i])[:12]}
        bias = {int(t): float(np.float32(rng.uniform(-2, 2))) for t in rng.permutation(size)[:400]}
        outputs.append(
            {
                "history": history,
                "bias": bias if i % 2 else None,
                "mask": rng.random(size) < 0.7 if i % 3 else None,
                "repeat_penalty": 1.1 + 0.01 * i,
                "frequency_penalty": 0.07 * (i % 4),
                "presence_penalty": 0.3 if i % 5 else 0.0,
                "wants_logprob": 1,
                "temperature": 0.8 if i > 12 else 0.0,
                "top_k": 30,
            }
        )
    tokens, logprobs = cpu_tokens(device, z, outputs)
    for shim in shims:
        found = run(shim, z, [{k: v for k, v in o.items() if v is not None} for o in outputs])
        assert [r.token for r in found] == tokens
        np.testing.assert_allclose([r.logprob for r in found], logprobs, atol=3e-6)


def test_a_token_may_have_several_biases(shims: list[Shim]) -> None:
    z = np.zeros((1, 3000), np.float32)
    pairs = [(2900, 0.5), *[(t, 0.1) for t in range(290)], (2900, -0.25), (7, 0.1)]  # 0.2 and 0.25
    for shim in shims:
        assert run(shim, z, [{"bias": pairs}])[0].token == 2900
        assert run(shim, z, [{"bias": [*pairs, (2900, -0.1)]}])[0].token == 7


RULES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_k": 1500, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 1500},
    {"temperature": 0.3, "top_p": 0.999, "min_p": 0.001},
    {"temperature": 1e-30},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 50.0},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_the_cpus(device: Device, shims: list[Shim], rule: dict[str, Any]) -> None:
    """With top_k up to 1024 always; else but where the last bits of exponentials decide, here nowhere."""
    z = np.stack([logits(3000, i, 2.5) for i in range(16)])
    z[:, 50] = z[:, 2100]  # equals
    outputs = [{**rule, "seed": (i << 33) + i, "draw": i % 3} for i in range(16)]
    tokens, _ = cpu_tokens(device, z, outputs)
    for shim in shims:
        assert [r.token for r in run(shim, z, outputs)] == tokens
    if rule.get("temperature") == 1.0 and len(rule) == 1:
        assert len(set(tokens)) > 8


def kept(z: Array, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> Array:
    """Probabilities after the three cuts, by sorting."""
    order = np.lexsort((np.arange(len(z)), -z))
    p = np.exp((z.astype(np.float64) - z.max()) / temperature)
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        cut = before >= top_p * p.sum()
        cut[0] = False
        p[order[cut]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("rule", RULES[:9], ids=str)
def test_draws_are_of_the_right_tokens(shims: list[Shim], rule: dict[str, Any]) -> None:
    z = np.concatenate([np.linspace(2, -2, 16)[np.random.default_rng(5).permutation(16)], np.full(2100, -60.0)])
    p = kept(z, **rule)
    count = 150
    rows = np.broadcast_to(z.astype(np.float32), (count, len(z)))
    found = run(shims[0], np.ascontiguousarray(rows), [{**rule, "seed": i} for i in range(count)], slots=count)
    seen = np.bincount([r.token for r in found], minlength=len(z))
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(p))
    likely = p > 0.1
    np.testing.assert_allclose(seen[likely] / count, p[likely], atol=4.5 * np.sqrt(0.25 / count))


def test_a_row_does_not_depend_on_the_others(shims: list[Shim]) -> None:
    z = np.stack([logits(2600, i) for i in range(3)])
    rule = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "wants_logprob": 1}
    for shim in shims:
        together = run(shim, z, [{}, {**rule, "history": {4: 1}, "repeat_penalty": 3.0}, rule], position=4)[2]
        alone = run(shim, z[2:], [rule], position=6)[0]
        assert (together.token, together.logprob) == (alone.token, alone.logprob)


def test_big_vocabulary(shims: list[Shim]) -> None:
    z = logits(131072 + 5)
    outputs = [{"want": SAMPLE | TOP, "top_n": 30}, {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 3}]
    outputs += [{"temperature": 0.7, "top_p": 0.95, "seed": 3}]
    order = np.lexsort((np.arange(len(z)), -z))[:30]
    for shim in shims[::3]:
        found = run(shim, np.stack([z] * 3), outputs)
        assert found[0].token == order[0] and found[0].ids.tolist() == order.tolist()
        assert found[1].token in np.flatnonzero(kept(z, 0.7, 40, 0.9))
        assert found[2].token in np.flatnonzero(kept(z, 0.7, top_p=0.95))
