"""A method takes one file and no other change: one that exists in this test alone, through the functional API and the engine."""

import numpy as np
import pytest

import sejax
from sejax.serve.engine import Engine
from sejax.serve.request import Sampling
from tests.laws.conversation import LAYERS, Programs, kept, turns
from tests.methods.extra import extra_methods
from tests.serve.test_engine import MODEL, greedy

THIN = '''
"""A method made up for this test."""

import jax.numpy as jnp

from sejax.cache.method import check, composed
from sejax.cache.retention import Candidates, Retention
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method


def every_second(candidates: Candidates) -> Array:
    """Candidates -> f32[R,H,C]."""
    rank = jnp.arange(candidates.read("pos").shape[-1])
    return jnp.broadcast_to(-(rank % 2.0), (*candidates.total.shape, rank.size))


def thin(budget: int = 1024, slack: int = 256, page: int = 16) -> Method:
    """Keep every second token of those held, again and again.

    score_j = -(j mod 2), j the rank among the tokens held
    """
    check(budget >= 1 and slack >= 1, f"budget={budget} and slack={slack} must be at least 1")

    def retention(spec: LayerSpec) -> Retention:
        return Retention(budget, slack, 0, every_second, count=lambda total: jnp.minimum((total + 1) // 2, budget))

    return composed("thin", dict(budget=budget, slack=slack, page=page), raw(page), retention)
'''
BUDGET, SLACK = 16, 3


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "thin.py").write_text(THIN)
    with extra_methods(tmp_path):
        yield f"thin:budget={BUDGET},slack={SLACK},page=4"


def test_a_conversation_keeps_what_the_method_says(spec):
    program, found, expected = Programs(spec), [], []
    program.run(program.cache(), 1, turns(), after=lambda cache: found.append(kept(cache, 1)))
    held, length = [], 0
    for kind, ids in turns():
        for count in [len(ids)] if kind == "prompt" else [1] * len(ids):
            first, held, length = not held, [*held, *range(length, length + count)], length + count
            if first or len(held) >= BUDGET + SLACK:
                held = held[::2][:BUDGET]
            expected.append([[held] * 2] * LAYERS)
    assert found == expected
    assert len({len(step[0][0]) for step in found}) > 5  # it was thinned, grew, and was thinned again


def test_it_combines(spec):
    both = sejax.method(f"{spec} + quest:budget=8,page=4,dense_layers=1")
    assert both.order == "layer" and dict(both.arguments)["thin.budget"] == BUDGET


@pytest.mark.slow
def test_it_serves(spec):
    method, prompt, tail = sejax.method(spec), np.arange(30).tolist(), np.arange(7).tolist()
    with Engine(MODEL, method, max_len=96, rows=1, slots=2, chunks=(32,), seed=1) as engine:
        sampling = Sampling(max_tokens=10, ignore_eos=True)
        (one,) = engine.generate([prompt], sampling)
        (two,) = engine.generate([prompt + list(one.ids) + tail], sampling)
    assert [list(one.ids), list(two.ids)] == greedy(method, [(prompt, 10), (tail, 10)])
    assert two.usage.cached == len(prompt) + 9
