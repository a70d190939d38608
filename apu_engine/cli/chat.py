"""`apu-engine chat`: a conversation on the terminal, one answer for `-p` or piped text, or a plain
continuation.

Answers go to standard output and everything else, also what a model thinks before it answers, to standard error, so
that a pipe gets the answer alone.
Ctrl-C ends the answer that is being written, not the conversation; at the prompt it clears the line.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apu_engine.cli.app import add, require_model, with_config
from apu_engine.config import EngineConfig
from apu_engine.errors import ApuError, ConfigError

if TYPE_CHECKING:
    from apu_engine.engine.llm import LLM, Completion, Generation

HELP = """\
/help            this text
/reset           forget the conversation
/system [TEXT]   set or clear the system prompt; forgets the conversation
/regen           answer the last message again
/timings         switch timings on or off
/quit            leave, as does Ctrl-D
A line that ends in \\ goes on in the next. Ctrl-C stops an answer."""


_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


@with_config(
    "model", "engine", "sampling", "text", "output", exclude=("queue", "parallel", "log_level"), model_argument=True
)
def chat(
    config: EngineConfig,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Answer this and exit.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, without a chat template.")] = False,
) -> int | None:
    """Chat with a model. With -p or piped text: one answer, then exit; both together: -p, then the piped
    text.
    """
    require_model(config, "chat")
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    alone = prompt is None
    if alone and not interactive:
        prompt = _read_stdin()
    if not interactive and not prompt:
        raise ConfigError("the prompt is empty; give -p TEXT or pipe text in", "prompt")
    prompt = _typed(prompt or "", "prompt")
    from apu_engine.engine.llm import LLM

    with LLM.from_config(config, on_progress=_progress(), for_chat=not raw) as llm:
        for notice in llm.runtime.notices:
            print(f"note: {notice}", file=sys.stderr)
        session = Session(llm, raw, config.timings, _typed(config.system or "", "system"))
        if interactive:
            return repl(session)
        piped = "" if alone else _piped_text()
        return session.once("\n\n".join(part for part in (prompt, piped) if part))


def _typed(text: str, option: str) -> str:
    """An argument's bytes as UTF-8, also where the locale is not: then Python hands them over as surrogates."""
    import os

    try:
        return text if _is_utf8(text) else os.fsencode(text).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: is not UTF-8 text (byte {error.start})", option) from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _piped_text() -> str:
    """What was piped in beside -p. A pipe that nobody has written to by now is left alone: it may never end."""
    import os
    import select
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return ""
        if not select.select([sys.stdin], [], [], 0)[0]:
            print("note: nothing was piped in yet; only -p is answered", file=sys.stderr)
            return ""
    except (AttributeError, OSError, ValueError):  # no standard input, or one of another kind
        return ""
    return _read_stdin()


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().rstrip("\n")
    except (AttributeError, OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"standard input is not UTF-8 text (byte {error.start})", "prompt") from None
        return ""  # none, or closed


def _progress() -> Any:
    if not sys.stderr.isatty():
        return None
    from apu_engine.memory.progress import ProgressPrinter

    return ProgressPrinter()


@dataclass
class Session:
    """A conversation: history, and how its answers are printed."""

    llm: LLM
    raw: bool = False
    timings: bool = False
    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.history

    def once(self, text: str) -> int:
        """One answer to `text`; 130 when it was interrupted."""
        completion = self._print(self._start(text))
        if self.timings:
            print(start_lines(self.llm, completion), file=sys.stderr)
        print(flush=True)
        return 130 if completion.finish_reason == "cancelled" else 0

    def turn(self, text: str) -> None:
        """Answer `text` within the conversation. An answer that was interrupted stays in it as far as it
        came.
        """
        before = list(self.history)
        try:
            completion = self._print(self._start(text))
        except BaseException:
            self.history[:] = before  # a question without its answer would spoil the next one
            raise
        print(flush=True)
        if not self.raw:
            answer = {"role": "assistant", "content": completion.text}
            self.history.append(answer | ({"reasoning_content": completion.reasoning} if completion.reasoning else {}))
        if completion.finish_reason == "length":
            limit = self.llm.config.max_tokens
            asked = limit and completion.timings.generated_tokens >= limit
            why = f"--max-tokens {limit}" if asked else "the context is full; /reset starts afresh"
            print(f"(stopped at the limit on tokens: {why})", file=sys.stderr)

    def _start(self, text: str) -> Generation:
        if self.raw:
            return self.llm.stream(text)
        self.history.append({"role": "user", "content": text})
        return self.llm.stream_chat(self.messages())

    def _print(self, generation: Generation) -> Completion:
        thinking = Thinking()
        try:
            for reasoning, piece in generation.parts():
                thinking.write(reasoning)
                if piece:
                    thinking.end()
                    sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            generation.close()
        finally:
            thinking.end()
        completion = generation.result
        if self.timings:
            print(f"\n{timing_line(completion)}", file=sys.stderr)
        return completion


