"""Device sampling against a plain numpy oracle: sets, ties, edges, distributions, independence of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.serve.request import InvalidRequest, Sampling
from sejax.serve.sampling import choices, sample

run = jax.jit(sample)


def allowed(logits: np.ndarray, s: Sampling) -> set[int]:
    """The ids a Sampling may give: sort, then cut at top_k, top_p, min_p in turn. Ties: lowest id first."""
    if s.temperature < 1e-5:
        return {int(np.argmax(logits))}
    z = logits.astype(np.float64) / s.temperature
    p = np.exp(z - z.max())
    order = np.lexsort((np.arange(len(p)), -p))
    if s.top_k > 0:
        order = order[: s.top_k]
    if s.top_p < 1:
        share = p[order] / p[order].sum()
        before = np.cumsum(share) - share
        order = order[(before < s.top_p - 1e-6) | (np.arange(len(order)) == 0)]
    return {int(i) for i in order if p[i] >= s.min_p * p.max() * (1 - 1e-12) and p[i] > 0}


def draws(logits: np.ndarray, s: Sampling, count: int = 64, seed: int = 0) -> np.ndarray:
    rows = np.broadcast_to(logits, (count, len(logits)))
    return np.asarray(run(jnp.asarray(rows, jnp.float32), choices([s] * count, [seed] * count, range(count))))


THREE = np.log([0.5, 0.3, 0.2]).astype(np.float32)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"temperature": 0.0}, {0}),
        ({"temperature": 9e-6}, {0}),
        ({"temperature": 1.0, "top_p": 0.5}, {0}),
        ({"temperature": 1.0, "top_p": 0.51}, {0, 1}),
        ({"temperature": 1.0, "top_p": 0.0}, {0}),
        ({"temperature": 1.0, "top_p": 1.0}, {0, 1, 2}),
        ({"temperature": 1.0, "top_k": 0}, {0, 1, 2}),
        ({"temperature": 1.0, "top_k": -1}, {0, 1, 2}),
        ({"temperature": 1.0, "top_k": 2}, {0, 1}),
        ({"temperature": 1.0, "top_k": 10**6}, {0, 1, 2}),
        ({"temperature": 1.0, "min_p": 1.0}, {0}),
        ({"temperature": 1.0, "min_p": 0.5}, {0, 1}),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.62}, {0}),  # of 5/8 and 3/8
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.63}, {0, 1}),
        ({"temperature": 1e-4}, {0}),
    ],
)
def test_edges(fields, expected):
    assert set(draws(THREE, Sampling(**fields), 256)) == expected


def test_ties_go_to_the_lowest_id():
    flat = np.zeros(7, np.float32)
    assert set(draws(flat, Sampling())) == {0}
    assert set(draws(flat, Sampling(temperature=1.0, top_k=3), 256)) == {0, 1, 2}
    assert set(draws(flat, Sampling(temperature=1.0, top_p=0.0), 256)) == {0}
    assert set(draws(flat, Sampling(temperature=1.0, min_p=1.0), 512)) == set(range(7))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3, "1", None, True])
def test_bad_numbers_name_the_field(name, value):
    with pytest.raises(InvalidRequest, match=name) as error:
        Sampling(**{name: value})
    assert error.value.param == name and error.value.status == 400


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-20.0, -3.0, -1.0, 0.0, 0.5, 0.5, 2.0, 4.0]), min_size=8, max_size=8),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(-1, 10),
    top_p=st.sampled_from([0.0, 0.2, 0.55, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
)
def test_draws_stay_in_the_oracles_set(logits, temperature, top_k, top_p, min_p):
    s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    array = np.array(logits, np.float32)
    assert set(draws(array, s)) <= allowed(array, s)


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}])
def test_frequencies(fields):
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    s = Sampling(temperature=0.9, **fields)
    counts = np.bincount(draws(logits, s, 8192), minlength=12)
    keep = np.array([i in allowed(logits, s) for i in range(12)])
    p = np.where(keep, np.exp(logits / 0.9), 0)
    p /= p.sum()
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(p))
    chi2 = (((counts - 8192 * p) ** 2)[keep] / (8192 * p[keep])).sum()
    assert chi2 < 40  # 11 degrees of freedom or fewer: one in 30,000


MIXED = [
    Sampling(),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.3, top_k=20, seed=4),
    Sampling(temperature=1.0, top_p=0.7, seed=5),
    Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.02, seed=-6),
    Sampling(temperature=1.0, seed=2**63 - 1),
    None,
    Sampling(temperature=2.0, min_p=0.1, seed=8),
]


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(8, 999)).astype(np.float32) * 3
    steps = np.arange(8) * 7
    all_rows = np.asarray(run(logits, choices(MIXED, [0] * 8, steps)))
    for _ in range(3):
        order = rng.permutation(8)
        shuffled = run(logits[order], choices([MIXED[i] for i in order], [0] * 8, steps[order]))
        assert np.array_equal(np.asarray(shuffled), all_rows[order])
    for row, s in enumerate(MIXED):  # beside idle rows, and alone: other branches of the switch
        beside = choices([s] + [None] * 7, [0] * 8, [steps[row]] * 8)
        assert np.asarray(run(np.roll(logits, -row, 0), beside))[0] == all_rows[row]
        assert np.asarray(run(logits[row : row + 1], choices([s], [0], steps[row : row + 1])))[0] == all_rows[row]


def test_seed_and_step_decide():
    logits = np.zeros((4, 4096), np.float32)
    free = Sampling(temperature=1.0)
    first = np.asarray(run(logits, choices([free] * 4, [1, 1, 2, 2**40 + 1], [0, 1, 0, 0])))
    assert len(set(first)) == 4
    named = np.asarray(run(logits, choices([Sampling(temperature=1.0, seed=1)] * 4, [9] * 4, [0, 1, 0, 1])))
    assert named.tolist() == [first[0], first[1], first[0], first[1]]


def test_bfloat16_and_minus_infinity():
    logits = jnp.array([[-jnp.inf, 1.0, -jnp.inf, 1.0]], jnp.bfloat16)
    for step in range(32):
        assert int(run(logits, choices([Sampling(temperature=5.0, top_k=3, top_p=0.99)], [0], [step]))[0]) in (1, 3)
