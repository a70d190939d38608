"""The Plan wrapper on a tiny model: chained sampling, slices, reading scratch, pages, cancelling, refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import Running, running

from apu_engine._native import CancelledError, Device, InvalidError, WaitTimeout
from apu_engine.errors import ApuError
from apu_engine.plan import HIDDEN, LOGITS, SAMPLE, TOP
from models import TinyModel, tiny_llama_gguf

IDS = np.random.default_rng(3).integers(0, 320, 40).tolist()


@pytest.fixture
def model(tiny_llama: TinyModel, device: Device) -> Iterator[Running]:
    with running(tiny_llama.path, device, parallel=2) as loaded:
        yield loaded


def test_tokens_chain_from_output_to_row_without_coming_back(model: Running) -> None:
    greedy = list(IDS)
    for _ in range(4):
        greedy.append(int(model.prefill(greedy)[-1].argmax()))
    plan, first = model.loaded.plan, plan_step(model, IDS, 0)
    second, third = model.loaded.plan.new_step(), model.loaded.plan.new_step()
    for at, step in ((40, second), (41, third)):
        row = step.add_sequence([-1], at, model.tables(0, at, at + 1), previous=0)
        step.add_output(row)
    everything = (0, len(plan.spec.ops))
    events = [plan.submit(step, *everything) for step in (first, second, third)]
    for event in events:
        event.wait()
    assert [int(step.tokens[0]) for step in (first, second, third)] == greedy[40:43]


def plan_step(model: Running, tokens: list[int], position: int):  # type: ignore[no-untyped-def]
    step = model.loaded.plan.new_step()
    row = step.add_sequence(tokens, position, model.tables(0, position, position + len(tokens)))
    step.add_output(row + len(tokens) - 1)
    return step


def test_results_of_one_output_agree(model: Running) -> None:
    step = model.step
    step.clear()
    row = step.add_sequence(IDS, 0, model.tables(0, 0, 40))
    step.add_output(row + 39, SAMPLE | TOP | LOGITS | HIDDEN, top_n=5)
    step.add_output(row, LOGITS)
    model.loaded.plan.run(step)
    logits = step.logits[0].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-logits, kind="stable")[:5]
    assert step.tokens[0] == order[0]
    assert step.top_ids[0, :5].tolist() == order.tolist()
    assert np.allclose(step.top_logprobs[0, :5], np.log(probabilities[order]), atol=1e-5)
    assert np.isclose(step.logprobs[0], step.top_logprobs[0, 0])
    assert np.array_equal(step.hidden[0], model.loaded.plan.read("hidden")[0])
    whole = model.prefill(IDS)
    assert np.array_equal(whole[39], step.logits[0]) and np.array_equal(whole[0], step.logits[1])


def test_any_slice_can_be_run_and_read(model: Running, tiny_llama: TinyModel) -> None:
    plan, step = model.loaded.plan, plan_step(model, IDS[:3], 0)
    plan.submit(step, 0, 1).wait()
    assert np.array_equal(plan.read("x"), tiny_llama.tensors["token_embd.weight"][IDS[:3]])
    plan.submit(step, 1, 2).wait()
    x = tiny_llama.tensors["token_embd.weight"][IDS[:3]].astype(np.float64)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tiny_llama.tensors["blk.0.attn_norm.weight"]
    expected = normed @ tiny_llama.tensors["blk.0.attn_k.weight"].T.astype(np.float64)
    assert np.abs(plan.read("blk.0.k") - expected).max() < 1e-5
    assert plan.read("blk.0.q").shape == (3, 64)


def test_profile(model: Running) -> None:
    plan = model.loaded.plan
    plan.profile(True)
    model.prefill(IDS)
    nanoseconds = plan.profile(False)
    assert nanoseconds.shape == (len(plan.spec.ops),)
    assert (nanoseconds > 0).sum() > len(plan.spec.ops) // 2


def test_pages_move_with_their_sequence(model: Running) -> None:
    expected = model.prefill(IDS)
    plan = model.loaded.plan
    saved = plan.export_page(0, 0)
    plan.copy_page(0, 0, 1)  # sequence 1's first page
    assert np.array_equal(model.logits([(1, 39, IDS[39:])]), expected[39:])
    plan.reset_page(0, 1)
    assert not any(plan.export_page(0, 1))
    plan.import_page(0, 1, saved)
    assert np.array_equal(model.logits([(1, 39, IDS[39:])]), expected[39:])
    with pytest.raises(InvalidError):
        plan.copy_page(0, 0, 10_000)
    with pytest.raises(InvalidError):
        plan.import_page(0, 1, saved[:-1])


def test_a_step_that_breaks_a_limit_is_refused(model: Running) -> None:
    plan = model.loaded.plan
    everything = (0, len(plan.spec.ops))
    for tokens, position, tables, row in (
        ([320], 0, [[0]], 0),  # no such token
        ([-2], 0, [[0]], 0),
        ([1], 512, [[0] * 5], 0),  # position beyond ctx
        ([1], 128, [[0]], 0),  # too few pages
        ([1], 0, [[8]], 0),  # no such page
        ([1], 0, [[0]], 1),  # no such row
        ([-1], 0, [[0]], 0),  # the token of a step that never was
    ):
        step = plan.new_step()
        step.add_sequence(tokens, position, tables)
        step.add_output(row)
        with pytest.raises(InvalidError):
            plan.submit(step, *everything)
    with pytest.raises(InvalidError):
        plan.submit(plan_step(model, IDS, 0), 0, 10_000)
    assert np.isfinite(model.prefill(IDS)).all()


def test_cancel_from_another_thread(tmp_path: Path, device: Device) -> None:
    tiny = tiny_llama_gguf(tmp_path / "large.gguf", layers=24, D=256, F=1024, V=4096, tokenizer=False)
    ids = [i % 4096 for i in range(500)]
    with running(tiny.path, device) as model:
        plan = model.loaded.plan
        step = plan_step(model, ids, 0)
        event = plan.submit(step, 0, len(plan.spec.ops))
        with pytest.raises(WaitTimeout):
            event.wait(timeout=0.001)
        timer = threading.Timer(0.005, plan.cancel)
        timer.start()
        start = time.perf_counter()
        with pytest.raises(CancelledError):
            event.wait()
        assert time.perf_counter() - start < 2
        timer.join()
        with pytest.raises(ApuError, match="waited for"):
            event.wait()
        plan.run(step)  # and the plan still works
        assert 0 <= step.tokens[0] < 4096


def test_closing_twice_is_harmless(tiny_llama: TinyModel, device: Device) -> None:
    with running(tiny_llama.path, device) as model:
        model.loaded.close()
        model.loaded.close()
