"""The real `openai` client against the server: sync, async, streams, errors."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.serve.fake import FakeEngine

HELLO = [{"role": "user", "content": "Hello"}]


def test_sync(served):
    answer = served.openai.chat.completions.create(model=served.model, messages=HELLO, max_tokens=8, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id == answer.id
    plain = served.openai.completions.create(model=served.model, prompt="Hello", max_tokens=3)
    assert isinstance(plain.choices[0].text, str)
    assert served.openai.models.list().data[0].id == served.model
    assert served.openai.models.retrieve(served.model).id == served.model


def test_stream(served):
    fields = {"model": served.model, "messages": HELLO, "temperature": 0, "max_tokens": 8}
    *chunks, last = served.openai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text == served.openai.chat.completions.create(**fields).choices[0].message.content
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    with served.openai.chat.completions.stream(model=served.model, messages=HELLO, max_tokens=8) as events:
        assert isinstance(events.get_final_completion().choices[0].message.content, str)


def test_async(served):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(stream: bool) -> str:
                fields = {"model": served.model, "messages": HELLO, "temperature": 0, "max_tokens": 8}
                if not stream:
                    return (await client.chat.completions.create(**fields)).choices[0].message.content
                parts = [c.choices[0].delta.content or "" async for c in await client.chat.completions.create(**fields, stream=True)]
                return "".join(parts)

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(12)))

    assert len(set(asyncio.run(many()))) == 1


def test_an_abandoned_stream_is_freed(served):
    stream = served.openai.chat.completions.create(
        model=served.model, messages=HELLO, stream=True, max_tokens=served.engine.max_len - 100, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert served.idle()


def test_errors(served):
    create = served.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="nope", messages=HELLO)
    assert missing.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
            create(model=served.model, messages=[{"role": "user", "content": "word " * served.engine.max_len}], stream=stream)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        create(model=served.model, messages=[])


def test_faults(serving):
    with serving(engine := FakeEngine(step=0.002), api_key="key") as live:
        with pytest.raises(openai.AuthenticationError):
            live.openai.models.list()
        client = live.openai.with_options(api_key="key")
        fields = {"model": "fake", "messages": HELLO, "extra_body": {"ignore_eos": True}}
        stream = client.chat.completions.create(**fields, stream=True)
        next(iter(stream))
        engine.crash = "boom"
        with pytest.raises(openai.APIError, match="boom"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(**fields)
