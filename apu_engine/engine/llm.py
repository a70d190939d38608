"""The Python API: one object per model, text or token ids in, text and token ids out.

Everything runs through the same engine thread, tokenizer and templates as the server; this file only joins
them for callers that wait. A file without a tokenizer still gives `logits(ids)` and `generate(ids)`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.config import EngineConfig
from apu_engine.engine.job import ContextLengthError, Done, FinishReason, Job, Timings, TokenEvent
from apu_engine.engine.load import OnProgress, OnStage, Runtime, load, summary
from apu_engine.engine.sampling import with_overrides
from apu_engine.errors import ConfigError

if TYPE_CHECKING:
    from apu_engine.memory.footprint import Footprint
    from apu_engine.text.reasoning import Block
    from apu_engine.text.stream import TextStream
    from apu_engine.text.tokenizer import Tokenizer
    from apu_engine.weights.handover import WeightMap

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Message = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Completion:
    """A finished answer. `tokens` are all generated ids; `text` ends before a stop string, and is "" without
    a tokenizer. `logprobs` has one TokenEvent per token when they were asked for. What a model wrote as reasoning
    before the answer to a chat is `reasoning`, not part of `text`; `reasoning_tokens` are its tokens."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    timings: Timings
    seed: int
    logprobs: list[TokenEvent] | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    """A rendered conversation: its token ids, and the reasoning block that the answer may begin with."""

    tokens: list[int]
    block: Block | None = None


class Generation:
    """An answer under way: iterate over its text pieces; `result` is the Completion once it ended. `parts()`
    also gives the reasoning as it comes.

    Leaving it for good (`close`, leaving the `with` block, or dropping it) cancels the request.
    """

    def __init__(self, runtime: Runtime, job: Job, text: TextStream | None) -> None:
        self._runtime = runtime
        self._job = job
        self._text = text
        self._tokens: list[TokenEvent] = []
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._result: Completion | None = None
        self._events: queue.SimpleQueue[TokenEvent | Done] = queue.SimpleQueue()
        put = self._events.put  # the engine must not keep this object alive
        job.on_event = lambda _, event: put(event)
        runtime.engine.submit(job)

    @property
    def tokens(self) -> list[int]:
        """Ids so far."""
        return [event.token for event in self._tokens]

    @property
    def result(self) -> Completion:
        """The whole answer; waits for it. Raises what ended the request with an error."""
        for _ in self:
            pass
        assert self._result is not None
        return self._result

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for _, piece in self.parts():
            if piece:
                return piece
        raise StopIteration

    def parts(self) -> Iterator[tuple[str, str]]:
        """Pairs of reasoning and text as they come, one of them possibly empty."""
        while self._result is None:
            try:
                part = self._take(self._events.get())
            except BaseException:
                self.close()
                raise
            if any(part):
                yield part

    def _take(self, event: TokenEvent | Done) -> tuple[str, str]:
        """The reasoning and the text that an event makes certain."""
        reasoning = piece = ""
        if isinstance(event, Done):
            if self._text is not None:
                piece, reasoning = self._text.flush(), self._text.reasoning
        elif self._stopped:
            return "", ""
        else:
            self._tokens.append(event)
            if self._text is not None:
                piece, reasoning = self._text.push(event.token), self._text.reasoning
                if self._stopped:
                    self._runtime.engine.cancel(self._job)
        self._pieces.append(piece)
        self._reasoning.append(reasoning)
        if isinstance(event, Done):
            self._finish(event)
        return reasoning, piece

    @property
    def _stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._text is not None and self._text.finished is not None

    def _finish(self, done: Done) -> None:
        self._result = Completion(
            text="".join(self._pieces),
            tokens=self.tokens,
            finish_reason="stop" if self._stopped and done.reason != "error" else done.reason,
            timings=done.timings,
            seed=done.seed,
            logprobs=list(self._tokens) if self._job.params.logprobs else None,
            reasoning="".join(self._reasoning),
            reasoning_tokens=0 if self._text is None else self._text.reasoning_tokens,
        )
        if done.error is not None:
            raise done.error

    def close(self) -> None:
        """Cancel the request unless it has ended; `result` is then what came so far."""
        if self._result is not None:
            return
        self._runtime.engine.cancel(self._job)
        while not isinstance(event := self._events.get(), Done):
            pass
        with contextlib.suppress(Exception):  # whoever leaves does not ask how it ended
            self._finish(event)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_result", True) is None:
            self._runtime.engine.cancel(self._job)


