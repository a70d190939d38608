"""`python -m apu_engine serve` with SmolLM2-135M-Instruct, as a user starts it, and the official client against it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from apu_engine.catalog import DEMO, fetch

QUESTION = [{"role": "user", "content": "Name the capital city of France."}]
OPTIONS = ("--port", "0", "--ctx", "2048", "--threads", "2", "--drain-timeout", "20")


class Server:
    """The process, once it has printed its ready line."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self.process, self.log = process, log
        self.ready_line = process.stdout.readline().strip()
        found = re.search(r"; (http://\S+)$", self.ready_line)
        assert found, f"no ready line: {self.ready_line!r}\n{log.read_text()}"
        self.url = found[1]
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def ask(self, **fields: Any) -> Any:
        fields = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
        return self.client.chat.completions.create(model="any", **fields)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> None:
        """Until /health says so."""
        deadline = time.monotonic() + seconds
        while not condition(self.health()[1]):
            assert time.monotonic() < deadline, self.health()
            time.sleep(0.01)


@contextmanager
def serve(model: Path, log: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "apu_engine", "serve", str(model), *OPTIONS, *options]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        server = Server(process, log)
        yield server
        server.client.close()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch(DEMO)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(model, tmp_path_factory.mktemp("serve") / "log") as running:
        yield running


def test_ready(server: Server) -> None:
    assert re.fullmatch(
        r"weights 93\.\d MiB mapped, copied 0, anonymous 0; ctx 2048 \(KV [\d.]+ MiB\); http://127\.0\.0\.1:\d+",
        server.ready_line,
    )
    status, health = server.health()
    assert status == 200 and health["ready"] == server.ready_line and health["chat"] is True
    assert [card.id for card in server.client.models.list()] == ["SmolLM2-135M-Instruct.Q4_1"]


def test_plain_and_streamed_answers(server: Server) -> None:
    plain = server.ask()
    assert "Paris" in plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "stop"
    assert plain.model_extra["timings"]["predicted_per_second"] > 1
    chunks = list(server.ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage
    assert plain.usage.completion_tokens <= len(chunks)


def test_stop_strings_and_logprobs(server: Server) -> None:
    answer = server.ask(stop=["Paris"], logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert "Paris" not in text and text.startswith("The capital") and answer.choices[0].finish_reason == "stop"
    content = answer.choices[0].logprobs.content
    assert "".join(t.token for t in content).startswith(text)
    assert all(t.logprob <= 0 and len(t.top_logprobs) == 2 and t.token == t.top_logprobs[0].token for t in content)


def test_completion_goes_on_from_text_and_ids(server: Server) -> None:
    prompt = "The capital of France is"
    text = server.client.completions.create(model="m", prompt=prompt, max_tokens=4, temperature=0).choices[0].text
    assert text.startswith(" Paris")
    request = urllib.request.Request(
        server.url + "/tokenize",
        json.dumps({"content": prompt, "add_special": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        ids = json.load(answer)["tokens"]
    again = server.client.completions.create(model="m", prompt=ids, max_tokens=4, temperature=0)
    assert again.choices[0].text == text


def test_concurrent_requests_do_not_change_each_other(server: Server) -> None:
    def ask(number: int) -> str:
        fields: dict[str, Any] = {"temperature": 1, "seed": number, "max_tokens": 12}
        if number % 2:
            return server.ask(**fields).choices[0].message.content
        return "".join(c.choices[0].delta.content or "" for c in server.ask(stream=True, **fields))

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert len(set(alone)) > 1


def test_prompt_over_the_context(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d{4} tokens.*2048") as caught:
        server.ask(messages=[{"role": "user", "content": "word " * 2500}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.alone
def test_leaving_in_prefill_and_decode(server: Server) -> None:
    long = [{"role": "user", "content": "word " * 1900}]
    for messages, leave_when in ((long, "prefill"), (QUESTION, "decode")):
        body = {"messages": messages, "stream": True, "ignore_eos": True, "max_tokens": 1500}
        data = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            if leave_when == "decode":
                assert b"200 OK" in client.recv(4096)
            server.until(lambda health: health["running"] == 1, 5)
        left = time.monotonic()
        server.until(lambda health: health["running"] == 0, 2)
        assert time.monotonic() - left < 1, leave_when
    assert "Paris" in server.ask().choices[0].message.content
    assert server.log.read_text().count("client left") == 2


def test_an_idle_server_sleeps(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    time.sleep(0.3)  # workers stop spinning
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.02


def test_sigterm_lets_a_stream_end(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log") as server:
        stream = server.ask(stream=True, max_tokens=60, extra_body={"ignore_eos": True})
        chunks = [next(iter(stream))]
        server.process.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(10) == 0
        with pytest.raises(openai.APIConnectionError):
            server.ask()


def test_second_signal_and_deadline(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log") as server, ThreadPoolExecutor(1) as pool:
        endless = pool.submit(server.ask, max_tokens=1900, extra_body={"ignore_eos": True})
        server.until(lambda health: health["running"] == 1, 5)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert server.process.poll() is None
        assert server.end(signal.SIGINT) == 130
        with pytest.raises(openai.APIConnectionError):
            endless.result(5)


def test_truncated_model_is_named(model: Path, tmp_path: Path) -> None:
    """The process survives, and both the request and /health name the file."""
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(model, copy)
    with serve(copy, tmp_path / "log") as server:
        assert server.ask(max_tokens=2).choices[0].message.content
        with copy.open("r+b") as file:
            file.truncate(1 << 20)
        status, health = server.health()
        assert status == 503 and str(copy) in health["error"] and "truncated" in health["error"]
        with pytest.raises(openai.InternalServerError) as caught:
            server.ask()
        assert caught.value.status_code == 503 and str(copy) in str(caught.value)
        assert server.end() == 0


def test_model_truncated_during_an_answer(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(model, copy)
    with serve(copy, tmp_path / "log") as server:
        stream = server.ask(stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
        next(iter(stream))
        with copy.open("r+b") as file:
            file.truncate(1 << 20)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert str(copy) in str(caught.value)
        assert server.health()[0] == 503
        assert server.end() == 0


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    command = [sys.executable, "-m", "apu_engine", "serve", str(bad), *OPTIONS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and ended.stdout == ""
    verdict, message = ended.stderr.splitlines()
    assert " doctor: " in verdict and message.startswith("apu-engine: ") and str(bad) in message
