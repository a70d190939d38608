"""The engine thread over a fake runner: order, cancelling, limits, failures, shutdown."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from engine_fakes import VOCABULARY, FakeRunner, Group, eventually, expected, make_job

from apu_engine.engine.engine import Engine
from apu_engine.engine.job import ContextLengthError, EngineClosedError, QueueFullError, SamplingParams
from apu_engine.errors import ApuError, ConfigError, MappingError


@contextmanager
def engine(runner: FakeRunner | None = None, **options: int) -> Iterator[Engine]:
    options.setdefault("context", 256)
    e = Engine(runner or FakeRunner(), **options)  # type: ignore[arg-type]
    try:
        yield e
    finally:
        e.close()


def test_one_job() -> None:
    with engine() as e:
        job, out = make_job([1, 2, 3], 6)
        e.submit(job)
        done = out.wait()
    assert out.tokens == expected([1, 2, 3], 6)
    assert done.reason == "length" and done.error is None
    t = done.timings
    assert (t.prompt_tokens, t.cached_tokens, t.generated_tokens) == (3, 0, 6)
    assert t.first_token_seconds >= t.prompt_seconds > 0 and t.decode_seconds > 0


def test_long_prompt_over_many_pages() -> None:
    prompt = [i % VOCABULARY for i in range(700)]
    with engine(context=1024) as e:
        job, out = make_job(prompt, 40)
        e.submit(job)
        out.wait()
    assert out.tokens == expected(prompt, 40)


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_company_changes_nothing(parallel: int) -> None:
    prompts = [[i, i + 1, 5] * (1 + 7 * i) for i in range(6)]
    with engine(FakeRunner(max_outputs=8), parallel=parallel) as e:
        jobs = [make_job(prompt, 10 + i) for i, prompt in enumerate(prompts)]
        for job, _ in jobs:
            e.submit(job)
        for _, out in jobs:
            assert out.wait().reason == "length"
    for i, (prompt, (_, out)) in enumerate(zip(prompts, jobs, strict=True)):
        assert out.tokens == expected(prompt, 10 + i)


def test_pages_come_back() -> None:
    runner = FakeRunner([Group(0, 4)])
    with engine(runner, context=512) as e:
        for i in range(5):
            job, out = make_job([i] * 300, 100)
            e.submit(job)
            out.wait()
            assert out.tokens == expected([i] * 300, 100)
        assert e._scheduler.pool.groups[0].free_count == 4
        assert e._scheduler.pool.groups[0].reserved == 0


def test_stop_ids_end_a_job_and_are_not_delivered() -> None:
    tokens = expected([4], 8)
    stop = next(token for i, token in enumerate(tokens) if i > 1 and token not in tokens[:i])
    with engine() as e:
        job, out = make_job([4], 8, stop_ids=frozenset({stop}))
        e.submit(job)
        assert out.wait().reason == "stop"
        assert out.tokens == tokens[: tokens.index(stop)]
        job, out = make_job([4], 8, stop_ids=frozenset({stop}), ignore_eos=True)
        e.submit(job)
        assert out.wait().reason == "length"
        assert out.tokens == tokens


def test_the_context_ends_a_job() -> None:
    with engine(context=32) as e:
        job, out = make_job([1] * 28, 1000)
        e.submit(job)
        assert out.wait().reason == "length"
    assert out.tokens == expected([1] * 28, 4)


def test_prefill_only_and_logits() -> None:
    with engine() as e:
        job, out = make_job([1, 2, 3], 0)
        e.submit(job)
        assert out.wait().reason == "length"
        assert out.tokens == []
        prompt = list(range(11))
        logits = np.zeros((11, VOCABULARY), np.float32)
        job, out = make_job(prompt, 0, logits=logits)
        e.submit(job)
        assert out.wait().reason == "length"
    assert logits[:, 0].tolist() == [expected(prompt[: i + 1], 1)[0] for i in range(11)]


# ---- refused jobs


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "at least one token"), ([5, VOCABULARY], "from 0 to 96, found 97"), ([-1], "found -1")],
)
def test_bad_prompts(prompt: list[int], words: str) -> None:
    with engine() as e, pytest.raises(ConfigError, match=words):
        e.submit(make_job(prompt)[0])


def test_too_long_prompts_name_both_numbers() -> None:
    with engine(context=64) as e:
        with pytest.raises(ContextLengthError, match=r"64 tokens.*context holds 64") as info:
            e.submit(make_job([1] * 64)[0])
        assert (info.value.prompt_tokens, info.value.context) == (64, 64)
        job, out = make_job([1] * 64, 0)  # without an answer it fits exactly
        e.submit(job)
        out.wait()


def test_other_bad_fields() -> None:
    with engine() as e:
        with pytest.raises(ConfigError, match="logit_bias"):
            e.submit(make_job([1], params=SamplingParams(logit_bias={VOCABULARY: 1.0}))[0])
        with pytest.raises(ConfigError, match="max_tokens"):
            e.submit(make_job([1], -1)[0])
        with pytest.raises(ConfigError, match="logits"):
            e.submit(make_job([1], 0, logits=np.zeros((2, VOCABULARY), np.float32))[0])


def test_a_context_above_the_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="ctx: 1000 tokens"):
        Engine(FakeRunner([Group(0, 7)]), context=1000)


# ---- cancelling


def held(runner: FakeRunner) -> threading.Event:
    """Hold every step until the event is set or the step is cancelled."""
    release = threading.Event()

    def hold(chunks: object) -> None:
        while not (release.is_set() or runner._cancelled.is_set()):
            time.sleep(0.001)

    runner.before_wait = hold
    return release


def test_cancel_in_prefill_acts_at_once_and_the_next_job_is_unharmed() -> None:
    runner = FakeRunner()
    release = held(runner)
    with engine(runner) as e:
        first, out = make_job([1] * 200)
        second, after = make_job([2, 3])
        e.submit(first)
        e.submit(second)
        assert runner.entered.wait(5)
        e.cancel(first)
        assert out.wait().reason == "cancelled"
        assert runner.cancels == 1 and out.tokens == []
        release.set()
        assert after.wait().reason == "length"
    assert after.tokens == expected([2, 3], 5)


def test_cancel_in_decode() -> None:
    runner = FakeRunner()
    with engine(runner, context=4096) as e:
        job, out = make_job([1], 4000)
        reached = threading.Event()
        out.on_token = lambda count: reached.set() if count == 3 else None
        e.submit(job)
        assert reached.wait(5)
        e.cancel(job)
        done = out.wait()
    assert done.reason == "cancelled" and 3 <= len(out.tokens) < 4000
    assert out.tokens == expected([1], len(out.tokens))
    assert done.timings.generated_tokens == len(out.tokens)
    assert runner.cancels == 0


def test_cancel_from_the_callback() -> None:
    with engine() as e:
        job, out = make_job([1], 100)
        out.on_token = lambda count: e.cancel(job) if count == 2 else None
        e.submit(job)
        assert out.wait().reason == "cancelled"
    assert len(out.tokens) == 2


def test_cancel_in_the_queue() -> None:
    runner = FakeRunner()
    release = held(runner)
    with engine(runner) as e:
        first, out = make_job([1, 2])
        waiting, never = make_job([3])
        e.submit(first)
        assert runner.entered.wait(5)
        e.submit(waiting)
        e.cancel(waiting)
        release.set()
        done = never.wait()
        assert done.reason == "cancelled" and done.timings.generated_tokens == 0 and never.tokens == []
        assert out.wait().reason == "length"
    assert out.tokens == expected([1, 2], 5)
    assert all(name != "waiting" for step in runner.steps for name, _, _ in step)


def test_cancelling_one_prefill_runs_the_others_again() -> None:
    runner = FakeRunner(max_rows=32)
    with engine(runner, parallel=2) as e:
        a, out_a = make_job([1, 2, 3], 30)
        b, out_b = make_job([9] * 200, 5)
        started = threading.Event()
        release = threading.Event()

        def hold(chunks: object) -> None:
            if any(c.sequence.job is b for c in chunks):  # type: ignore[attr-defined]
                started.set()
                while not (release.is_set() or runner._cancelled.is_set()):
                    time.sleep(0.001)

        runner.before_wait = hold
        e.submit(a)
        e.submit(b)
        assert started.wait(5)
        e.cancel(b)
        assert out_b.wait().reason == "cancelled"
        release.set()
        assert out_a.wait().reason == "length"
    assert out_a.tokens == expected([1, 2, 3], 30)
    assert runner.cancels == 1


def test_many_jobs_with_random_cancelling() -> None:
    """Whatever is cancelled whenever, every job ends once with a prefix of its own tokens, and no page is lost."""
    random_ = random.Random(5)
    groups = [Group(0, 40), Group(150, 30)]
    with engine(FakeRunner(groups, max_rows=24, max_outputs=4), context=600, parallel=4, queue=100) as e:
        jobs = []
        for i in range(60):
            prompt = [random_.randrange(VOCABULARY) for _ in range(random_.choice([1, 5, 40, 300]))]
            job, out = make_job(prompt, random_.choice([0, 1, 10, 60]), id=str(i))
            if random_.random() < 0.4:
                at = random_.randrange(30)
                out.on_token = lambda count, job=job, at=at: e.cancel(job) if count > at else None
            e.submit(job)
            jobs.append((job, out))
            if random_.random() < 0.3:
                time.sleep(random_.random() * 0.01)
                e.cancel(random_.choice(jobs)[0])
        for job, out in jobs:
            done = out.wait()
            assert out.tokens == expected(job.prompt, len(out.tokens))
            assert done.reason == "length" or job.cancelled
            if done.reason == "length":
                assert len(out.tokens) == job.max_tokens
        eventually(lambda: e.status().running == 0)
        for group, spec in zip(e._scheduler.pool.groups, groups, strict=True):
            assert (group.free_count, group.reserved) == (spec.page_count, 0)


# ---- the queue


def test_the_queue_is_bounded_and_fair() -> None:
    runner = FakeRunner()
    release = held(runner)
    order: list[str] = []
    with engine(runner, queue=2) as e:
        jobs = [make_job([i + 1], 2, id=str(i)) for i in range(3)]
        for job, out in jobs:
            out.on_token = lambda count, name=job.id: order.append(name) if count == 1 else None
        e.submit(jobs[0][0])
        assert runner.entered.wait(5)
        e.submit(jobs[1][0])
        e.submit(jobs[2][0])
        with pytest.raises(QueueFullError, match="queue=2"):
            e.submit(make_job([1])[0])
        status = e.status()
        assert (status.state, status.running, status.waiting) == ("ready", 1, 2)
        release.set()
        for _, out in jobs:
            assert out.wait().reason == "length"
        e.submit(make_job([1])[0])
    assert order == ["0", "1", "2"]


def test_queue_zero_still_runs_one() -> None:
    with engine(queue=0) as e:
        job, out = make_job([1])
        e.submit(job)
        out.wait()
        eventually(lambda: e.status().running == 0)
        job, out = make_job([1])
        e.submit(job)
        out.wait()


# ---- failures


def test_an_error_of_a_step_ends_its_job_only() -> None:
    runner = FakeRunner()

    def fail(chunks: object) -> None:
        if any(c.sequence.job.id == "bad" for c in chunks):  # type: ignore[attr-defined]
            raise ApuError("op 3 failed")

    runner.before_wait = fail
    with engine(runner) as e:
        bad, out = make_job([1], id="bad")
        good, after = make_job([2], id="good")
        e.submit(bad)
        e.submit(good)
        done = out.wait()
        assert done.reason == "error" and str(done.error) == "op 3 failed"
        assert after.wait().reason == "length"
        assert e.status().state == "ready"


def test_an_error_of_a_shared_step_finds_the_one_job_at_fault() -> None:
    runner = FakeRunner(max_outputs=8)

    def fail(chunks: object) -> None:
        if any(c.sequence.job.id == "2" and c.sequence.generated == 3 for c in chunks):  # type: ignore[attr-defined]
            raise RuntimeError("broken")

    runner.before_wait = fail
    with engine(runner, parallel=4) as e:
        jobs = [make_job([i], 12, id=str(i)) for i in range(4)]
        for job, _ in jobs:
            e.submit(job)
        reasons = [out.wait().reason for _, out in jobs]
    assert reasons == ["length", "length", "error", "length"]
    for i, (_, out) in enumerate(jobs):
        assert out.tokens == expected([i], 3 if i == 2 else 12)


def test_a_mapping_error_fails_the_engine_for_all() -> None:
    runner = FakeRunner()
    queued = threading.Event()

    def fail(chunks: object) -> None:
        queued.wait(5)
        raise MappingError("/models/a.gguf", "was truncated")

    runner.before_wait = fail
    with engine(runner) as e:
        jobs = [make_job([1]) for _ in range(3)]
        for job, _ in jobs:
            e.submit(job)
        queued.set()
        for _, out in jobs:
            done = out.wait()
            assert done.reason == "error" and isinstance(done.error, MappingError)
        status = e.status()
        assert status.state == "failed" and isinstance(status.error, MappingError)
        with pytest.raises(MappingError, match=r"/models/a\.gguf: was truncated"):
            e.submit(make_job([1])[0])


def test_the_file_is_checked_before_a_job_starts() -> None:
    def check() -> None:
        raise MappingError("/models/a.gguf", "changed")

    e = Engine(FakeRunner(), context=64, check=check)
    job, out = make_job([1])
    e.submit(job)
    assert out.wait().reason == "error"
    eventually(lambda: e.status().state == "failed")
    e.close()


def test_a_failing_callback_ends_its_job_only() -> None:
    with engine() as e:
        job, out = make_job([1], 10)

        def burst(count: int) -> None:
            raise ValueError("receiver")

        out.on_token = burst
        e.submit(job)
        assert out.wait().reason == "error"
        job, out = make_job([2])
        e.submit(job)
        assert out.wait().reason == "length"


def test_a_defect_in_the_loop_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as e:
        monkeypatch.setattr(e._scheduler, "next_step", lambda: 1 / 0)
        job, out = make_job([1])
        e.submit(job)
        assert out.wait().reason == "error"
        assert isinstance(out.done[0].error, ZeroDivisionError)
        eventually(lambda: e.status().state == "failed")
        with pytest.raises(EngineClosedError, match="division by zero"):
            e.submit(make_job([1])[0])


# ---- shutdown


def test_drain_lets_jobs_end_and_takes_no_more() -> None:
    with engine(FakeRunner(step_seconds=0.002)) as e:
        jobs = [make_job([i], 5) for i in range(3)]
        for job, _ in jobs:
            e.submit(job)
        assert e.drain(10)
        assert [out.done[0].reason for _, out in jobs] == ["length"] * 3
        with pytest.raises(EngineClosedError, match="shutting down"):
            e.submit(make_job([1])[0])


def test_close_has_a_deadline() -> None:
    runner = FakeRunner()
    held(runner)  # for ever
    e = Engine(runner, context=256)
    first, out = make_job([1] * 100)
    second, waiting = make_job([2])
    e.submit(first)
    assert runner.entered.wait(5)
    e.submit(second)
    start = time.monotonic()
    e.close(timeout=0.05)
    assert time.monotonic() - start < 2
    assert out.wait().reason == "cancelled" and waiting.wait().reason == "cancelled"
    assert e.status().state == "closed"
    e.close()


def test_idle_costs_no_cpu() -> None:
    with engine() as e:
        job, out = make_job([1])
        e.submit(job)
        out.wait()
        before = time.process_time()
        time.sleep(0.1)
        assert time.process_time() - before < 0.02


# ---- seeds


def test_a_seed_is_reported() -> None:
    with engine() as e:
        job, out = make_job([1], params=SamplingParams(seed=42))
        e.submit(job)
        assert out.wait().seed == 42
        seeds = set()
        for _ in range(3):
            job, out = make_job([1], params=SamplingParams())
            e.submit(job)
            seeds.add(out.wait().seed)
        assert len(seeds) == 3
