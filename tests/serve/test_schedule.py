"""Admission: who starts, and what is dropped for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sejax.serve.schedule import Admission, Parked, Room, Waiting, admit

LANES = {0: 8192, 1: 512}


def test_first_come_first_served() -> None:
    waiting = [Waiting(1, 100, None, 0), Waiting(2, 100, None, 0), Waiting(3, 100, None, 0)]
    assert admit(waiting, [], Room(8, 8, 0, LANES)) == [Admission(1, 1, ()), Admission(2, 0, ())]
    assert admit(waiting, [], Room(1, 8, 0, LANES)) == [Admission(1, 1, ())]
    assert admit(waiting, [], Room(0, 8, 0, LANES)) == []


def test_a_short_prompt_passes_a_long_one_that_waits_for_its_lane() -> None:
    waiting = [Waiting(1, 4000, None, 0), Waiting(2, 10, None, 0)]
    assert admit(waiting, [], Room(8, 8, 0, {1: 512})) == [Admission(2, 1, ())]


def test_the_oldest_session_makes_room_and_the_one_continued_never() -> None:
    parked = [Parked(7, 1.0, 4), Parked(8, 2.0, 4), Parked(9, 3.0, 4)]
    assert admit([Waiting(1, 10, None, 0)], parked, Room(8, 0, 0, LANES)) == [Admission(1, 1, (7,))]
    assert admit([Waiting(1, 10, 7, 6)], parked, Room(8, 0, 0, LANES)) == [Admission(1, 1, (8, 9))]
    both = [Waiting(1, 10, None, 0), Waiting(2, 10, 7, 0)]
    assert admit(both, parked, Room(8, 0, 0, LANES))[0] == Admission(1, 1, (8,))


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    waiting = [Waiting(1, 10, None, 50), Waiting(2, 10, None, 1)]
    assert admit(waiting, [], Room(8, 8, 10, LANES)) == []


requests = st.builds(Waiting, st.integers(0, 0), st.integers(1, 9000), st.none() | st.integers(0, 4), st.integers(0, 20))
sessions = st.builds(Parked, st.integers(0, 0), st.floats(0, 9), st.integers(0, 9))
rooms = st.builds(Room, st.integers(0, 4), st.integers(0, 4), st.integers(0, 30), st.dictionaries(st.integers(0, 1), st.just(8192)))


@given(st.lists(requests, max_size=6), st.lists(sessions, max_size=5), rooms)
def test_admissions_never_promise_more_than_there_is(waiting: list[Waiting], parked: list[Parked], room: Room) -> None:
    parked = [p._replace(key=i) for i, p in enumerate(parked)]
    held = {p.key: p for p in parked}
    waiting = [w._replace(id=i, session=w.session if w.session in held else None) for i, w in enumerate(waiting)]
    asked = {w.id: w for w in waiting}
    found = admit(waiting, parked, room)
    dropped = [key for a in found for key in a.drop]
    assert len(found) <= room.rows and len({a.lane for a in found}) == len(found)
    assert len(set(dropped)) == len(dropped)
    pages = room.pages + sum(held[k].pages for k in dropped) - sum(asked[a.id].pages for a in found)
    new = sum(asked[a.id].session is None for a in found)
    assert pages >= 0 and room.sessions + len(dropped) - new >= 0
    assert all(asked[a.id].session not in a.drop for a in found)
