"""What goes into the engine and what comes out of it: plain immutable records, no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple


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
        if self.max_tokens is not None and (isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1):
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
    """Token counts of one request. cached: prompt tokens whose state was reused; kept: mean rows held per layer and head."""

    prompt: int
    cached: int
    completion: int
    kept: float = 0.0


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
