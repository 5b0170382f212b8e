"""Who may start next: pure host policy over plain numbers. No jax, no state.

First come, first served: a request that does not fit yet holds back those behind it, except that a short prompt may pass a
long one that only waits for the long prefill lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A request at the head of the queue. new: prompt tokens to compute; session: the parked session it continues, or None.

    pages: pages it needs beyond those its session has (0 where runs are fixed).
    """

    id: int
    new: int
    session: int | None
    pages: int


class Parked(NamedTuple):
    """A session that waits for its next turn. used: when it was last active; pages it holds."""

    key: int
    used: float
    pages: int


class Room(NamedTuple):
    """rows: how many more sequences may run; sessions: how many more may exist; pages: free ones; lanes: free prefill lanes
    (token rows each, by lane number)."""

    rows: int
    sessions: int
    pages: int
    lanes: dict[int, int]


class Admission(NamedTuple):
    """Start request `id` in prefill lane `lane`, after dropping these parked sessions (oldest first)."""

    id: int
    lane: int
    drop: tuple[int, ...]


def admit(waiting: Sequence[Waiting], parked: Sequence[Parked], room: Room) -> list[Admission]:
    """Which requests start now, in order."""
    admissions: list[Admission] = []
    victims = sorted(parked, key=lambda p: (p.used, p.key))
    rows, sessions, pages, lanes = room.rows, room.sessions, room.pages, dict(room.lanes)
    claimed = {w.session for w in waiting if w.session is not None}
    for request in waiting:
        if rows < 1 or not lanes:
            break
        fitting = [lane for lane, size in lanes.items() if size >= request.new]
        if not fitting:
            continue  # it waits for the long lane; a shorter one behind it may use the short lane
        drop: list[int] = []
        spare = [v for v in victims if v.key != request.session]
        spare.sort(key=lambda v: v.key in claimed)  # sessions somebody waits for go last
        need_session = 0 if request.session is not None else 1
        while spare and (sessions < need_session or pages < request.pages):
            victim = spare.pop(0)
            drop.append(victim.key)
            sessions, pages = sessions + 1, pages + victim.pages
        if sessions < need_session or pages < request.pages:
            break
        lane = min(fitting, key=lambda number: lanes[number])
        admissions.append(Admission(request.id, lane, tuple(drop)))
        victims = [v for v in victims if v.key not in drop and v.key != request.session]
        rows, sessions, pages = rows - 1, sessions - need_session, pages - request.pages
        del lanes[lane]
    return admissions
