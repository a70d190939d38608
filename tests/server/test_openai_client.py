"""The official client: synchronous and asynchronous, streamed and plain, and how refusals arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from server_fakes import Served, eventually, serving

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: OpenAI | AsyncOpenAI, **fields: object):  # type: ignore[no-untyped-def]
    return client.chat.completions.create(model="any", messages=MESSAGES, **fields)  # type: ignore[call-overload]


async def test_plain(client: AsyncOpenAI) -> None:
    answer = await ask(client, temperature=0, max_tokens=64, seed=1, stop=["."], user="me")
    choice = answer.choices[0]
    assert choice.message.content == "Hello, world" and choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 13 and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra["timings"]["predicted_n"] == 13


async def test_stream(client: AsyncOpenAI) -> None:
    text, usage, reasons = "", None, []
    async for chunk in await ask(client, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert text == "Hello, world." and reasons[-1] == "stop" and not any(reasons[:-1])
    assert usage is not None and usage.completion_tokens == 13


async def test_stream_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="any", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world."


async def test_answer_can_be_sent_back(client: AsyncOpenAI) -> None:
    answer = await ask(client)
    again = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    assert (await client.chat.completions.create(model="any", messages=again)).choices[0].message.content  # type: ignore[call-overload]


async def test_synchronous(served: Served) -> None:
    def talk() -> tuple[str, str, str]:
        with OpenAI(base_url=served.url + "/v1", api_key="none") as client:
            plain = ask(client).choices[0].message.content
            streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True))
            completed = client.completions.create(model="any", prompt="x").choices[0].text
        return plain, streamed, completed

    assert await asyncio.to_thread(talk) == ("Hello, world.",) * 3


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="any", prompt="x", logprobs=1, max_tokens=2)
    assert answer.choices[0].text == "He" and answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["H", "e"]
    stream = await client.completions.create(model="any", prompt=[257, 120], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world."


async def test_logprobs(client: AsyncOpenAI) -> None:
    answer = await ask(client, logprobs=True, top_logprobs=3, max_tokens=2)
    content = answer.choices[0].logprobs.content
    assert [t.token for t in content] == ["H", "e"] and content[0].bytes == [72]
    assert [t.logprob for t in content[0].top_logprobs] == [-0.5, -1.5, -2.5]


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_request(client: AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, n=2, stream=stream)
    assert caught.value.param == "n" and caught.value.code == "unsupported_field"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 300}], stream=stream
        )  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_rate_limit(served: Served, client: AsyncOpenAI, stream: bool) -> None:
    served.llm.runner.gate.clear()
    tasks = [asyncio.create_task(ask(client)) for _ in range(5)]
    await eventually(lambda: served.llm.engine.status().waiting == 4)
    with pytest.raises(openai.RateLimitError):
        await ask(client, stream=stream)
    served.llm.runner.gate.set()
    await asyncio.gather(*tasks)


async def test_client_retries_while_loading(served: Served) -> None:
    """Retry-After is understood: the client waits and asks again."""
    llm, served.service.llm = served.service.llm, None
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=2) as client:
        answer = asyncio.create_task(ask(client))
        await asyncio.sleep(0.2)
        served.service.llm = llm
        assert (await answer).choices[0].message.content == "Hello, world."


async def test_unavailable_and_key() -> None:
    async with serving(loaded=False, api_key="right") as served:
        async with AsyncOpenAI(base_url=served.url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)
        async with AsyncOpenAI(base_url=served.url + "/v1", api_key="right", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await ask(client)
            assert caught.value.status_code == 503


async def test_error_in_a_stream(served: Served, client: AsyncOpenAI) -> None:
    left = 5

    def fail() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("a defect")

    served.llm.runner.fail = fail
    text = ""
    with pytest.raises(openai.APIError, match="internal error"):
        async for chunk in await ask(client, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "Hell"


async def test_leaving_a_stream_cancels_it(served: Served, client: AsyncOpenAI) -> None:
    served.llm.runner.step_seconds = 0.005
    stream = await ask(client, stream=True, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: served.llm.engine.status().running == 0, 1)


async def test_timeout_cancels(served: Served, client: AsyncOpenAI) -> None:
    served.llm.runner.gate.clear()
    with pytest.raises(openai.APITimeoutError):
        await ask(client, timeout=0.05)
    await eventually(lambda: served.llm.engine.status().running == 0, 1)
