"""Every method through the engine: two turns of two sessions beside each other say what the functional API says."""

from __future__ import annotations

import numpy as np
import pytest

import sejax
from sejax.serve.engine import Engine
from sejax.serve.request import Sampling
from tests.cases import CASES
from tests.serve.test_engine import MODEL, PROMPTS, accounted, greedy, settled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("spec", [case.spec for case in CASES if not case.variant])
def test_two_turns_equal_the_functional_api(spec: str) -> None:
    method, size, tail = sejax.method(spec), 12, np.random.default_rng(3).integers(0, 256, 9).tolist()
    with Engine(MODEL, method, max_len=128, rows=2, slots=3, chunks=(64,), seed=1) as engine:
        sampling = Sampling(max_tokens=size, ignore_eos=True)
        first = engine.generate(PROMPTS[:2], sampling)
        again = engine.generate([p + list(r.ids) + tail for p, r in zip(PROMPTS[:2], first, strict=True)], sampling)
        for prompt, one, two in zip(PROMPTS, first, again, strict=False):
            assert [list(one.ids), list(two.ids)] == greedy(method, [(prompt, size), (tail, size)])
            assert two.usage.cached == len(prompt) + size - 1
        assert settled(engine)
        accounted(engine)
