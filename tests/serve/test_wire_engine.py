"""The wire cases again, with the real engine behind the server."""

from __future__ import annotations

from typing import Any

import pytest

import sejax
from sejax.serve.engine import Engine
from tests.models.tiny import tiny_model
from tests.serve.fake import FakeTokenizer
from tests.serve.test_wire import *  # noqa: F403


@pytest.fixture(scope="module")
def engine() -> Any:
    model = tiny_model(vocab=271).replace(tokenizer=FakeTokenizer())
    return Engine(model, sejax.method("snapkv:budget=64,window=8,slack=32"), max_len=512, rows=4, slots=8, chunks=(32,), name="tiny")
