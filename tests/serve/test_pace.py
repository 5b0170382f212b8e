"""Pace: what units and steps take is learnt from results that the host waited for, and from no others."""

from __future__ import annotations

import pytest

from sejax.serve import pace
from sejax.serve.pace import Pace
from sejax.serve.request import Prompt, Sampling
from sejax.serve.sequence import Request


class Card:
    """A device and its clock: units and steps run one behind the other; a wait moves the clock to the result's time."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def run(self, seconds: float) -> Result:
        self.free = max(self.free, self.now) + seconds
        return Result(self, self.free)


class Result:
    def __init__(self, card: Card, at: float) -> None:
        self.card, self.at = card, at

    def block_until_ready(self) -> None:
        self.card.now = max(self.card.now, self.at)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: card.now)
    return card


def request(number: int = 0) -> Request:
    return Request(number, Prompt((1, 2)), Sampling(), lambda delta: None, None, 8, 0, ())  # type: ignore[arg-type]


def test_a_unit_that_grows_is_followed(card: Card) -> None:
    known, prompt = Pace({64: 0.002}, {1: 0.004}), request()
    for _ in range(30):
        known.launched(card.run(0.009), prompt, 64)
    assert prompt.unit_seconds == pytest.approx(0.009, rel=0.01) and known.units == {64: 0.002}
    other = request(1)
    known.launched(card.run(0.001), other, 64)
    assert other.unit_seconds == 0.002


def test_a_step_between_units_is_not_counted_as_one(card: Card) -> None:
    known, prompt = Pace({64: 0.009}, {1: 0.004}), request()
    for _ in range(40):
        known.launched(card.run(0.009), prompt, 64)
        known.launched(card.run(0.009), prompt, 64)
        known.sent(1, 1)
        card.run(0.5).block_until_ready()
        known.read()
    assert prompt.unit_seconds == pytest.approx(0.009) and known.steps[1] == 0.004


def test_tokens_are_read_before_a_unit_behind_them_is_waited_for(card: Card) -> None:
    known, prompt, late = Pace({64: 0.005}, {1: 0.007}), request(), []
    done = card.run(0.007)
    known.sent(1, 1)
    for _ in range(30):  # three units between two steps: one more than may be under way
        for _ in range(3):
            unit = card.run(0.005)
            while known.owed():
                done.block_until_ready()
                late.append(card.now - done.at)
                known.read()
            known.launched(unit, prompt, 64)
        assert not known._flying
        done = card.run(0.007)
        known.sent(1, 1)
    assert len(late) == 30 and max(late) < 1e-9


def test_results_that_were_there_already_teach_nothing(card: Card) -> None:
    known, prompt = Pace({64: 0.003}, {1: 0.004}), request()
    for _ in range(20):
        known.launched(card.run(0.001), prompt, 64)
        card.now += 1.0  # the host was busy elsewhere
    assert prompt.unit_seconds == 0.003


def test_steps_that_slow_down_are_followed_and_a_pause_is_not(card: Card) -> None:
    known = Pace({64: 0.003}, {4: 0.005})
    for _ in range(60):
        known.sent(4, 2)
        card.run(2 * 0.008).block_until_ready()
        known.read()
    assert known.steps[4] == pytest.approx(0.008, rel=0.01)
    assert known.patience(4) == pytest.approx(pace.SHARE * 0.008, rel=0.01)
    card.now += 100.0
    known.sent(4, 1)
    known.read()
    assert known.steps[4] < 0.0092


def test_patience_has_a_floor() -> None:
    assert Pace({}, {1: 0.0001}).patience(1) == pace.PATIENCE
