"""Chat templates: messages in, one prompt out, rendered as Hugging Face's `apply_chat_template` does.

A template is a program that came with a model file, so it runs in a process of its own (`template_worker`), which is
started from scratch, never forked from this one, and killed when it exceeds its time. Calls block and queue; call them
from a thread. What users wrote is told apart from what the template wrote by `prompt.Guard`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apu_engine.errors import ConfigError, FormatError
from apu_engine.text.errors import TemplateError
from apu_engine.text.formats import find_format
from apu_engine.text.prompt import Guard, Prompt
from apu_engine.text.reasoning import thinking_variables
from apu_engine.text.tokenizer import Tokenizer, check_unicode

log = logging.getLogger(__name__)

# For models that come without a template: a transcript that any language model can continue. End it at DEFAULT_STOP.
DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
DEFAULT_STOP = ("\nUser:", "\nSystem:")

_WORKER = Path(__file__).with_name("template_worker.py")
_LENGTH = struct.Struct("<I")
# Names under which a message may carry its reasoning; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Templates that look into lists of content parts themselves.
_TAKES_PARTS = re.compile(
    r"for\s+\w+\s+in\s+[\w.\[\]'\"]*content|is\s+(?:not\s+)?(?:string|iterable|sequence|mapping)\b"
)


@dataclass(frozen=True)
class Limits:
    """What one rendering may take."""

    seconds: float = 5.0
    memory: int = 256 << 20  # bytes, on top of the bare interpreter with jinja2
    output: int = 16 << 20  # characters
    start_seconds: float = 60.0  # for the process to be up, on a machine that may be busy


class ChatTemplate:
    """One template and the process that renders it. `start()` early hides the 60 ms that the process takes to be up."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        control_tokens: Sequence[str] | Mapping[str, int] = (),
        limits: Limits | None = None,
        is_default: bool = False,
    ) -> None:
        self.source = source
        self.is_default = is_default
        self.own_format: ChatTemplate | None = None  # the model's, where a converter wrote another template
        self.default_stop = DEFAULT_STOP if is_default else ()  # stop strings that the template itself calls for
        self._limits = limits or Limits()
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._guard = Guard(control_tokens, source)
        self._takes_parts = bool(_TAKES_PARTS.search(source))
        self._worker = _Worker(source, self._limits)

    @classmethod
    def from_metadata(
        cls, meta: Mapping[str, Any], tokenizer: Tokenizer, source: str, override: str | None = None
    ) -> ChatTemplate:
        """The template of a GGUF, or `override`; without either the prompt format that is known for such a model, else
        DEFAULT_TEMPLATE, which is logged once.

        `source` is the file's name for errors.
        """
        text = override if override is not None else meta.get("tokenizer.chat_template")
        own = None if override else find_format(meta, tokenizer)
        if text is None or text == "":
            text, own = own, None
        if text is not None and not isinstance(text, str):
            raise FormatError(source, "tokenizer.chat_template", f"expected a string, found {type(text).__name__}")
        is_default = not text
        if is_default:
            log.warning(
                "%s has no chat template; chats are written as a plain transcript (User: ... Assistant:). "
                "A file with the right one can be given with --chat-template.",
                source,
            )
        ends = ["" if end is None else tokenizer.token(end) for end in (tokenizer.bos_id, tokenizer.eos_id)]
        control = tokenizer.control_tokens
        made = cls(text or DEFAULT_TEMPLATE, *ends, control_tokens=control, is_default=is_default)
        if own is not None:
            made.own_format = cls(own, *ends, control_tokens=control)
        return made

    def start(self) -> None:
        """Starts the process without waiting for it."""
        self._worker.start()

    def close(self) -> None:
        """Ends the process; a later rendering starts another."""
        self._worker.close()
        if self.own_format is not None:
            self.own_format.close()

    def variables(self) -> frozenset[str]:
        """Names that the template looks up when it is rendered; blocks until it is compiled. Raises TemplateError for a
        template that does not compile.
        """
        return self._worker.variables()

    def for_effort(self, effort: str | None, given: Collection[str] = ()) -> tuple[ChatTemplate, dict[str, Any]]:
        """The template for a `reasoning_effort`, and the variables that stand for it (`thinking_variables`).

        That is this one, or the model's own format for what this one cannot do. Raises ConfigError where neither can.
        """
        if effort is None:
            return self, {}
        try:
            return self, thinking_variables(effort, self.source, self.variables(), given)
        except ConfigError:
            if self.own_format is None:
                raise
            return self.own_format.for_effort(effort, given)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Prompt:
        """Renders a chat; blocks until it is done.

        Raises TemplateError when the template fails, refuses the messages or exceeds a limit, and TextError for text
        that is not Unicode.
        """
        values: dict[str, Any] = {
            **self._special,
            "documents": None,
            **variables,
            "messages": [self._message(number, message) for number, message in enumerate(messages)],
            "tools": None if not tools else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        special = {name: values.pop(name) for name in self._special if name not in variables}
        dumped = _dump(values)
        try:
            values, twins = self._guard.mark(json.loads(dumped), dumped)
        except RecursionError:
            raise TemplateError("the messages or options are nested too deeply", "input") from None
        rendered = self._worker.render(_dump({**special, **values}).encode())
        return Prompt(self._guard.unescape(rendered, twins), twins)

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"message {number} has no role", "input")
        # A key with null means the same as no key, but templates would print it.
        out = {key: value for key, value in message.items() if value is not None}
        reasoning = next((out[key] for key in _REASONING if key in out), None)
        if reasoning is not None:
            out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
        content = out.get("content")
        if isinstance(content, (list, tuple)) and not self._takes_parts:
            out["content"] = "\n".join(_part(number, index, part) for index, part in enumerate(content))
        return out


