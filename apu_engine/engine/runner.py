"""Turns scheduled chunks into one step of a loaded model's plan, and its results into token events."""

from __future__ import annotations

from collections.abc import Sequence

from apu_engine._native import CancelledError
from apu_engine.arch import GroupSpec, LoadedModel
from apu_engine.engine.engine import StepCancelled
from apu_engine.engine.job import TokenEvent
from apu_engine.engine.scheduler import Chunk
from apu_engine.plan import LOGITS, SAMPLE, TOP, Event


class PlanRunner:
    """The engine's Runner over a LoadedModel: forward and sample of a step are one submission."""

    def __init__(self, loaded: LoadedModel) -> None:
        options = loaded.options
        self.groups: tuple[GroupSpec, ...] = loaded.groups
        self.vocabulary = loaded.vocabulary
        self.max_rows = options.max_rows
        self.max_outputs = options.max_outputs
        self._plan = loaded.plan
        self._step = loaded.plan.new_step()
        self._last = loaded.plan.slices["sample"][1]
        self._event: Event | None = None
        self._drawn: list[tuple[int, int, bool]] = []  # output, top-n, whether log-probabilities are wanted

    def submit(self, chunks: Sequence[Chunk]) -> None:
        step, self._drawn = self._step, []
        step.clear()
        for chunk in chunks:
            sequence = chunk.sequence
            tables = [table.entries for table in sequence.tables]
            if sequence.in_prefill:
                fed = sequence.prompt[chunk.start : chunk.start + chunk.count]
                row = step.add_sequence(fed, chunk.start, tables)
            else:
                row = step.add_sequence([sequence.last_token], chunk.start, tables)
            if sequence.job.logits is not None:
                for i in range(chunk.count):
                    step.add_output(row + i, LOGITS, logits=sequence.job.logits[chunk.start + i])
            elif chunk.sample:
                self._add_draw(chunk, row + chunk.count - 1)
        self._event = self._plan.submit(step, 0, self._last)

    def _add_draw(self, chunk: Chunk, row: int) -> None:
        sequence, params = chunk.sequence, chunk.sequence.job.params
        top_n = params.top_logprobs if params.logprobs else 0
        index = self._step.add_output(
            row,
            SAMPLE | TOP if top_n else SAMPLE,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=params.repeat_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            seed=sequence.seed,
            history=sequence.history.arrays() if sequence.history is not None else None,
            bias=sequence.bias,
            top_n=top_n,
            logprob=params.logprobs,
        )
        self._drawn.append((index, top_n, params.logprobs))

    def wait(self) -> list[TokenEvent]:
        event, self._event = self._event, None
        assert event is not None, "nothing was submitted"
        try:
            event.wait()
        except CancelledError:
            raise StepCancelled from None
        step = self._step
        events = []
        for index, top_n, logprobs in self._drawn:
            token = int(step.tokens[index])
            if not logprobs:
                events.append(TokenEvent(token))
                continue
            top = tuple(
                (int(t), float(p))
                for t, p in zip(step.top_ids[index, :top_n], step.top_logprobs[index, :top_n], strict=True)
            )
            events.append(TokenEvent(token, float(step.logprobs[index]), top))
        return events

    def cancel(self) -> None:
        self._plan.cancel()
