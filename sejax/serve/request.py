"""What goes into the engine and what comes out of it: plain immutable records, no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol


class InvalidRequest(ValueError):
    """A request that can never be served. `param` names the field, `code` is what clients recognise."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose and when to stop.

    max_tokens: None = as many as the context holds. temperature 0 (or < 1e-5): arg-max, lowest id among ties.
    top_k 0 or -1: off. top_p, min_p: fractions of probability. seed: reproducible for equal batch shape.
    stop: strings (at most 4) that end the answer and are not part of it; stop_ids: token ids that do.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    force_tokens: tuple[int, ...] = ()  # test hook: these ids are "sampled" first, whatever the model says

    def __post_init__(self) -> None:
        def number(name: str, low: float, high: float) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise InvalidRequest(f"{name} must be a number between {low:g} and {high:g}, not {value!r}.", name)

        number("temperature", 0, 100)
        number("top_p", 0, 1)
        number("min_p", 0, 1)
        number("top_k", -1, 2**31 - 1)
        if self.max_tokens is not None and (
            isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1
        ):
            raise InvalidRequest(f"max_tokens must be a whole number of at least 1, not {self.max_tokens!r}.", "max_tokens")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63):
            raise InvalidRequest(f"seed must be a 64-bit whole number, not {self.seed!r}.", "seed")
        if len(self.stop) > 4 or any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop must be one non-empty string or a list of at most 4.", "stop")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """An encoded request. text: what the ids decode to (the session index compares it); session: a hint for listing."""

    ids: tuple[int, ...]
    text: str = ""
    session: str | None = None


class Usage(NamedTuple):
    """Token counts of one request. cached: prompt tokens whose state was reused; kept: mean rows held per layer and head.

    Seconds: queued from submit to the first prefill unit, prefill from there to the first token.
    """

    prompt: int
    cached: int
    completion: int
    kept: float = 0.0
    queued: float = 0.0
    prefill: float = 0.0

    def plus(self, other: Usage) -> Usage:
        """Of two answers together."""
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))  # pyright: ignore[reportArgumentType]


Finish = Literal["stop", "length", "cancelled", "error"]


class Delta(NamedTuple):
    """One piece of an answer. The last one has `finish` and `usage`; with finish "error", `error` says why."""

    text: str
    ids: tuple[int, ...]
    finish: Finish | None = None
    usage: Usage | None = None
    error: str | None = None


Sink = Callable[[Delta], None]
"""Called from the engine thread, in order; must not block."""


class Mark(NamedTuple):
    """A session held: its text so far (rendered prompt, then the answer with its end-of-turn text) and the ids that stand for it."""

    text: str
    ids: tuple[int, ...]


class Stats(NamedTuple):
    """A snapshot of the engine. Gauges first, then counters since the start."""

    running: int = 0
    waiting: int = 0
    parked: int = 0  # sessions that wait for their next turn
    slots: int = 0
    kv_bytes: int = 0  # device bytes of the cache, used or not
    rows_held: int = 0  # token rows kept, mean over layers and heads, summed over slots
    rows_capacity: int = 0  # token rows the cache can keep, the same way
    tokens_held: int = 0  # logical tokens those rows stand for
    step_age: float = 0.0  # seconds since the step loop last moved
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, reused
    generated_tokens: int = 0
    evicted_tokens: int = 0
    preemptions: int = 0
    rejected: int = 0  # refused because the queue was full
    compiles: int = 0
    compile_seconds: float = 0.0
    finished: Mapping[str, int] = {}  # requests by finish reason


class EngineLike(Protocol):
    """What the HTTP front end needs of an engine. Every method may be called from any thread and returns at once."""

    name: str
    max_len: int

    @property
    def model(self) -> Any: ...
    @property
    def method(self) -> Any: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    def submit(self, prompt: Prompt, sampling: Sampling, sink: Sink, streams: bool = True) -> int: ...
    def cancel(self, id: int) -> None: ...
    def marks(self) -> tuple[Mark, ...]: ...
    def stats(self) -> Stats: ...
    def start(self) -> None: ...  # may take long (compiles): called in a thread of its own
    def close(self, drain: float = 10.0) -> None: ...
