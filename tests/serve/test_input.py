"""What clients get wrong: bodies, numbers, unsupported fields (WIRE P13, P14); the server stays well."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.serve.fake import FakeEngine
from tests.serve.test_wire import CHAT, PLAIN, refused

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'


# P14
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "seed"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-5", '"0.5"', "true", "[1]", "1e999"])
def test_bad_numbers(served, name, value):
    if (name, value) == ("seed", "-5"):
        return
    refused(served.http.post(CHAT, content=f'{{{MESSAGES},"{name}":{value}}}'), name)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 101), ("top_p", 1.5), ("min_p", 2), ("top_k", -2), ("seed", 2**63), ("top_k", 1.5)]
)
def test_numbers_out_of_range(served, name, value):
    refused(served.chat(**{name: value}), name)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None, "stop": None, "stream": None},
        {"top_p": 0},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**6},
        {"min_p": 1.0},
        {"seed": -5},
        {"stop": []},
    ],
)
def test_edges_are_fine(served, fields):
    assert served.chat(max_tokens=2, **fields).status_code == 200


def test_defaults_are_openais(serving):
    with serving(engine := FakeEngine()) as live:
        live.chat(max_tokens=1)
        sampling = engine.submitted[-1][1]
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
        live.chat(max_tokens=1, temperature=0)
        assert engine.submitted[-1][1].temperature == 0


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"messages": [}', "line 1 column 15"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 200_000, "nested"),
        (b'{"max_tokens":' + b"9" * 5000 + b"}", "JSON"),
    ],
)
def test_malformed_bodies(served, raw, word):
    for path in (CHAT, PLAIN):
        assert word in refused(served.http.post(path, content=raw), None)["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (PLAIN, {}, "prompt"),
        (PLAIN, {"prompt": ""}, "prompt"),
        (PLAIN, {"prompt": []}, "prompt"),
        (PLAIN, {"prompt": 5}, "prompt"),
        (PLAIN, {"prompt": [[1, 2], [3]]}, "prompt"),
        (PLAIN, {"prompt": ["a", 1]}, "prompt"),
        (PLAIN, {"prompt": [1, "a"]}, "prompt"),
        (PLAIN, {"prompt": [-1]}, "prompt"),
        (PLAIN, {"prompt": [10**9]}, "prompt"),
        (PLAIN, {"prompt": [True]}, "prompt"),
        (PLAIN, {"prompt": ["a"] * 200}, "prompt"),
        (PLAIN, {"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids"),
        (PLAIN, {"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
        (PLAIN, {"prompt": "a", "stream": "yes"}, "stream"),
        (PLAIN, {"prompt": "a", "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        (PLAIN, {"prompt": "a", "session_id": 5}, "session_id"),
        (PLAIN, {"prompt": "a", "session_id": "s" * 600}, "session_id"),
    ],
)
def test_bad_fields(served, path, fields, param):
    refused(served.http.post(path, json=fields), param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (PLAIN, {"logprobs": 0}, "logprobs"),
        (PLAIN, {"echo": True}, "echo"),
        (PLAIN, {"best_of": 3}, "best_of"),
        (PLAIN, {"suffix": "x"}, "suffix"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -0.5}, "frequency_penalty"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"x": "y" * 1000}}}, "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tools": [{}] * 129}, "tools"),
        (CHAT, {"tools": ["x"]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_unsupported_fields_are_named(served, path, fields, param):
    given = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    refused(served.http.post(path, json={**given, **fields}), param)


def test_what_agents_send_anyway_is_ignored(served):
    neutral = {
        "n": 1,
        "logprobs": False,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
    }
    unknown = {"store": False, "reasoning_effort": "high", "parallel_tool_calls": True, "user": "u", "metadata": {}, "whatever": [1]}
    assert served.chat(max_tokens=2, **neutral, **unknown).status_code == 200


def test_models(served):
    assert served.http.get("/v1/models").json()["data"][0]["id"] == served.model
    assert served.http.get(f"/v1/models/{served.model}").json()["object"] == "model"
    refused(served.http.get("/v1/models/nope"), "model", "model_not_found", 404)
    error = refused(served.chat(model="nope"), "model", "model_not_found", 404)
    assert served.model in error["message"]
    assert served.chat(model=None, max_tokens=1).status_code == 200


def test_unknown_paths_and_verbs(served):
    refused(served.http.get("/v2/x"), None, status=404)
    refused(served.http.get(CHAT), None, status=405)


def test_session_names(serving):
    with serving(engine := FakeEngine()) as live:
        both = {"x-session-id": "header", "session-id": "other"}
        for fields, headers, right in [
            ({"session_id": "a", "prompt_cache_key": "b"}, both, "a"),
            ({"prompt_cache_key": "b"}, both, "b"),
            ({}, both, "header"),
            ({}, {"session-id": "other"}, "other"),
            ({}, {}, None),
        ]:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
            assert live.http.post(CHAT, json=body, headers=headers).status_code == 200
            assert engine.submitted[-1][0].session == right


# P13
def health_times(live, done, out):
    while not done.is_set():
        began = time.monotonic()
        assert live.http.get("/health").status_code == 200
        out.append(time.monotonic() - began)
        time.sleep(0.005)


POST = """
import http.client, json, sys
port, path, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
text = {"a": "a" * 30_000_000, "zero": "\\0" * 1_000_000, "limit": "a" * 4_000_000, "ids": [1] * 1_000_000}[kind]
body = json.dumps({"prompt": text} if path.endswith("/v1/completions") else {"messages": [{"role": "user", "content": text}]})
c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
try:
    c.request("POST", path, body, {"content-type": "application/json"})
except (BrokenPipeError, ConnectionResetError):
    pass
r = c.getresponse()
print(r.status, r.read().decode())
"""


@pytest.mark.parametrize(("kind", "path", "status"), [("a", CHAT, 413), ("zero", CHAT, 400), ("limit", CHAT, 400), ("ids", PLAIN, 400)])
def test_a_huge_body_holds_up_nobody(served, kind, path, status):
    for _ in range(3):  # other processes may hold up this one
        done, times = threading.Event(), []
        watch = threading.Thread(target=health_times, args=(served, done, times))
        watch.start()
        port = str(urlsplit(served.url).port)
        sent = subprocess.run([sys.executable, "-c", POST, port, path, kind], capture_output=True, text=True, timeout=60, check=True)
        done.set()
        watch.join()
        code, text = sent.stdout.split(" ", 1)
        assert int(code) == status, sent.stdout
        assert "educe the length of the" in json.loads(text)["error"]["message"]
        if sorted(times)[int(len(times) * 0.99) - 1] < 0.1:
            return
    raise AssertionError(f"/health took up to {max(times):.3f} s")


def test_a_chunked_body_is_cut_off(served):
    def parts():
        for _ in range(300):
            yield b"x" * 100_000

    refused(served.http.post(CHAT, content=parts()), None, "request_too_large", 413)
    assert served.chat(max_tokens=1).status_code == 200


def test_too_large_is_refused_before_it_is_read(served):
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=5)
    connection.putrequest("POST", CHAT)
    connection.putheader("content-length", "30000000")
    connection.endheaders()
    assert connection.getresponse().status == 413  # not a byte was sent
    connection.close()
