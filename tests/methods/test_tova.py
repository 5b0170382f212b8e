"""TOVA: the vectors."""

import numpy as np
import pytest

from sejax.methods import tova as factory
from tests.methods.handmade import Sequence, vectors

CASES = vectors("tova")


@pytest.mark.parametrize(
    ("name", "field", "protect"),
    [
        ("gqa_prefill6_decode3", "steps", False),
        ("current_token_evicted", "official", False),
        ("current_token_evicted", "last_token_protected_kvpress_rule", True),
        ("budget_ge_T", "final_kept", False),
    ],
)
def test_steps(name, field, protect):
    """What each step attends to (through its output) and keeps; weights are tested through the sets they choose."""
    case = CASES[name]
    q, k, v = (case["inputs"][n] for n in "qkv")
    size, first = case["params"]["cache_size"], case["params"]["prefill"]
    spec = f"tova:budget={size},protect_last={str(protect).lower()},page=2"
    sequence = Sequence(spec, len(k), len(q) // len(k), k.shape[-1], 16)
    found = [(sequence.prompt(q[:, :first], k[:, :first], v[:, :first])[:, -1], sequence.kept)]
    for t in range(first, k.shape[1]):
        found.append((sequence.token(q[:, t], k[:, t], v[:, t]), sequence.kept))
    if field == "final_kept":
        assert found[-1][1] == [case["expected"][field].tolist()] * len(k)
        return
    for (out, kept), step in zip(found, case["expected"][field], strict=True):
        np.testing.assert_allclose(out, step["out"], atol=1e-5)
        assert kept == [np.asarray(step["kept"]).tolist()] * len(k)


def test_bad_arguments():
    with pytest.raises(ValueError, match="period=-1 must be at least 1"):
        factory(period=-1)
    with pytest.raises(ValueError, match="budget=0"):
        factory(budget=0)
