"""Reasoning on the wire: reasoning_content plain and streamed, reasoning_effort, usage, and the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from server_fakes import CHAT, Served

from apu_engine.text.reasoning import Block

CLOSED, OPENED = Block("<think>", "</think>", False), Block("<think>", "</think>", True)
CHAT_PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    served.llm.block = OPENED
    served.llm.runner.answer = b"\nhm, hm\n</think>\n\nYes, yes."
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="any", messages=MESSAGES, **fields)  # type: ignore[call-overload]


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[str, str, list[Any]]:
    reasoning = content = ""
    chunks = []
    async for chunk in await ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        chunks.append(chunk)
        for choice in chunk.choices:
            more = getattr(choice.delta, "reasoning_content", None) or ""
            assert not (more and content)  # all reasoning comes before the content
            reasoning += more
            content += choice.delta.content or ""
    return reasoning, content, chunks


async def test_plain(client: AsyncOpenAI) -> None:
    answer = await ask(client)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, hm", "Yes, yes.")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(b"\nhm, hm\n</think>\n\nYes, yes.")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(b"\nhm, hm\n</think>")


async def test_stream(client: AsyncOpenAI) -> None:
    reasoning, content, chunks = await streamed(client)
    assert (reasoning, content) == ("hm, hm", "Yes, yes.")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len(b"\nhm, hm\n</think>")
    assert sum(bool(getattr(c.choices[0].delta, "reasoning_content", None)) for c in chunks if c.choices) > 3


async def test_stream_helper_and_answer_sent_back(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="any", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Yes, yes."
    plain = (await ask(client)).choices[0].message
    again: Any = [*MESSAGES, plain.model_dump(), *MESSAGES]
    assert (await client.chat.completions.create(model="any", messages=again)).choices[0].message.content


@pytest.mark.parametrize(
    ("block", "answer", "reasoning", "content"),
    [
        (CLOSED, b"<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        (CLOSED, b"Yes <think>.", None, "Yes <think>."),
        (CLOSED, b"<think></think>Yes.", None, "Yes."),
        (CLOSED, b"  <thi", None, "  <thi"),
        (OPENED, b"hm </thi", "hm </thi", ""),  # the end never comes
        (OPENED, b"</think>Yes.", None, "Yes."),
        (None, b"<think>hm</think>Yes.", None, "<think>hm</think>Yes."),
    ],
)
async def test_blocks(
    served: Served, client: AsyncOpenAI, block: Block | None, answer: bytes, reasoning: str | None, content: str
) -> None:
    served.llm.block, served.llm.runner.answer = block, answer
    message = (await ask(client)).choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
    assert (await streamed(client))[:2] == (reasoning or "", content)


async def test_the_limit_may_fall_into_the_reasoning(client: AsyncOpenAI) -> None:
    answer = await ask(client, max_tokens=4)
    choice = answer.choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("hm,", "")
    assert choice.finish_reason == "length" and answer.usage.completion_tokens_details.reasoning_tokens == 4


async def test_stop_strings_are_the_contents(client: AsyncOpenAI) -> None:
    message = (await ask(client, stop=[", "])).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, hm", "Yes")
    assert (await streamed(client, stop=[", "]))[:2] == ("hm, hm", "Yes")


async def test_logprobs_have_all_tokens(client: AsyncOpenAI) -> None:
    content = (await ask(client, logprobs=True)).choices[0].logprobs.content
    assert "".join(token.token for token in content) == "\nhm, hm\n</think>\n\nYes, yes."
    chunks = (await streamed(client, logprobs=True))[2]
    pieces = [t.token for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
    assert "".join(pieces) == "\nhm, hm\n</think>\n\nYes, yes."


async def test_efforts_reach_the_template(served: Served, client: AsyncOpenAI) -> None:
    for effort, expected in (("none", False), ("low", True), ("high", True)):
        await ask(client, reasoning_effort=effort)
        assert served.llm.rendered == {"enable_thinking": expected}
    served.llm.runner.answer = b"Yes."
    message = (await ask(client, reasoning_effort="none")).choices[0].message
    assert message.content == "Yes." and "reasoning_content" not in message.model_dump(exclude_unset=True)
    served.llm.template, served.llm.reads = "'none' 'max'", ("reasoning_effort", "thinking")
    await ask(client, reasoning_effort="max")
    assert served.llm.rendered == {"thinking": True, "reasoning_effort": "max"}
    await ask(client, extra_body={"chat_template_kwargs": {"thinking": False}})
    assert served.llm.rendered == {"thinking": False}


async def test_efforts_that_cannot_be_had(served: Served, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no mode for 'max'; expected one of none, minimal") as caught:
        await ask(client, reasoning_effort="max")
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "invalid_value")
    served.llm.reads = ()
    with pytest.raises(openai.BadRequestError, match="no thinking modes"):
        await ask(client, reasoning_effort="low", stream=True)
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        await client.completions.create(model="any", prompt="x", extra_body={"reasoning_effort": "low"})


async def test_unknown_template_variables(served: Served) -> None:
    status, error = await served.refused(CHAT_PATH, {**CHAT, "chat_template_kwargs": {"enable_thinkin": False}})
    assert (status, error["param"], error["code"]) == (400, "chat_template_kwargs.enable_thinkin", "unsupported_field")
    assert error["message"].startswith("chat_template_kwargs.enable_thinkin: ") and "it has" in error["message"]


async def test_completions_are_not_split(served: Served, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="any", prompt="x", max_tokens=40)
    assert answer.choices[0].text == "\nhm, hm\n</think>\n\nYes, yes."
