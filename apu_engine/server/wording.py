"""How the two endpoints word an answer: whole choices, streamed choices, log-probabilities.

Both wordings have the same shape, so that one path in openai.py serves them: `whole` for a plain answer; `opening`,
`part`s and a last `part` with the finish reason for a streamed one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from apu_engine.engine.job import SamplingParams, TokenEvent

if TYPE_CHECKING:
    from apu_engine import LLM


class Wording(Protocol):
    prefix: str  # of ids
    object: str
    chunk_object: str
    prompt_field: str

    def whole(self, text: str, reasoning: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]: ...
    def opening(self) -> dict[str, Any] | None: ...
    def part(self, text: str, reasoning: str, tokens: list[TokenEvent], reason: str | None) -> dict[str, Any]: ...


class ChatWording:
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    def whole(self, text: str, reasoning: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"index": 0, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def opening(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def part(self, text: str, reasoning: str, tokens: list[TokenEvent], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        said = {"reasoning_content": reasoning, "content": text}
        return self._chunk({name: piece for name, piece in said.items() if piece}, logprobs, reason)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any] | None:
        if not self._params.logprobs:
            return None
        content = [
            {**self._entry(t.token, t.logprob), "top_logprobs": [self._entry(*top) for top in t.top]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._llm.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionWording:
    prefix = "cmpl"
    object = chunk_object = "text_completion"
    prompt_field = "prompt"

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._offset = 0  # characters of the answer so far

    def whole(self, text: str, reasoning: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        return self.part(text, reasoning, tokens, reason)

    def opening(self) -> None:
        return None

    def part(self, text: str, _: str, tokens: list[TokenEvent], reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any] | None:
        if not self._params.logprobs:
            return None
        texts = [self._piece(t.token) for t in tokens]
        offsets = []
        for piece in texts:
            offsets.append(self._offset)
            self._offset += len(piece)
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{self._piece(i): p for i, p in t.top} for t in tokens],
            "text_offset": offsets,
        }

    def _piece(self, token: int) -> str:
        return self._llm.token_bytes(token).decode("utf-8", "replace")
