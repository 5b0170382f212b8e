"""What kvpress keeps and answers on a real model, from the same weights: tests/golden/kvpress against sejax.

The issue's criteria: sets equal but for tokens within 1e-4 of the limit, mean Jaccard .999; log-probabilities of the answer within
5e-3 where sets are equal; arg-maxes equal in 99.5 %; at most one in 100 texts up to 2K answered otherwise.
"""

import pytest

from bench import parity
from bench.needles import case
from sejax.models import load

METHODS = [name for name in parity.SPECS if name not in ("full", "kvzip")]  # replays take longer than all others together: slow
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model():
    return load(parity.MODEL, progress=False)


@pytest.fixture(scope="module")
def short(model):
    """One text, an eighth of it kept: method -> its line."""
    return {x.method: x for x in parity.compare(model, case(model.tokenizer, *parity.SHORT[0]), ["full", *METHODS], [8])}


@pytest.mark.parametrize("method", METHODS)
def test_a_short_text(short, method):
    line = short[method]
    assert line.far == 0 and line.jaccard >= 0.999 and line.heads == 90
    assert line.agree == line.total and line.found == line.expected
    assert line.near or line.worst <= 5e-3


def test_nothing_dropped(short):
    assert short["full"].worst <= 1e-3 and short["full"].found


@pytest.mark.slow
def test_replays_of_a_short_text(model):
    """`python -m bench.parity` compares every text at every budget; that takes hours."""
    [line] = parity.compare(model, case(model.tokenizer, *parity.SHORT[0]), ["kvzip"], [4])
    assert line.far == 0 and line.jaccard >= 0.999 and line.agree == line.total and line.found == line.expected
    assert line.near or line.worst <= 5e-3
