"""The wire cases of OpenAI's protocol (WIRE P01-P07, P11, P19 and good answers), over loopback."""

from __future__ import annotations

import json
import re

import pytest

from tests.serve.fake import FakeEngine

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, PLAIN])


def body(served, path, **fields):
    given = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": served.model, **given, "max_tokens": 4, "temperature": 0, **fields}


def events(served, path, **fields):
    """Data frames of a stream, parsed; checks the framing."""
    answer = served.http.post(path, json=body(served, path, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    return [json.loads(f.removeprefix("data: ")) for f in frames if not f.startswith(":")]


def text_of(chunks):
    choices = [c for chunk in chunks for c in chunk["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def text(answer):
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


# P01
@BOTH
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unless_asked(served, path, options):
    assert all(chunk.get("usage") is None for chunk in events(served, path, stream_options=options))


@BOTH
def test_usage_once_and_last(served, path):
    *chunks, last = events(served, path, ignore_eos=True, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(chunk.get("usage") is None for chunk in chunks)
    whole = served.http.post(path, json=body(served, path, ignore_eos=True)).json()["usage"]
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole["completion_tokens"] == 4
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][k] for k in same] == [whole[k] for k in same]
    for usage in (whole, last["usage"]):
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_stream_options_without_stream_are_harmless(served):
    assert served.chat(max_tokens=2, stream_options={"include_usage": True}).json()["usage"]["completion_tokens"] == 2


# P02
@BOTH
@pytest.mark.parametrize(
    ("pieces", "stop", "right", "finish"),
    [
        (["AB", "DEF", "G", "HI", "JK"], ["DEFGHIJ"], "AB", "stop"),
        (["x", "DE", "Fz"], ["DEFGHIJ"], "xDEFz", "length"),
        (["\n", "Obs", "erv", "ation:"], "\nObservation:", "", "stop"),
        (["x", "AB", "DEF"], ["BDEF", "ABDEF"], "x", "stop"),
        (["x", "AB", "DEF"], [], "xABDEF", "length"),
    ],
)
def test_stop_strings(served, path, pieces, stop, right, finish):
    ids = served.script(*pieces)
    fields = {"force_tokens": ids, "stop": stop, "max_tokens": len(ids), "ignore_eos": True}
    chunks = events(served, path, **fields)
    whole = served.http.post(path, json=body(served, path, **fields))
    assert text_of(chunks) == text(whole) == right
    assert chunks[-1]["choices"][0]["finish_reason"] == whole.json()["choices"][0]["finish_reason"] == finish
    assert whole.json()["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("stop", ["", [""], ["a"] * 5, 5, [5], {"a": 1}, "a" * 5000])
def test_bad_stop(served, stop):
    refused(served.chat(stop=stop), "stop")


# P03
@BOTH
def test_characters_over_tokens(served, path):
    data = "a👋é👩‍💻".encode()
    ids = served.byte_ids(data)
    chunks = events(served, path, force_tokens=ids, max_tokens=len(ids), ignore_eos=True)
    pieces = [t for chunk in chunks if (t := text_of([chunk]))]
    assert "".join(pieces) == "a👋é👩‍💻"
    assert "\ufffd" not in "".join(pieces)
    cut = {"force_tokens": ids[:3], "max_tokens": 3}
    whole = served.http.post(path, json=body(served, path, **cut))
    assert text_of(events(served, path, **cut)) == text(whole) == "a\ufffd"
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    ids = served.byte_ids(b"a\xffb")
    assert text_of(events(served, path, force_tokens=ids, max_tokens=3)) == "a\ufffdb"


@pytest.mark.parametrize(
    "raw",
    [
        r'{"messages":[{"role":"user","content":"\ud83d"}],"max_tokens":1}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"stop":"\ud83d"}',
        r'{"messages":[{"role":"\ud83d","content":"x"}],"max_tokens":1}',
        r'{"messages":[{"role":"user","content":"x"}],"model":"\ud83d"}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tool_choice":"\ud83d"}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":"\ud83d"}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"session_id":"\ud83d"}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":[{"type":"\ud83d"}]}',
        r'{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":\"\\ud83d\"}"}}]}],"max_tokens":1}',
        r'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"\ud83d":1,"chat_template_kwargs":{"\ud83d":1}}',
    ],
)
def test_lone_surrogates_are_no_fault(served, raw):
    answer = served.http.post(CHAT, content=raw.encode())
    assert answer.status_code in (200, 400, 404), answer.text
    answer.json()


# P04
def test_developer_and_system_messages(served):
    def tokens(*lead):
        messages = [*lead, {"role": "user", "content": "hi"}]
        answer = served.http.post(CHAT, json={"messages": messages, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    two = tokens({"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Use English."})
    assert two == tokens({"role": "system", "content": "Be brief.\n\nUse English."})
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "\n\nUse English."}]
    assert two == tokens({"role": "developer", "content": parts})


def test_unknown_role(served):
    error = refused(served.http.post(CHAT, json={"messages": [{"role": "banana", "content": "x"}]}), "messages[0].role")
    assert "banana" in error["message"]


# P05
@pytest.mark.parametrize("arguments", ['{"b": 18, "a": 3}', "", "{}", None, "{bad", "[1]"])
def test_tool_calls_in_the_history(served, arguments):
    function = {"name": "mul", "arguments": arguments}
    messages = [
        {"role": "user", "content": "3*18"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "name": "mul", "content": "54"},
    ]
    tools = [{"type": "function", "function": {"name": "mul", "strict": True, "parameters": {"type": "object", "properties": {}}}}]
    answer = served.http.post(CHAT, json={"messages": messages, "tools": tools, "tool_choice": "auto", "max_tokens": 4})
    if arguments in ("{bad", "[1]"):
        assert answer.status_code in (200, 400), answer.text
    else:
        assert answer.status_code == 200, answer.text


# P06
def exact_prompt(served, tokens):
    """Token ids of a completion prompt of that length."""
    return (served.script("a") * tokens)[:tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_over_the_context(served, stream):
    limit = served.engine.max_len
    pattern = (
        rf"This model's maximum context length is {limit} tokens\. However, you requested (\d+) tokens "
        r"\((\d+) in the messages, (\d+) in the completion\)\. Please reduce the length of the messages\."
    )
    filled = {"messages": [{"role": "user", "content": "a b " * limit}], "stream": stream}
    for fields in ({}, {"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = served.http.post(CHAT, json={**filled, **fields})
        error = refused(answer, "messages", "context_length_exceeded")
        total, prompt, completion = map(int, re.fullmatch(pattern, error["message"]).groups())
        assert total == prompt + completion > limit
        assert completion == (5 if fields else 1)
        assert answer.headers["content-type"] == "application/json"
    refused(served.complete(prompt=exact_prompt(served, limit + 1), stream=stream), "prompt", "context_length_exceeded")
    refused(served.complete(prompt=exact_prompt(served, limit), stream=stream), "prompt", "context_length_exceeded")
    refused(served.complete(prompt=exact_prompt(served, limit - 4), max_tokens=5, stream=stream), "prompt", "context_length_exceeded")
    refused(served.chat(max_tokens=limit, stream=stream), "messages", "context_length_exceeded")


def test_room_for_one_token(served):
    answer = served.complete(prompt=exact_prompt(served, served.engine.max_len - 1), ignore_eos=True)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert served.complete(prompt=exact_prompt(served, served.engine.max_len - 4), max_tokens=4).status_code == 200


# P07
def test_token_limits(served):
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = served.chat(ignore_eos=True, **fields).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")
    answer = served.complete(ignore_eos=True, max_tokens=None).json()
    assert answer["usage"]["completion_tokens"] == 16
    usage = served.chat(ignore_eos=True, max_tokens=None, max_completion_tokens=None).json()["usage"]
    assert usage["total_tokens"] == served.engine.max_len


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
def test_bad_token_limits(served, name, value):
    refused(served.chat(**{name: value}), name)


# P19
def test_one_begin_token(serving):
    with serving(engine := FakeEngine()) as live:
        engine.model.tokenizer.adds_bos = True
        for prompt in ("hi", "<|endoftext|>hi"):
            assert live.complete(prompt=prompt).status_code == 200
            assert engine.submitted[-1][0].ids == (256, *b"hi")
        live.complete(prompt=[257, 104])
        assert engine.submitted[-1][0].ids == (257, 104)  # ids go in as they are
        live.chat("hi")
        assert 256 not in engine.submitted[-1][0].ids  # the template says what begins a chat
    with serving(engine := FakeEngine()) as live:
        live.complete(prompt="hi")
        assert engine.submitted[-1][0].ids == tuple(b"hi")


# Shapes
def test_chat_answer(served):
    answer = served.chat(max_tokens=5, force_tokens=served.script("hello"))
    got = answer.json()
    assert set(got) == {"id", "object", "created", "model", "choices", "usage"}
    assert (got["object"], got["model"]) == ("chat.completion", served.model)
    assert answer.headers["x-request-id"] == got["id"]
    assert got["choices"][0]["message"]["content"].startswith("hello")
    first, *_, last = events(served, CHAT, force_tokens=served.script("hello"))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"]
    assert last["choices"][0]["delta"] == {}


def test_several_prompts(served):
    answer = served.complete(prompt=["one", "two", "three"], max_tokens=2, ignore_eos=True).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 6
    chunks = events(served, PLAIN, prompt=["one", "two"], ignore_eos=True, max_tokens=2, stream_options={"include_usage": True})
    assert {c["index"] for chunk in chunks for c in chunk["choices"]} == {0, 1}
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_next_turn_keeps_the_generated_ids(served):
    """An answer in other tokens than its text would be encoded to is found again (a session's next turn)."""
    messages = [{"role": "user", "content": "first"}]
    ids = served.byte_ids(b"hello there")
    first = served.http.post(CHAT, json={"messages": messages, "force_tokens": ids, "max_tokens": len(ids)}).json()
    assert first["choices"][0]["message"]["content"] == "hello there"
    messages += [first["choices"][0]["message"], {"role": "user", "content": "second"}]
    usage = served.http.post(CHAT, json={"messages": messages, "max_tokens": 2}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] + len(ids) - 1


def refused(answer, param, code=None, status=400):
    """Checks the error body; returns it."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)
    assert len(error["message"]) < 400
    return error
