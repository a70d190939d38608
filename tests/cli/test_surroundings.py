"""The command where locale, names of files and standard streams are not as usual: it works, or says why in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from apu_engine.config import EngineConfig
from apu_engine.engine import load
from apu_engine.errors import ConfigError
from models import TinyModel

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*args: str | bytes | Path, shell: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command: list[str | bytes | Path] = [sys.executable, "-m", "apu_engine", *args]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment})


@pytest.mark.parametrize("environment", [{}, C_LOCALE, {"PYTHONIOENCODING": "ascii"}], ids=["utf8", "c", "ascii"])
def test_names_that_are_no_text(tiny_llama: TinyModel, tmp_path: Path, environment: dict[str, str]) -> None:
    name = os.fsencode(tmp_path) + b"/odd-\xff\xfe\xc3\xa9\n.gguf"
    os.link(tiny_llama.path, name)
    done = run("footprint", name, "--ctx", "64", **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"odd-" in done.stdout
    done = run("footprint", name + b"x", **environment)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and b"does not exist" in done.stderr


@pytest.mark.parametrize("environment", [{}, C_LOCALE, {"PYTHONIOENCODING": "ascii"}], ids=["utf8", "c", "ascii"])
def test_prompts_are_utf8_in_every_locale(tiny_llama: TinyModel, environment: dict[str, str]) -> None:
    args = ("chat", "-m", tiny_llama.path, "--raw", "-n", "4", "--temp", "0", "--ctx", "64", "-p")
    done = run(*args, "é模".encode(), **environment)
    assert done.returncode == 0, done.stderr
    done = run(*args, b"\xff", **environment)
    assert (done.returncode, done.stderr) == (2, b"apu-engine: prompt: is not UTF-8 text (byte 0)\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tiny_llama: TinyModel, closed: str) -> None:
    done = run("chat", "-m", tiny_llama.path, "--raw", "-p", "a", "-n", "2", "--ctx", "64", shell=closed)
    assert (done.returncode, done.stderr) == (0, b"")


def test_chat_template_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    (tmp_path / "good").write_text("{{ 'é' }}", "utf-8")
    found = {"fifo": "FIFO", "huge": "larger than 1 MiB", "bytes": "byte 2", "": "a directory", "no": "does not exist"}
    for name, problem in found.items():
        with pytest.raises(ConfigError, match=f"chat_template: .*{problem}"):
            load._template_file(EngineConfig(chat_template=str(tmp_path / name)))
    assert load._template_file(EngineConfig(chat_template=str(tmp_path / "good"))) == "{{ 'é' }}"
