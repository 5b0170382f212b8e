"""Messages to text, text to ids that continue a session."""

from __future__ import annotations

import pytest

from sejax.serve import chat
from sejax.serve.request import InvalidRequest, Mark
from tests.serve.fake import FakeTokenizer

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "input_text", "text": "b"}, "c"], "abc"),
        ([], ""),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content(content, text):
    assert chat.flatten([{"role": "user", "content": content, "name": "ann"}]) == [{"role": "user", "content": text}]
    assert chat.flatten([{"role": "assistant"}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "at least one"),
        (None, "list"),
        ("hi", "list"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "banana", "content": "x"}], "'banana'"),
        ([{"content": "x"}], "role"),
        ([USER, {"role": "user", "content": 5}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no text"),
        ([{"role": "user", "content": [{"type": ["x"]}]}], "type"),
        ([{"role": "user", "content": [3]}], "type"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "function"),
        ([{"role": "assistant", "tool_calls": {"id": "c"}}], "tool_calls"),
    ],
)
def test_bad_messages(messages, word):
    with pytest.raises(InvalidRequest, match=word) as caught:
        chat.flatten(messages)
    assert caught.value.param.startswith("messages")


def test_system_messages_are_merged():
    lead = [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": [{"type": "text", "text": "Use English."}]}]
    assert chat.flatten([*lead, USER]) == [{"role": "system", "content": "Be brief.\n\nUse English."}, USER]
    assert [m["role"] for m in chat.flatten([*lead, USER], developer=True)] == ["developer", "system", "user"]
    assert [m["role"] for m in chat.flatten([USER, lead[0]])] == ["user", "system"]


@pytest.mark.parametrize(
    ("wire", "template"),
    [('{"b": 18, "a": 3}', {"b": 18, "a": 3}), ("", {}), (None, {}), ("{}", {}), ("{bad", "{bad"), ("[1]", "[1]"), ({"a": 1}, {"a": 1})],
)
def test_tool_call_arguments(wire, template):
    call = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": wire}}
    (message,) = chat.flatten([{"role": "assistant", "content": None, "tool_calls": [call]}])
    got = message["tool_calls"][0]["function"]["arguments"]
    assert got == template
    if isinstance(got, dict):
        assert list(got) == list(template)


def test_deep_arguments_are_no_fault():
    call = {"function": {"name": "f", "arguments": '{"a":' + "[" * 100_000}}
    assert chat.flatten([{"role": "assistant", "tool_calls": [call]}])


def test_what_the_template_refuses():
    with pytest.raises(InvalidRequest, match="must be at the beginning"):
        chat.render(FakeTokenizer(), [USER, {"role": "system", "content": "late"}])
    assert "\ufffd" in chat.render(FakeTokenizer(), [{"role": "user", "content": "a\ud83d"}])


def test_encode_keeps_the_ids_of_the_session():
    tok = FakeTokenizer()
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = [*b"hel", *b"lo", 258]  # the tokenizer itself would give one token for "hello"
    mark = Mark(prompt + "hello<|im_end|>", (*tok.encode(prompt), *answer))
    after = mark.text + "\n<|im_start|>user\nmore"
    assert chat.encode(tok, after, [mark]) == (*mark.ids, *tok.encode("\n<|im_start|>user\nmore"))
    assert chat.encode(tok, after, []) == tuple(tok.encode(after)) != chat.encode(tok, after, [mark])
    assert chat.encode(tok, mark.text, [mark]) == mark.ids
    longer = Mark(after + "<|im_end|>", (1, 2, 3))
    assert chat.encode(tok, after + "<|im_end|>!", [mark, longer]) == (1, 2, 3, ord("!"))


def test_encode_cuts_only_beside_a_special_token():
    tok = FakeTokenizer()
    cut = Mark("<|im_start|>assistant\nhel", (257, 1))  # an answer cut off by its token limit
    assert chat.encode(tok, cut.text + "<|im_end|>\n", [cut]) == (257, 1, 258, 10)
    assert chat.encode(tok, cut.text + "lo<|im_end|>", [cut]) == tuple(tok.encode(cut.text + "lo<|im_end|>"))
    assert chat.encode(tok, "other", [cut, Mark("", ())]) == tuple(b"other")