def _part(number: int, index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise TemplateError(
            f"message {number}, part {index} is {kind!r}; this model's template takes text only", "input"
        )
    return text


def _dump(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"the messages cannot be passed to it: {error}", "input") from None
    check_unicode(text, "a message, as JSON,")
    return text


class _Worker:
    """The process, started on demand; one rendering at a time. Killed and replaced when it exceeds a limit."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._limits = limits
        setup = {
            "path": [entry for entry in sys.path if entry],
            "template": source,
            "seconds": limits.seconds,
            "memory": limits.memory,
            "output": limits.output,
        }
        self._setup = json.dumps(setup).encode()
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._ready = False
        self._variables: frozenset[str] = frozenset()
        self._refused: dict[str, Any] | None = None  # why the template does not compile

    def start(self) -> None:
        with self._lock:
            self._begin()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def variables(self) -> frozenset[str]:
        with self._lock:
            if not self._variables:
                self._compiled()
            return self._variables

    def render(self, variables: bytes) -> str:
        with self._lock:
            link = self._compiled()
            try:
                answer = self._exchange(link, variables, self._limits.seconds)
            except BaseException:
                self._drop()
                raise
            if "text" in answer:
                return str(answer["text"])
            if answer["reason"] in ("memory", "security"):
                self._drop()  # what it holds now is not known
            raise _failure(answer)

    def _compiled(self) -> _Link:
        """The process, with the template compiled."""
        if self._refused is not None:
            raise _failure(self._refused)
        link = self._begin()
        if not self._ready:
            try:
                self._compile(link)
            except BaseException:
                self._drop()
                raise
        return link

    def _begin(self) -> _Link:
        if self._link is not None and not self._link.alive():
            self._drop()
        if self._link is None:
            self._link, self._ready = _Link(), False
            self._link.queue(self._setup)
        return self._link

    def _compile(self, link: _Link) -> None:
        self._exchange(link, None, self._limits.start_seconds)
        answer = self._exchange(link, None, self._limits.seconds)
        if "error" in answer:
            self._refused = answer
            raise _failure(answer)
        self._variables = frozenset(map(str, answer["variables"]))
        self._ready = True

    def _exchange(self, link: _Link, data: bytes | None, seconds: float) -> dict[str, Any]:
        if data is not None:
            link.queue(data)
        # JSON takes at most 6 bytes a character, and errors are short.
        answer = link.receive(time.monotonic() + seconds, 6 * self._limits.output + (1 << 16))
        if answer is None:
            raise TemplateError(f"it ran longer than {seconds:g} s", "time")
        message: dict[str, Any] = json.loads(answer)
        return message

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _failure(answer: dict[str, Any]) -> TemplateError:
    return TemplateError(str(answer["error"]), answer["reason"], answer["line"])


class _Link:
    """Frames to and from one process, without ever blocking longer than a deadline."""

    def __init__(self) -> None:
        # A short environment: nothing in it for a template to find. Own session: Ctrl-C is for the parent.
        keep = ("TZ", "LANG", "LC_ALL", "LC_TIME")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={name: os.environ[name] for name in keep if name in os.environ},
            cwd="/",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)
        os.set_blocking(self._out, False)
        self._unsent = bytearray()
        self._received = bytearray()
        self._end = weakref.finalize(self, _end, self._process)

    def queue(self, data: bytes) -> None:
        """Sends a frame as far as the pipe takes it; `receive` sends the rest."""
        self._unsent += _LENGTH.pack(len(data)) + data
        self._write()

    def receive(self, deadline: float, limit: int) -> bytes | None:
        """The next frame, or None when the deadline passed. Raises TemplateError when the process is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            writing = False
            while True:
                if len(self._received) >= 4:
                    length = _LENGTH.unpack_from(self._received)[0]
                    if length > limit:
                        raise TemplateError(f"its answer has {length} bytes, at most {limit} are allowed", "size")
                    if len(self._received) >= 4 + length:
                        frame = bytes(self._received[4 : 4 + length])
                        del self._received[: 4 + length]
                        return frame
                if bool(self._unsent) != writing:
                    writing = not writing
                    if writing:
                        selector.register(self._into, selectors.EVENT_WRITE)
                    else:
                        selector.unregister(self._into)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                for key, _ in selector.select(left):
                    if key.fd == self._into:
                        self._write()
                    else:
                        self._read()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._end()

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._into, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # reading reports how it ended

    def _read(self) -> None:
        part = os.read(self._out, 1 << 20)
        if not part:
            code = self._process.wait()
            raise TemplateError(f"its process ended unexpectedly ({_ending(code)})", "worker")
        self._received += part


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()
