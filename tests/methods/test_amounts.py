"""How much evicting methods keep: a budget or a fraction, and no trims at all while decoding."""

import jax
import numpy as np
import pytest

from sejax import methods
from tests.methods.handmade import Sequence, spec_of

FRACTIONS = ("snapkv", "pyramidkv", "adakv", "h2o", "tova", "rkv", "expected_attention", "keydiff")
PERIODS = ("h2o", "tova", "rkv")


@pytest.mark.parametrize("name", FRACTIONS)
def test_budget_or_ratio(name):
    with pytest.raises(ValueError, match=r"budget=64 and ratio=0.5 are both given; give one of them"):
        methods.method(f"{name}:budget=64,ratio=0.5")
    for ratio in (0, 1.5):
        with pytest.raises(ValueError, match=r"ratio=.* must lie in \(0, 1\]"):
            methods.method(f"{name}:ratio={ratio}")
    assert methods.method(name) == methods.method(f"{name}:budget={2048 if name in ('pyramidkv', 'adakv') else 4096}")
    assert methods.method(f"{name}:ratio=0.25") != methods.method(f"{name}:ratio=0.5")


@pytest.mark.parametrize("name", FRACTIONS)
def test_a_run_has_room_for_the_fraction_of_the_longest_sequence(name):
    more = {"pyramidkv": ",beta=1"}.get(name, "")  # equal layers
    slack = ",period=7" if name in PERIODS else ",slack=7"
    layer = methods.method(f"{name}:ratio=0.3{slack}{more}").layer(spec_of(2, 2, 4, layers=2, max_len=100), None)
    # Head pages (16 tokens): 30 + 7 rows are 32 of a window and 7 more, in begun pages, and two pages a head for rounding.
    assert layer.run(100) == (5 * 16 if name == "adakv" else 30 + 7)
    with pytest.raises(ValueError, match="max_len is not set"):
        methods.method(f"{name}:ratio=0.3").layer(spec_of(2, 2, 4), None)


def draw(rng, count):
    return (rng.standard_normal((n, count, 4)) for n in (4, 2, 2))


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (2, 1), (10, 3), (29, 8), (30, 9)])
def test_the_fraction_is_of_the_logical_length_rounded_down_as_in_double_precision(length, kept):
    """int(10 * .3) is 3 though .3 is a little less in binary; a single token stays."""
    sequence = Sequence("keydiff:ratio=0.3,slack=2,page=2", 2, 2, 4, 40)
    sequence.prompt(*draw(np.random.default_rng(0), length))
    assert [len(held) for held in sequence.kept] == [kept] * 2


def test_the_fraction_grows_with_the_session():
    """Decoded tokens count: a trim comes at int(length * ratio) + slack rows and leaves the fraction of the length then."""
    rng = np.random.default_rng(1)
    sequence = Sequence("keydiff:ratio=0.5,slack=3,page=2", 2, 2, 4, 40)
    sequence.prompt(*draw(rng, 12))
    rows = 6
    for length in range(13, 30):
        sequence.token(*(x[:, 0] for x in draw(rng, 1)))
        rows = int(length * 0.5) if rows + 1 >= int(length * 0.5) + 3 else rows + 1
        assert [len(held) for held in sequence.kept] == [rows] * 2
    assert not np.any(sequence.state.rows["dropped"])


@pytest.mark.parametrize("name", PERIODS)
def test_period_0_never_trims_while_decoding_and_seals_every_turn(name):
    rng = np.random.default_rng(2)
    more = ",window=2" if name == "rkv" else ""
    sequence = Sequence(f"{name}:budget=6,period=0,page=2{more}", 2, 2, 4, 40)
    assert sequence.layer.run(40) == 40 and sequence.layer.due is None and sequence.layer.decode.after_step is None
    sequence.prompt(*draw(rng, 9))
    assert [len(held) for held in sequence.kept] == [6, 6]
    for extra in range(1, 16):
        sequence.token(*(x[:, 0] for x in draw(rng, 1)))
        assert [len(held) for held in sequence.kept] == [6 + extra] * 2
    sequence.prompt(*draw(rng, 5))
    assert [len(held) for held in sequence.kept] == [6, 6]
    assert not np.any(jax.device_get(sequence.state.rows["dropped"]))
