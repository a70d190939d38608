"""The command line: verbs on a tiny model, and that every failure is one line and an exit status."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from apu_engine.cli import main
from apu_engine.cli.chat import Session, printable
from apu_engine.config import specs
from apu_engine.errors import ApuError
from models import TinyModel


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    status = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


def start(*args: str | Path, **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "apu_engine", *map(str, args)]
    return subprocess.Popen(command, **{**pipes, **options})


# ---- help and errors


def test_help_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for verb in ("serve", "chat", "bench", "plan", "show", "footprint", "doctor"):
        assert verb in out
    assert run(capsys)[1] == out  # no arguments at all


@pytest.mark.parametrize(
    ("verb", "groups"),
    [("serve", {"model", "engine", "sampling", "server", "output"}), ("chat", {"model", "sampling", "text", "output"})],
)
def test_help_shows_options_with_their_twins(capsys: pytest.CaptureFixture[str], verb: str, groups: set[str]) -> None:
    _, out, _ = run(capsys, verb, "--help")
    skipped = {"chat": {"queue", "parallel", "log_level"}, "serve": {"timings"}}[verb]
    for item in specs():
        if item.group in groups and item.flags and item.name not in skipped:
            assert item.flags[0] in out and item.env in out, item.name
        elif item.name in skipped:
            assert item.env not in out, item.name


@pytest.mark.parametrize("verb", ["bench", "plan", "footprint"])
def test_help_of_the_others(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0 and "--model" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--version")
    assert status == 0 and re.fullmatch(r"apu-engine \d+\.\d+\.\d+\n", out)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{out.split()[1]}"' in project


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["fly"], 2, "No such command 'fly'; see `apu-engine --help`"),
        (["chat", "--bogus"], 2, "No such option: --bogus"),
        (["chat", "--ctx"], 2, "--ctx"),
        (["chat", "-p", "x", "--ctx", "abc", "m.gguf"], 2, "--ctx: expected an integer from 0 to"),
        (["chat", "-p", "x"], 2, "no model was named"),
        (["serve"], 2, "no model was named"),
        (["plan"], 2, "no model was named"),
        (["footprint"], 2, "nothing to look at"),
        (["bench", "m.gguf", "-o", "xml"], 2, "expected one of md, json, jsonl, csv"),
        (["bench", "m.gguf", "-p", "1,x"], 2, "-p: expected integers"),
        (["bench", "m.gguf", "-p", "1_6"], 2, "-p: expected integers"),
        (["bench", "m.gguf", "-d", "\u0661"], 2, "-d: expected integers"),
        (["bench", "m.gguf", "-n", "9" * 5000], 2, "-n: expected integers"),
        (["bench", "m.gguf", "-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["chat", "-p", "x", "missing.gguf"], 1, "missing.gguf"),
        (["plan", "missing.gguf"], 1, "missing.gguf"),
        (["footprint", "--pid", "4194303"], 1, "no process 4194303"),
        (["chat", "-p", "x", "-m", "m.gguf", "--device", "abacus"], 1, ""),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], status: int, words: str
) -> None:
    found, out, err = run(capsys, *args)
    assert found == status
    assert out == "" and err.count("\n") == 1 and err.startswith("apu-engine: ")
    assert words in err and "Traceback" not in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in run(capsys, "plan", "missing.gguf", "--debug")[2]
    monkeypatch.setenv("APU_DEBUG", "1")
    assert "Traceback" in run(capsys, "plan", "missing.gguf")[2]


def test_the_environment_is_an_option_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_llama: TinyModel
) -> None:
    monkeypatch.setenv("APU_MODEL", str(tiny_llama.path))
    assert run(capsys, "plan")[0] == 0
    monkeypatch.setenv("APU_CTX", "-7")
    status, _, err = run(capsys, "plan")
    assert status == 2 and "APU_CTX" in err and "environment" in err


def test_a_verb_begins_without_what_it_does_not_need() -> None:
    """Imports are most of the time until the first token."""
    slow = {"pydantic", "torch", "transformers", "aiohttp", "rich", "psutil", "jinja2", "statistics"}
    code = "import sys; from apu_engine.cli import main; main(['chat', '-p', 'x', '-m', 'missing.gguf', '-t', '1'])\n"
    code += f"print(sorted({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n" and "missing.gguf" in done.stderr


# ---- verbs


def test_plan(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel) -> None:
    status, out, _ = run(capsys, "plan", tiny_llama.path)
    assert status == 0
    assert "attention" in out and "token_embd" in out and "bytes" in out
    status, out, _ = run(capsys, "plan", "-m", tiny_llama.path, "--json")
    ops = [json.loads(line) for line in out.splitlines()]
    assert ops[0]["op"] == "embed" and ops[-1]["op"] == "sample"
    assert sum(op["weight_bytes"] for op in ops) > 0


@pytest.mark.parametrize("form", ["md", "json", "jsonl", "csv"])
def test_bench(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel, form: str) -> None:
    args = ["-p", "20", "-n", "4", "-d", "0,30", "-r", "2", "-t", "1", "-b", "16", "-o", form]
    status, out, err = run(capsys, "bench", "-m", tiny_llama.path, *args)
    assert status == 0, err
    if form == "md":
        assert [line.split("|")[7].strip() for line in out.splitlines()[2:]] == [
            "pp20", "pp20 @ d30", "tg4", "tg4 @ d30",
        ]  # fmt: skip
        return
    if form == "json":
        rows = json.loads(out)
    elif form == "jsonl":
        rows = [json.loads(line) for line in out.splitlines()]
    else:
        rows = list(csv.DictReader(io.StringIO(out)))
    assert [(int(r["n_prompt"]), int(r["n_gen"]), int(r["n_depth"])) for r in rows] == [
        (20, 0, 0), (20, 0, 30), (0, 4, 0), (0, 4, 30),
    ]  # fmt: skip
    for row in rows:
        assert float(row["avg_ts"]) > 0 and float(row["stddev_ts"]) >= 0
        assert int(row["n_threads"]) == 1 and int(row["n_batch"]) == 16
        assert row["model_filename"].endswith(".gguf")


def test_footprint(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel) -> None:
    status, out, err = run(capsys, "footprint", tiny_llama.path, "--json")
    assert status == 0, err
    (item,) = json.loads(out)["files"]
    assert item["path"] == str(tiny_llama.path) and item["anonymous"] == 0 and item["rss"] > 0
    assert os.getpid() in item["processes"] and json.loads(out)["engine"]["kv"] > 0
    status, out, _ = run(capsys, "footprint", "--pid", str(os.getpid()))
    assert status == 0 and "anonymous" in out


# ---- chat


def test_one_shot(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel) -> None:
    args = ["chat", "-m", tiny_llama.path, "-p", "hello", "-n", "5", "--temp", "0"]
    first = run(capsys, *args)
    assert first[0] == 0 and first[1].endswith("\n") and first[2] == ""
    assert run(capsys, *args) == first
    status, out, err = run(capsys, *args, "--timings", "--system", "the other")
    assert status == 0 and out != first[1]
    assert "process start to first token" in err and "tokenizer" in err and "tok/s" in err


def test_piped_text(tiny_llama: TinyModel) -> None:
    options = ["-m", tiny_llama.path, "-n", "5", "--temp", "0"]
    whole = start("chat", *options, "-p", "hello\n\nthe world").communicate("")
    piped = start("chat", *options, "-p", "hello").communicate("the world\n")
    only = start("chat", *options).communicate("hello\n\nthe world")
    assert whole[0] and whole == piped == only
    process = start("chat", *options)
    assert process.communicate("")[1].startswith("apu-engine: the prompt is empty")
    assert process.returncode == 2


def test_a_pipe_that_stays_open_and_empty_is_not_waited_for(tiny_llama: TinyModel) -> None:
    process = start("chat", "-m", tiny_llama.path, "-n", "5", "-p", "hello")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read()
    assert "only -p is answered" in process.stderr.read()
    assert process.wait(20) == 0


def test_a_closed_pipe_is_no_traceback(tiny_llama: TinyModel) -> None:
    process = start("chat", "-m", tiny_llama.path, "-p", "hello", "-n", "400", stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(20) == 1


def test_ctrl_c_ends_a_one_shot_answer(tiny_llama: TinyModel) -> None:
    process = start("chat", tiny_llama.path, "-p", "hello", "-c", "200000", "--temp", "0", "--raw")
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.close()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert [line for line in process.stderr.read().splitlines() if not line.startswith("note: ")] == []
    assert process.wait(20) == 130


class Terminal:
    """A chat on a pseudo terminal: `say` types a line, `read_until` waits for output."""

    def __init__(self, *args: str | Path) -> None:
        self._screen, terminal = os.openpty()
        self.process = start("chat", *args, stdin=terminal, stdout=terminal, stderr=terminal, text=False)
        os.close(terminal)
        self.seen = ""

    def read_until(self, text: str, seconds: float = 20.0) -> str:
        """What was shown up to and with `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._screen], [], [], left)[0], f"no {text!r} in {self.seen[-500:]!r}"
            self.seen += os.read(self._screen, 65536).decode(errors="replace")
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def say(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def close(self) -> int:
        status = self.process.wait(20)
        os.close(self._screen)
        return status


def test_a_conversation(tiny_llama: TinyModel) -> None:
    chat = Terminal(tiny_llama.path, "-n", "6", "--seed", "3")
    assert "weights" in chat.read_until("> ")
    chat.say("hello\n")
    first = chat.read_until("> ")
    assert "stopped at the limit on tokens" in first
    chat.say("/timings\n")
    chat.read_until("> ")
    chat.say("/regen\n")
    assert "tok/s" in chat.read_until("> ")
    for line, answer in (
        ("/nothing", "there is no command /nothing"),
        ("/help", "/reset"),
        ("/system the other", ""),
        ("/regen", "there is nothing to answer again"),
    ):
        chat.say(line + "\n")
        assert answer in chat.read_until("\n> ")
    chat.say("\x04")
    assert chat.close() == 0


def test_ctrl_c_stops_the_answer_not_the_conversation(tiny_llama: TinyModel) -> None:
    chat = Terminal(tiny_llama.path, "-c", "200000", "--temp", "0", "--raw")
    chat.read_until("> ")
    chat.say("hello the world and\n")
    chat.read_until("\n")  # the echo
    chat.read_until("e")  # an answer has begun
    chat.process.send_signal(signal.SIGINT)
    chat.read_until("\n> ")
    time.sleep(0.3)  # readline misses a signal between showing the prompt and waiting for a key
    chat.process.send_signal(signal.SIGINT)  # at the prompt it clears the line
    chat.read_until("> ")
    chat.say("/quit\n")
    assert chat.close() == 0


@pytest.mark.parametrize("when", ["start", "answer"])
def test_a_question_whose_answer_failed_leaves_the_conversation(when: str) -> None:
    class Failing:
        def stream_chat(self, messages: list[dict[str, str]]) -> Any:
            assert messages[-1] == {"role": "user", "content": "and now?"}
            if when == "start":
                raise ApuError("refused")
            return self

        def parts(self) -> Any:
            raise ApuError("failed")

    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    session = Session(Failing(), history=list(history))  # type: ignore[arg-type]
    with pytest.raises(ApuError):
        session.turn("and now?")
    assert session.history == history


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\n\x7f\x9b") == "a␛[2Jb\tc\n␡�"
