"""Host records of the engine thread: a session's state on the device, and a request being served."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from sejax.serve.request import Delta, Finish, Mark, Prompt, Sampling, Sink, Usage
from sejax.serve.text import TextStream


@dataclasses.dataclass
class Session:
    """A sequence in a slot. ids: all logical ids, sampled ones included; stored: how many have state on the device.

    held: how many the device slot really stores (more than `stored` after a cancel or a stop string: truncate first).
    """

    key: int
    slot: int
    ids: list[int]
    stored: int = 0
    held: int = 0
    mark: Mark | None = None  # what its ids read as, for the next request's encoding
    kept: float = 0.0  # mean rows over layers and heads
    packed: tuple[int, int] = (0, 0)  # its first tokens, and the pages these take: fewer than they took when they came
    pages: list[int] = dataclasses.field(default_factory=list)
    used: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass
class Request:
    """A request from submit to its last delta."""

    id: int
    prompt: Prompt
    sampling: Sampling
    sink: Sink
    limit: int  # tokens it may sample
    stop_ids: tuple[int, ...]
    text: TextStream
    seed: int
    streams: bool = True  # somebody reads the answer while it grows
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    started: float = 0.0
    first: float = 0.0
    session: Session | None = None
    cached: int = 0
    lane: int | None = None  # while it prefills
    target: int = 0  # slot its turn is sealed into
    units: Iterator[Any] | None = None
    last_unit: Any = None
    unit_seconds: float = 0.0  # what a unit of it takes now
    out: list[int] = dataclasses.field(default_factory=list)
    visible: list[str] = dataclasses.field(default_factory=list)
    launched: int = 0  # tokens the device was asked for
    flying: int = 0  # of those, not read yet
    closing: bool = False  # cancelled, but tokens are still in flight
    finish: Finish | None = None
    saved: Any = None  # device state on the host while paused

    def emit(self, text: str, ids: tuple[int, ...]) -> None:
        """A piece of the answer; empty pieces are not sent."""
        if text:
            self.visible.append(text)
        if text or ids:
            self.sink(Delta(text, ids))

    def close(self, finish: Finish, kept: float = 0.0, error: str | None = None) -> None:
        """The last delta."""
        now = time.monotonic()
        started = self.started or now
        usage = Usage(len(self.prompt.ids), self.cached, len(self.out), kept, started - self.arrived, (self.first or now) - started)
        self.sink(Delta("", (), finish, usage, error))
