"""The engine thread: jobs in through one bounded queue, events out through each job's callback.

One thread owns the plan. Per round it ends cancelled jobs, admits waiting ones in order, builds a step, runs
it and delivers the tokens; with nothing to do it sleeps on a condition. A callback runs on this thread and
must be quick. Cancelling interrupts a running step only when it holds prompt rows (a decode step ends in
milliseconds), and the other jobs' rows of that step are simply run again. Whatever fails, every job gets
exactly one Done: an error of a step ends the jobs that were in it, one at a time if they shared it; a
MappingError or a fault of the loop itself ends all jobs and marks the engine as failed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from apu_engine.engine.job import (
    ContextLengthError,
    Done,
    EngineClosedError,
    FinishReason,
    Job,
    QueueFullError,
    Timings,
    TokenEvent,
)
from apu_engine.engine.pages import GroupLike, PagePool
from apu_engine.engine.scheduler import Chunk, Scheduler
from apu_engine.engine.sequence import Sequence as Running
from apu_engine.errors import ApuError, ConfigError, MappingError
from apu_engine.memory.watchdog import Watchdog

log = logging.getLogger("apu_engine.engine")
State = Literal["ready", "draining", "closed", "failed"]


class StepCancelled(Exception):
    """`Runner.cancel` stopped the step."""


class Runner(Protocol):
    """Runs steps on a device, under the scheduler. All but `cancel` are for the engine thread."""

    @property
    def groups(self) -> Sequence[GroupLike]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_outputs(self) -> int: ...
    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Start a step; copies what it needs before it returns."""

    def wait(self) -> list[TokenEvent]:
        """The tokens drawn, one per chunk with `sample`, in order. Raises StepCancelled, or what failed."""

    def cancel(self) -> None:
        """Stop the step that runs; nothing when none does. From any thread."""


@dataclass(slots=True, frozen=True)
class EngineStatus:
    """What /health and a status line want to know."""

    state: State
    running: int
    waiting: int
    error: Exception | None


