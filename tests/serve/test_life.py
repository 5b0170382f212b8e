"""Requests that end early, servers that fail: WIRE P10, P11, P12; keys, queue, metrics, shutdown."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.fake import FakeEngine
from tests.serve.test_wire import CHAT, PLAIN, refused

LONG = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "max_tokens": 400}


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(step=0.005)


def raw_post(url: str, body: dict, read_until: bytes = b"") -> socket.socket:
    """A client of its own, so that it can leave whenever it wants."""
    parts = urlsplit(url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=5)
    data = json.dumps(body).encode()
    client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    seen = b""
    while read_until not in seen:
        seen += client.recv(4096)
    return client


def wait_for(condition, seconds=2.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


# P10
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(served, stream):
    client = raw_post(served.url, {**LONG, "stream": stream}, b"data:" if stream else b"")
    wait_for(lambda: served.engine.stats().running == 1)
    client.close()
    assert served.idle(within=1.0)
    made = served.engine.stats().generated_tokens
    time.sleep(0.05)
    assert served.engine.stats().generated_tokens == made


def test_a_queued_request_is_freed(served):
    before = served.engine.stats()
    clients = [raw_post(served.url, {**LONG, "stream": i % 2 == 0}) for i in range(before.slots + 2)]
    wait_for(lambda: served.engine.stats().waiting == 2)
    for client in clients[-2:]:
        client.close()
    wait_for(lambda: served.engine.stats().waiting == 0, 1.0)
    assert served.engine.stats().running == before.slots
    for client in clients[:-2]:
        client.close()
    assert served.idle(within=1.0)


def test_a_hundred_aborts_leave_nothing(served):
    for i in range(100):
        raw_post(served.url, {**LONG, "stream": i % 2 == 0}).close()
    assert served.idle(within=3.0)
    assert served.engine.stats().rows_held == 0
    assert served.chat(max_tokens=2).status_code == 200


# P11
def test_keep_alive_while_the_prompt_is_read(serving):
    with (
        serving(FakeEngine(prefill=0.6), ping=0.1) as live,
        live.http.stream("POST", CHAT, json={**LONG, "max_tokens": 3, "stream": True}) as r,
    ):
        began = time.monotonic()
        assert r.status_code == 200
        assert r.headers["cache-control"] == "no-cache"
        text, first = "", None
        for part in r.iter_text():
            first = first or time.monotonic() - began
            text += part
    assert text.startswith(": ping\n\n")
    assert 3 <= text.count(": ping\n\n") <= 6
    assert text.endswith("data: [DONE]\n\n")
    assert not re.sub(r"(data: .*|: ping)\n\n", "", text)
    assert first < 0.4


def test_headers_come_before_the_first_token(serving):
    with serving(FakeEngine(prefill=0.5)) as live:
        began = time.monotonic()
        with live.http.stream("POST", CHAT, json={**LONG, "max_tokens": 3, "stream": True}) as r:
            assert r.status_code == 200
            assert time.monotonic() - began < 0.4


# P12
def test_a_dead_engine_is_told_to_everybody(serving):
    with serving(engine := FakeEngine(step=0.002)) as live:
        assert live.http.get("/ready").status_code == 200
        answers: dict[str, httpx.Response] = {}

        def ask(name, **fields):
            answers[name] = httpx.post(live.url + CHAT, json={**LONG, **fields}, timeout=10)

        threads = [threading.Thread(target=ask, args=("whole",)), threading.Thread(target=ask, args=("stream",), kwargs={"stream": True})]
        for thread in threads:
            thread.start()
        wait_for(lambda: engine.stats().running == 2)
        time.sleep(0.05)
        engine.crash = "boom"
        for thread in threads:
            thread.join(5)
        assert answers["whole"].status_code == 500
        assert "boom" in answers["whole"].json()["error"]["message"]
        *_, last, done, end = answers["stream"].text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "boom" in error["message"]
        assert live.http.get("/health").status_code == 200
        assert "boom" in live.http.get("/ready").json()["error"]["message"]
        assert live.http.get("/health/ready").status_code == 503
        assert live.chat().status_code == 503
        live.thread.join(10)  # and the server ends by itself
        assert not live.thread.is_alive()


def test_an_engine_that_tells_nobody_of_its_death(serving):
    with serving(engine := FakeEngine()) as live:
        engine.hold = True
        timer = threading.Timer(0.3, lambda: setattr(engine, "failure", "lost"))
        timer.start()
        began = time.monotonic()
        answer = live.chat()
        assert (answer.status_code, time.monotonic() - began < 5) == (500, True)
        assert "lost" in answer.text


def test_ready_follows_the_engine(serving):
    with serving(engine := FakeEngine(), stall=0.2) as live:
        engine.ready = False
        assert live.http.get("/ready").status_code == 503
        answer = live.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        engine.ready, engine.hold = True, True
        time.sleep(0.3)
        assert live.http.get("/ready").status_code == 200  # nothing to do is no stall
        client = raw_post(live.url, LONG)
        wait_for(lambda: live.http.get("/ready").status_code == 503)
        assert "not moved" in live.http.get("/ready").json()["error"]["message"]
        engine.hold = False
        wait_for(lambda: live.http.get("/ready").status_code == 200)
        client.close()


def test_an_engine_that_cannot_start(serving):
    class Broken(FakeEngine):
        def start(self):
            self.ready = True  # lets the fixture go on
            raise OSError("no such file: model.gguf")

    with serving(Broken()) as live:
        wait_for(lambda: live.http.get("/ready").status_code == 503)
        assert "model.gguf" in live.chat().json()["error"]["message"]


def test_a_full_queue(serving):
    with serving(engine := FakeEngine(slots=1, queue=1)) as live:
        engine.hold = True
        client = raw_post(live.url, LONG)
        wait_for(lambda: engine.stats().waiting == 1)
        answer = live.chat(stream=True)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        engine.hold, engine.queue = False, 2
        answer = live.complete(prompt=["a"] * 5, ignore_eos=True)  # one of several does not fit: none runs
        client.close()
        assert answer.status_code == 429
        assert live.idle()


def test_api_key(serving):
    with serving(FakeEngine(), api_key="sécret") as live:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json"):
            error = live.http.get(path)
            assert (error.status_code, error.json()["error"]["code"]) == (401, "invalid_api_key")
            assert error.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer wrong", "sécret".encode(), b"Bearer \xff", "Basic x"):
            assert live.http.get("/v1/models", headers={"authorization": given}).status_code == 401
        assert live.http.get("/v1/models", headers={"authorization": "Bearer sécret".encode()}).status_code == 200
        assert live.chat().status_code == 401
        assert [live.http.get(p).status_code for p in ("/health", "/ready", "/health/ready")] == [200] * 3
    with serving(FakeEngine(), api_key="k", public_metrics=True) as live:
        assert live.http.get("/metrics").status_code == 200


def metric(live, name):
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in live.http.get("/metrics").text.splitlines()
        if line.startswith(name)
    }


def test_metrics(serving):
    with serving(FakeEngine()) as live:
        for stream in (True, False):
            live.chat(ignore_eos=True, max_tokens=5, stream=stream)
        live.complete(stop_token_ids=[104])
        one = {
            n: metric(live, "sejax_" + n).popitem()[1] for n in ("generation_tokens_total", "prompt_tokens_total", "num_requests_running")
        }
        assert one["generation_tokens_total"] >= 10
        assert one["prompt_tokens_total"] > 0
        assert one["num_requests_running"] == 0
        assert metric(live, "sejax_request_success_total")['sejax_request_success_total{finished_reason="length"}'] == 2
        for name, count in [("time_to_first_token", 3), ("e2e_request_latency", 3), ("request_queue_time", 3), ("inter_token_latency", 10)]:
            assert metric(live, f"sejax_{name}_seconds_count").popitem()[1] == pytest.approx(count, abs=2)
        text = live.http.get("/metrics").text
        for name in ("prefix_cache_hits_total", "kv_cache_usage_perc", "evicted_tokens_total", "jit_compiles_total", "cache_config_info"):
            assert f"\nsejax_{name}" in text


def test_docs(served):
    schema = served.http.get("/openapi.json").json()
    chat = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stop", "max_completion_tokens"} <= set(chat["properties"])
    assert "$defs" not in json.dumps(schema)
    assert PLAIN in schema["paths"]
    assert "swagger" in served.http.get("/docs").text


def test_running_answers_end_before_the_server_does(serving):
    with (
        serving(FakeEngine(step=0.005), drain=5.0) as live,
        live.http.stream("POST", CHAT, json={**LONG, "max_tokens": 60, "stream": True}) as r,
    ):
        parts = r.iter_text()
        text = next(parts)
        live.uvicorn.should_exit = True
        text += "".join(parts)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert not live.thread.is_alive()


def test_answers_too_long_for_the_drain_hear_why(serving):
    with serving(FakeEngine(step=0.01), drain=0.2) as live, live.http.stream("POST", CHAT, json={**LONG, "stream": True}) as r:
        parts = r.iter_text()
        text = next(parts)
        live.uvicorn.should_exit = True
        text += "".join(parts)
    *_, error, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "service_unavailable_error"


def test_bad_input_disturbs_nobody(served):
    whole: list[str] = []
    thread = threading.Thread(target=lambda: whole.append(served.complete(ignore_eos=True, max_tokens=100).json()["choices"][0]["text"]))
    thread.start()
    for _ in range(5):
        refused(served.http.post(CHAT, json={"messages": []}), "messages")
        refused(served.http.post(PLAIN, content=b'{"prompt":"x","temperature":NaN}'), "temperature")
        raw_post(served.url, {**LONG, "stream": True}).close()
    thread.join(10)
    assert whole == ["hello world" + "x" * 98]