class LLM:
    """A model, loaded. Options that are None come from their APU_* variable, else from their default
    (docs/configuration.md); `options` takes any other option of EngineConfig by name.

    `on_stage(name)` is called at the end of "tokenizer", "pool", "map", "load" and "ready"; `on_progress`
    with the Progress of readahead, registration or staging.

    Raises ConfigError, FormatError, ModelError, MappingError or BudgetError; each message says what to do.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        device: str | None = None,
        ctx: int | None = None,
        threads: int | None = None,
        precision: str | None = None,
        *,
        on_stage: OnStage | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> None:
        given = {
            "model": fspath(path) if isinstance(path, PathLike) else path,
            "device": device,
            "ctx": ctx,
            "threads": threads,
            "precision": precision,
            **options,
        }
        self._open(EngineConfig.resolve(given), on_stage, on_progress)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        on_stage: OnStage | None = None,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        for_chat: bool = False,
    ) -> LLM:
        """A model loaded as `config` says; nothing is read from the environment. Setting `cancel` ends
        loading soon.
        """
        self = cls.__new__(cls)
        self._open(config, on_stage, on_progress, cancel, for_chat)
        return self

    def _open(
        self,
        config: EngineConfig,
        on_stage: OnStage | None,
        on_progress: OnProgress | None,
        cancel: threading.Event | None = None,
        for_chat: bool = False,
    ) -> None:
        self.runtime = load(config, on_stage, on_progress, cancel, for_chat)
        self.config = config
        self.engine = self.runtime.engine
        self.sampling = self.runtime.sampling

    # ---- facts

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.runtime.context.tokens

    @property
    def vocabulary(self) -> int:
        """V: token ids are below it."""
        return self.runtime.loaded.vocabulary

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError when the file has none."""
        if self.runtime.tokenizer is None:
            assert self.runtime.tokenizer_error is not None
            raise self.runtime.tokenizer_error
        return self.runtime.tokenizer

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by plan: "weights", "kv" and "scratch" (reserved, committed when used), "copied", "made" of small
        tensors that no file holds as they are needed, such as norms of 16 bits in float32; and "registered" of file
        pages that a GPU reads in place, "device" of a GPU's own memory.
        """
        loaded, weights = self.runtime.loaded, self.runtime.weights
        on_gpu = self.runtime.device.props.kind != "cpu"
        return {
            "weights": loaded.weight_bytes,
            "kv": loaded.kv_bytes,
            "scratch": loaded.scratch_bytes,
            "copied": self.runtime.copied_bytes,
            "made": loaded.made_bytes,
            "registered": weights.registered_bytes,
            "device": weights.device_bytes + loaded.kv_bytes + loaded.scratch_bytes if on_gpu else 0,
        }

    @property
    def memory_report(self) -> dict[str, Any]:
        """`memory` with "strategy" and "way" of the weights: what /health says."""
        placement = self.runtime.placement
        return {"strategy": placement.strategy, "way": placement.way, **self.memory}

    def footprint(self) -> Footprint:
        """What this process holds of the model's files and in anonymous memory, as the kernel reports it."""
        from apu_engine.memory.footprint import footprint

        return footprint(files=self.runtime.model.files)

    @property
    def weights(self) -> WeightMap:
        """The model's tensors by name, as read-only views of the file: `llm.weights["output_norm.weight"].numpy()`."""
        from apu_engine.weights.handover import WeightMap

        return WeightMap(self.runtime)

    def check(self) -> None:
        """Raises MappingError when a file of the model was truncated or changed in place."""
        self.runtime.weights.check()

    def summary(self) -> str:
        """One line: how the weights are reached, copied and anonymous bytes, context and KV cache."""
        return summary(self.runtime)

    # ---- tokens

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, with BOS where the model wants it; control tokens in it stay text by default."""
        if not isinstance(text, str):
            raise ConfigError(f"text: expected a string, found {text!r:.80}", "text")
        return self.tokenizer.encode(text, add_special, parse_special)

    def check_length(self, texts: Iterable[str]) -> None:
        """Raises ContextLengthError for a prompt too long by its characters alone, which can take long to encode."""
        characters = sum(map(len, texts))
        if characters > 16 * self.context:  # the usual case costs no look at the vocabulary
            least = -(-characters // self.tokenizer.longest)
            if least > self.context:
                raise ContextLengthError(least, self.context, bound=True)

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(_flat_ids(ids, "ids"), skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for: any bytes, not always whole characters."""
        return self.tokenizer.token_bytes(token)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer; none without a tokenizer."""
        tokenizer = self.runtime.tokenizer
        return frozenset() if tokenizer is None else tokenizer.eog_ids

    def text_stream(
        self, stop: str | Sequence[str] = (), continuation: bool = False, block: Block | None = None
    ) -> TextStream:
        """A filter that turns the tokens of one answer into text, ending at stop strings. With `block`, from
        `chat_prompt`, reasoning is kept apart.
        """
        from apu_engine.text.reasoning import ReasoningSplit
        from apu_engine.text.stream import TextStream, check_stop

        split = None if block is None else ReasoningSplit(block)
        return TextStream(self.tokenizer, check_stop(stop), continuation=continuation, split=split)

    def logits(self, ids: Prompt) -> NDArray[np.float32]:
        """(T, V) float32: for each position the logits of the token after it. Runs from an empty context."""
        prompt = self._ids(ids)
        out = np.empty((len(prompt), self.vocabulary), np.float32)
        job = self._job(prompt, 0, {}, ignore_eos=True)
        job.logits = out
        Generation(self.runtime, job, None).result  # noqa: B018  waits
        return out

    # ---- answers

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Continue `prompt`, text or token ids; iterate over the result for text as it comes.

        `max_tokens` None takes the option of that name, 0 there goes on to the end of the context. `sampling`
        takes temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n, frequency_penalty,
        presence_penalty, seed, logit_bias, logprobs, top_logprobs. Raises ConfigError or ContextLengthError
        at once for what cannot run.
        """
        job = self._job(self._ids(prompt), max_tokens, sampling, ignore_eos)
        text: TextStream | None = None
        if self.runtime.tokenizer is not None or stop:
            text = self.text_stream(stop, continuation=True)
        return Generation(self.runtime, job, text)

    def generate(self, prompt: Prompt, max_tokens: int | None = None, **options: Any) -> Completion:
        """As `stream`, but waits for the whole answer."""
        return self.stream(prompt, max_tokens, **options).result

    @property
    def has_chat_template(self) -> bool:
        """Whether the file or the `chat_template` option has one; else chats are written as a plain
        transcript.
        """
        return self.runtime.has_template

    @property
    def chat_stop(self) -> tuple[str, ...]:
        """Stop strings that every chat needs: those of the plain transcript where there is no template."""
        return tuple(self.runtime.template.default_stop)

    def chat_tokens(
        self, messages: str | Sequence[Message], reasoning_effort: str | None = None, **template_options: Any
    ) -> list[int]:
        """The prompt for a conversation, as `chat_prompt` makes it."""
        return self.chat_prompt(messages, reasoning_effort, template_options).tokens

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt for a conversation, up to where the answer begins; what users wrote stays text.

        `reasoning_effort` is how much the model is asked to think: none, minimal, low, medium, high, xhigh or max, as
        far as its template knows them; None takes the `reasoning_effort` option, else the template's own default.
        Raises ConfigError for an effort or a template option that this template does not know, TemplateError when it
        refuses the messages, ModelError without a tokenizer.
        """
        from apu_engine.text.prompt import encode_prompt
        from apu_engine.text.reasoning import SWITCHES, find_block

        template = self.runtime.template
        if isinstance(messages, str):
            system = self.config.system
            head = [{"role": "system", "content": system}] if system else []
            messages = [*head, {"role": "user", "content": messages}]
        if not isinstance(messages, (list, tuple)):
            raise ConfigError(f"messages: expected text or a list of messages, found {messages!r}", "messages")
        options = dict(template_options or {})
        effort = reasoning_effort
        if effort is None and not options.keys() & {*SWITCHES, "reasoning_effort"}:
            effort = self.config.reasoning_effort
        template, variables = template.for_effort(effort, options)
        if options:
            check_template_options(options, template.variables())
        options |= variables
        prompt = template.render(messages, **options)
        block = find_block(prompt, template.source, self.tokenizer.control_tokens)
        return ChatPrompt(encode_prompt(self.tokenizer, prompt), block)

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        reasoning_effort: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Answer a conversation, rendered with the model's chat template.

        A string is one user message, preceded by the `system` option's text where it is set.
        `reasoning_effort` is as in `chat_prompt`, `template_options` go to the template, the others are as in
        `stream`; stop strings are looked for in the answer, not in the reasoning before it.
        """
        prompt = self.chat_prompt(messages, reasoning_effort, template_options)
        job = self._job(prompt.tokens, max_tokens, sampling, ignore_eos)
        from apu_engine.text.stream import check_stop

        text = self.text_stream([*check_stop(stop), *self.chat_stop], block=prompt.block)
        return Generation(self.runtime, job, text)

    def chat(self, messages: str | Sequence[Message], max_tokens: int | None = None, **options: Any) -> Completion:
        """As `stream_chat`, but waits for the whole answer."""
        return self.stream_chat(messages, max_tokens, **options).result

    def close(self, timeout: float = 0.0) -> None:
        """End running requests after at most `timeout` seconds and free everything. Harmless twice."""
        self.runtime.close(timeout)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- helpers

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenize(prompt)
        return _flat_ids(prompt, "prompt", "text or ")

    def _job(self, ids: Sequence[int], max_tokens: int | None, sampling: Mapping[str, Any], ignore_eos: bool) -> Job:
        if max_tokens is None:
            max_tokens = self.config.max_tokens or max(self.context - len(ids), 1)
        elif isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
            raise ConfigError(f"max_tokens: expected an integer of at least 0, found {max_tokens!r}", "max_tokens")
        return Job(
            prompt=ids,
            params=with_overrides(self.runtime.sampling, **sampling),
            max_tokens=max_tokens,
            stop_ids=self.stop_ids,
            ignore_eos=ignore_eos,
        )


def check_template_options(options: Mapping[str, Any], reads: frozenset[str]) -> None:
    """Raises ConfigError for a template option that would be ignored; `reads` are the variables that the template looks
    up.
    """
    known = reads | {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
    for name in options:
        if name not in known:
            own = sorted(known - {"messages", "bos_token", "eos_token"})
            raise ConfigError(
                f"template_options.{name:.80}: the chat template has no such variable; it has {', '.join(own)}",
                f"template_options.{name:.80}",
            )


def _flat_ids(value: Any, name: str, other: str = "") -> list[int]:
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"{array.ndim} dimensions of {array.dtype}"
        raise ConfigError(f"{name}: expected {other}a flat list of token ids, found {found}", name)
    ids: list[int] = array.tolist()
    return ids