class Thinking:
    """What a model thinks, on standard error; dim where that is a terminal."""

    def __init__(self) -> None:
        self._begun = False
        self._dim = sys.stderr is not None and sys.stderr.isatty()

    def write(self, text: str) -> None:
        if text:
            if not self._begun:
                self._print("\x1b[2m" if self._dim else "(thinking) ")
            self._begun = True
            self._print(printable(text) if self._dim else text)

    def end(self) -> None:
        """After the last of it; harmless when there was none."""
        if self._begun:
            self._print("\x1b[0m\n\n" if self._dim else "\n")
        self._begun = False

    def _print(self, text: str) -> None:
        print(text, end="", flush=True, file=sys.stderr)


def printable(text: str) -> str:
    """`text` for a terminal: control characters, which could move the cursor or worse, as visible signs."""
    return text.translate(_VISIBLE)


def timing_line(completion: Completion) -> str:
    """Prompt and generation of one answer."""
    t = completion.timings
    prompt_rate = t.prompt_tokens / t.prompt_seconds if t.prompt_seconds else 0.0
    steps = max(t.generated_tokens - 1, 0)
    rate = steps / t.decode_seconds if t.decode_seconds else 0.0
    return (
        f"prompt {t.prompt_tokens} tokens in {t.prompt_seconds * 1e3:.0f} ms ({prompt_rate:.1f} tok/s), "
        f"answer {t.generated_tokens} tokens in {t.decode_seconds * 1e3:.0f} ms ({rate:.1f} tok/s)"
    )


def start_lines(llm: LLM, completion: Completion) -> str:
    """Where the time went from process start to the first token, when nobody had to type in between."""
    from apu_engine.engine.load import stage_lines

    t = completion.timings
    load = sum(seconds for _, seconds in llm.runtime.stages)
    total = _since_start(t.decode_seconds)
    rest = total - load - t.first_token_seconds
    return (
        f"load {load * 1e3:.0f} ms ({stage_lines(llm.runtime.stages)})\n"
        f"process start to first token {total * 1e3:.0f} ms: interpreter, imports and template {rest * 1e3:.0f} ms, "
        f"load {load * 1e3:.0f} ms, queue and prompt {t.first_token_seconds * 1e3:.0f} ms"
    )


def _since_start(later: float) -> float:
    """Seconds from the start of this process to `later` seconds ago."""
    import os
    from pathlib import Path

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started - later


# ---- the read-eval-print loop


def repl(session: Session) -> int:
    """Read lines until Ctrl-D or /quit."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and recall for input()

    print(f"{session.llm.summary()}\n/help lists commands.", file=sys.stderr)
    while True:
        try:
            text = _read_message()
            if text.startswith("/"):
                if command(session, text) == "quit":
                    return 0
            elif text.strip():
                session.turn(text)
        except EOFError:
            print(file=sys.stderr)
            return 0
        except ApuError as error:
            print(f"error: {error}", file=sys.stderr)
            if session.llm.engine.status().state == "failed":
                return 1
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _read_message() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def command(session: Session, text: str) -> str:
    """Run a /command; "quit" when the loop is to end."""
    name, _, rest = text[1:].partition(" ")
    if name in ("quit", "exit", "bye"):
        return "quit"
    if name == "reset":
        session.history.clear()
    elif name == "system":
        session.system = rest.strip() or None
        session.history.clear()
    elif name == "timings":
        session.timings = not session.timings
    elif name == "regen":
        if len(session.history) < 2:
            print("there is nothing to answer again", file=sys.stderr)
        else:
            session.history.pop()
            session.turn(session.history.pop()["content"])
    else:
        if name != "help":
            print(f"there is no command /{name}", file=sys.stderr)
        print(HELP, file=sys.stderr)
    return ""


def register(app: typer.Typer) -> None:
    add(app, "chat", chat)
