"""A server on loopback around an engine. A module that overrides `engine` runs the same tests against another one."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from sejax.serve.http import Options, server
from tests.serve.fake import FakeEngine


@dataclasses.dataclass
class Running:
    """A live server: `url` without /v1, an httpx client on it, the openai client, and helpers to script answers."""

    engine: Any
    url: str
    uvicorn: Any
    thread: threading.Thread

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)
        self.model, self.tokenizer = self.engine.name, self.engine.model.tokenizer

    def script(self, *pieces: str) -> list[int]:
        return [id for piece in pieces for id in self.tokenizer.encode(piece)]

    def byte_ids(self, data: bytes) -> list[int]:
        single = {self.tokenizer.token_bytes(id): id for id in reversed(range(self.tokenizer.vocab_size))}
        return [single[bytes([b])] for b in data]

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return self.http.post(
            "/v1/chat/completions", json={"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        )

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": self.model, "prompt": "hi", **fields})

    def idle(self, within: float = 1.0) -> bool:
        """Whether nothing runs or waits within that many seconds."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            stats = self.engine.stats()
            if stats.running + stats.waiting == 0:
                return True
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def running(engine: Any, **options: Any) -> Iterator[Running]:
    """Serves `engine` on a free port of loopback while the block runs."""
    app = server(engine, port=0, options=Options(**{"force_tokens": True, "drain": 2.0, **options}))
    thread = threading.Thread(target=app.run, daemon=True)
    thread.start()
    while not app.started or not (engine.ready or engine.failure):
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = app.servers[0].sockets[0].getsockname()[1]
    live = Running(engine, f"http://127.0.0.1:{port}", app, thread)
    try:
        yield live
    finally:
        live.http.close()
        live.openai.close()
        app.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def engine() -> Any:
    return FakeEngine()


@pytest.fixture(scope="module")
def served(engine: Any) -> Iterator[Running]:
    with running(engine) as live:
        yield live


@pytest.fixture
def serving() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """`with serving(engine, **options) as live:` for tests that spoil their engine."""
    return running