class Engine:
    """Runs jobs on `runner`, at most `parallel` at a time with at most `queue` more waiting.

    `context` bounds prompt and answer together. `check` is called before a job is admitted and raises
    MappingError when the model's file changed. `watchdog` ends the process when a step hangs. The thread starts with
    the first job.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        context: int,
        parallel: int = 1,
        queue: int = 64,
        check: Callable[[], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.context = context
        self.vocabulary = runner.vocabulary
        self._runner = runner
        self._check = check
        self._watchdog = watchdog or Watchdog()
        self._pid = os.getpid()
        self._queue_limit = queue
        self._scheduler = Scheduler(PagePool(runner.groups), parallel, runner.max_rows, runner.max_outputs)
        if self._scheduler.pool.reserve(context, runner.max_rows) is None:
            raise ConfigError(f"ctx: {context} tokens do not fit the KV cache that the model was planned with", "ctx")
        for group in self._scheduler.pool.groups:
            group.reserved = 0
        self._lock = threading.Lock()  # guards everything below and the moment between building and submitting
        self._wake = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._waiting: deque[tuple[Job, float]] = deque()
        self._active = 0  # admitted jobs, a copy of len(scheduler.running) that other threads may read
        self._stepping: list[Chunk] = []
        self._state: State = "ready"
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    # ---- any thread

    def submit(self, job: Job) -> None:
        """Queue a job. Its callback gets tokens and then exactly one Done.

        Raises QueueFullError, EngineClosedError, ContextLengthError, ConfigError for a bad prompt, or the
        MappingError that made the engine fail; the callback is then never called.
        """
        if self.forked:
            raise EngineClosedError("the model was loaded before this process was forked; load it again after the fork")
        self._validate(job)
        with self._lock:
            if self._state == "failed":
                raise self.failure()
            if self._state != "ready":
                raise EngineClosedError("the engine is shutting down and takes no more requests")
            free = self._scheduler.parallel - self._active
            if len(self._waiting) >= self._queue_limit + max(free, 0):
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait, which is the limit (queue={self._queue_limit}); "
                    "try again later"
                )
            self._waiting.append((job, time.monotonic()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="apu-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """End a job with Done("cancelled"): at once when it waits or is in prefill, else after its current
        token.
        """
        with self._lock:
            job.mark_cancelled()
            self._interrupt()
            self._wake.notify()

    def status(self) -> EngineStatus:
        with self._lock:
            return EngineStatus(self._state, self._active, len(self._waiting), self._error)

    def failure(self) -> Exception:
        """A fresh exception that says why the engine failed."""
        error = self._error
        if isinstance(error, MappingError):
            return MappingError(error.file, error.problem)
        return EngineClosedError(f"the engine stopped after an error: {error}; restart it")

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more jobs and wait for those there are; False when `timeout` seconds did not suffice."""
        with self._lock:
            if self._state == "ready":
                self._state = "draining"
            return self._idle.wait_for(lambda: not (self._active or self._waiting), timeout)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that loaded the model: the threads that run it are not here."""
        return os.getpid() != self._pid

    def close(self, timeout: float = 0.0) -> None:
        """Drain for `timeout` seconds, cancel what is left, and end the thread. Can be called twice."""
        self.drain(timeout)
        with self._lock:
            if self._state != "failed":
                self._state = "closed"
            for job, _ in self._waiting:
                job.mark_cancelled()
            for sequence in self._scheduler.running:
                sequence.job.mark_cancelled()
            self._interrupt()
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- helpers

    def _validate(self, job: Job) -> None:
        prompt, room = job.prompt, min(job.max_tokens, 1)
        if not len(prompt):
            raise ConfigError("prompt: expected at least one token, found none", "prompt")
        if len(prompt) + room > self.context:
            raise ContextLengthError(len(prompt), self.context, room)
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocabulary:
            bad = low if low < 0 else high
            raise ConfigError(f"prompt: expected token ids from 0 to {self.vocabulary - 1}, found {bad}", "prompt")
        for token in job.params.logit_bias:
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"logit_bias: expected token ids from 0 to {self.vocabulary - 1}, found {token}",
                    "logit_bias",
                )
        if job.max_tokens < 0:
            raise ConfigError(f"max_tokens: expected at least 0, found {job.max_tokens}", "max_tokens")
        if job.logits is not None and (job.max_tokens or job.logits.shape != (len(prompt), self.vocabulary)):
            raise ConfigError(
                f"logits: expected max_tokens 0 and an array of {(len(prompt), self.vocabulary)}, "
                f"found {job.max_tokens} and {job.logits.shape}",
                "logits",
            )

    def _interrupt(self) -> None:
        """Under the lock: stop the running step if a cancelled job keeps it long."""
        chunks = self._stepping
        if any(c.sequence.job.cancelled for c in chunks) and any(c.count > 1 for c in chunks):
            self._runner.cancel()

    # ---- engine thread

    def _main(self) -> None:
        try:
            while self._wait_for_work():
                self._round()
        except BaseException as error:  # a defect in the loop must not leave jobs without an end
            log.exception("the engine thread failed")
            self._fail(error if isinstance(error, Exception) else ApuError(f"engine thread: {error!r}"))

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not (self._waiting or self._scheduler.running):
                self._idle.notify_all()
                if self._state in ("closed", "failed"):
                    return False
                self._wake.wait()
            return True

    def _round(self) -> None:
        self._end_cancelled()
        self._admit()
        chunks = self._scheduler.next_step()
        if not chunks:
            return
        for chunk in chunks:
            if not chunk.sequence.started_at:
                chunk.sequence.started_at = time.monotonic()
        try:
            with self._watchdog.during(partial(_describe, chunks)):
                with self._lock:  # so that a cancel comes either before this or finds the step
                    if any(chunk.sequence.job.cancelled for chunk in chunks):
                        return
                    self._runner.submit(chunks)
                    self._stepping = chunks
                tokens = self._runner.wait()
        except StepCancelled:
            return
        except MappingError as error:
            self._fail(error)
            return
        except Exception as error:
            self._step_failed(chunks, error)
            return
        finally:
            with self._lock:
                self._stepping = []
        self._deliver(chunks, tokens)

    def _end_cancelled(self) -> None:
        with self._lock:
            dropped = [item for item in self._waiting if item[0].cancelled]
            for item in dropped:
                self._waiting.remove(item)
        for job, submitted in dropped:
            self._emit(job, _unstarted(job, submitted, "cancelled"))
        for sequence in [s for s in self._scheduler.running if s.job.cancelled]:
            self._finish(sequence, "cancelled")

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                job, submitted = self._waiting[0]
                tokens = min(len(job.prompt) + job.max_tokens, self.context)
                reserved = self._scheduler.reserve(tokens)
                if reserved is None:
                    return
                self._waiting.popleft()
                self._active += 1
            try:
                if self._check is not None:
                    self._check()
                sequence = Running(job, submitted, self._scheduler.pool.tables(), reserved)
            except Exception as error:
                self._scheduler.pool.unreserve(reserved)
                with self._lock:
                    self._active -= 1
                self._emit(job, _unstarted(job, submitted, "error", error))
                if isinstance(error, MappingError):
                    self._fail(error)
                    return
                continue
            with self._lock:
                self._scheduler.add(sequence)

    def _deliver(self, chunks: list[Chunk], tokens: list[TokenEvent]) -> None:
        drawn = iter(tokens)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.position += chunk.count
            sequence.alone = False
            job = sequence.job
            if not chunk.sample:
                if not sequence.in_prefill:
                    self._finish(sequence, "length")  # nothing was to be generated
                continue
            event = next(drawn)
            if job.cancelled:
                continue  # ended at the start of the next round
            if event.token in job.stop_ids and not job.ignore_eos:
                self._finish(sequence, "stop")
                continue
            reason = sequence.accept(event.token)
            if reason is None and len(sequence.prompt) + sequence.generated >= self.context:
                reason = "length"
            if not self._emit(job, event):
                self._finish(sequence, "error", ApuError("the receiver of this request's tokens failed"))
            elif reason is not None:
                self._finish(sequence, reason)

    def _step_failed(self, chunks: list[Chunk], error: Exception) -> None:
        """End the job whose step failed; when several shared it, run each alone to learn which."""
        if len(chunks) > 1:
            log.warning("a step of %d requests failed, running them one by one: %s", len(chunks), error)
            for chunk in chunks:
                chunk.sequence.alone = True
            return
        log.error("a request failed: %s", error, exc_info=not isinstance(error, ApuError))
        self._finish(chunks[0].sequence, "error", error)

    def _fail(self, error: Exception) -> None:
        """End all jobs with `error` and take no more."""
        with self._lock:
            self._state, self._error = "failed", error
            waiting, running = list(self._waiting), list(self._scheduler.running)
            self._waiting.clear()
        log.error("the engine stops: %s", error)
        for sequence in running:
            self._finish(sequence, "error", error)
        for job, submitted in waiting:
            self._emit(job, _unstarted(job, submitted, "error", error))
        with self._lock:
            self._idle.notify_all()

    def _finish(self, sequence: Running, reason: FinishReason, error: Exception | None = None) -> None:
        with self._lock:
            self._scheduler.remove(sequence)
            self._active -= 1
        self._emit(sequence.job, sequence.done(reason, error))

    def _emit(self, job: Job, event: TokenEvent | Done) -> bool:
        try:
            job.on_event(job, event)
        except Exception:
            log.exception("the callback of request %r failed", job.id)
            return False
        return True


def _describe(chunks: Sequence[Chunk]) -> str:
    """What a step is, for the watchdog."""
    rows = sum(chunk.count for chunk in chunks)
    deepest = max(chunk.start + chunk.count for chunk in chunks)
    prompts = sum(chunk.sequence.in_prefill for chunk in chunks)
    return (
        f"running a step of {rows} rows for {len(chunks)} requests ({prompts} of them reading their prompt), "
        f"up to position {deepest}"
    )


def _unstarted(job: Job, submitted: float, reason: FinishReason, error: Exception | None = None) -> Done:
    """The end of a job that never ran."""
    timings = Timings(time.monotonic() - submitted, 0.0, 0.0, len(job.prompt), 0, 0, 0.0)
    return Done(reason, timings, job.params.seed or 0, error)
