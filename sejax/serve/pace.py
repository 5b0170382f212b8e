"""How long prefill units and decode steps take: start-up's figures, then what the device shows while it works.

A unit's time grows with the prefix it attends to, a step's with the tokens its rows hold, so neither stays what it was at start-up.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from sejax.serve.sequence import Request

PATIENCE = 0.010  # seconds of prefill between two decode steps, at least
SHARE = 1.4  # and at least that many times what a step takes: where steps are slow, a prompt must not wait for a hundred of them
AHEAD = 2  # units that may be under way when the next is launched
WAITED = 5e-5  # seconds: a shorter wait found the result there already, and its time is not known


class Pace:
    """units: bucket -> seconds of a prefill unit on no prefix; steps: batch bucket -> seconds of a decode step.

    Two results that the host waited for, with nothing else between them on the device, tell how long the second took.
    """

    def __init__(self, units: dict[int, float], steps: dict[int, float]):
        self.units, self.steps = units, steps
        self._ahead: deque[tuple[Any, Request, int]] = deque()
        self._unit: tuple[int, float] | None = None  # last unit waited for: decode programs before it, when it was done
        self._flying: deque[tuple[int, int, int]] = deque()  # decode programs in flight: batch bucket, steps, units before it
        self._step: tuple[int, int, float] | None = None  # last one read: batch bucket, units before it, when
        self._units_sent = self._programs_sent = 0

    def patience(self, rows: int) -> float:
        """Seconds of prefill between two decode steps of a batch bucket."""
        return max(PATIENCE, SHARE * self.steps[rows])

    def launched(self, result: Any, request: Request, bucket: int) -> None:
        """A unit of a prompt was launched; waits for an earlier one, so that the host runs AHEAD units ahead at most."""
        request.unit_seconds = request.unit_seconds or self.units[bucket]
        self._units_sent += 1
        self._ahead.append((result, request, self._programs_sent))
        if len(self._ahead) <= AHEAD:
            return
        earlier, owner, programs = self._ahead.popleft()
        began = time.perf_counter()
        earlier.block_until_ready()
        now = time.perf_counter()
        if self._unit and self._unit[0] == programs and now - began > WAITED:
            owner.unit_seconds += (now - self._unit[1] - owner.unit_seconds) / 2
        self._unit = (programs, now) if now - began > WAITED else None

    def owed(self) -> bool:
        """Whether the next launch waits for a unit behind a decode program whose tokens nobody has read: streams wait for those."""
        return len(self._ahead) >= AHEAD and self._ahead[0][2] > self._programs_sent - len(self._flying)

    def sent(self, rows: int, steps: int) -> None:
        """A decode program was launched."""
        self._flying.append((rows, steps, self._units_sent))
        self._programs_sent += 1

    def read(self) -> None:
        """The oldest decode program's tokens are here."""
        rows, steps, units = self._flying.popleft()
        now = time.perf_counter()
        if self._step and self._step[:2] == (rows, units):
            took = (now - self._step[2]) / steps
            self.steps[rows] += (min(took, 2 * self.steps[rows]) - self.steps[rows]) / 8  # a pause between two is no step
        self._step = rows, units, now
