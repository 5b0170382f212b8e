"""StreamingLLM: the vectors."""

import numpy as np
import pytest

from tests.methods.handmade import Sequence, vectors
from tests.oracles.transformer import rope

CASES = vectors("streamingllm")


def filled(spec: str, length: int, dim: int = 2) -> Sequence:
    rng = np.random.default_rng(0)
    sequence = Sequence(spec, 1, 1, dim, length)
    sequence.prompt(*rng.standard_normal((3, 1, length, dim)))
    return sequence


@pytest.mark.parametrize("row", CASES["keep_sets"]["inputs"]["rows"].tolist(), ids=str)
def test_keep_sets(row):
    """(T, start, recent, coming): after `coming` tokens the official set without them is ours without them."""
    length, start, recent, coming = row
    expected = CASES["keep_sets"]["expected"]["kept"][CASES["keep_sets"]["inputs"]["rows"].tolist().index(row)]
    sequence = filled(f"streamingllm:sinks={start},recent={recent},page=2", length + coming)
    old = [p for p in sequence.kept[0] if p < length]
    if isinstance(expected, dict):
        assert len(old) == expected["n"] and old[start] == expected["first_after_sinks"]
    else:
        assert old == [int(p) for p in expected]


@pytest.mark.parametrize(("positions", "field"), [("cache", "out"), ("true", "out_if_original_positions_were_kept")])
def test_decode_renumbered_gqa(positions, field):
    """The official `recent` of 3 excludes the current token, ours of 4 includes it (METHODS 0)."""
    case = CASES["decode_renumbered_gqa"]
    k, v = case["inputs"]["k_prerope"], case["inputs"]["v"]
    sequence = Sequence(f"streamingllm:sinks=2,recent=4,positions={positions},page=2", 1, 2, 2, 16)
    length = k.shape[1]
    sequence.prompt(np.zeros((2, length, 2)), rope(k, np.arange(length)), v)
    q, new, value = (case["inputs"][n][:, 0] for n in ("q_new_prerope", "k_new_prerope", "v_new"))
    out = sequence.token(rope(q, np.full(2, length)), rope(new, np.full(1, length)), value, q_raw=q)
    assert sequence.kept == [[*case["expected"]["kept"].tolist(), length]]
    np.testing.assert_allclose(out, case["expected"][field], atol=1e-5)


def test_kvpress_ratio():
    """n_kept = int(T (1 - r)) tokens, sinks among them: sinks + recent with n_kept in total.

    The row that keeps sinks only does not apply: the current token is always one of ours.
    """
    case = CASES["kvpress_ratio"]
    for (length, ratio, sinks), expected in zip(case["inputs"]["rows"].tolist(), case["expected"]["rows"], strict=True):
        recent = int(length * (1 - ratio)) - int(sinks)
        if recent:
            assert filled(f"streamingllm:sinks={int(sinks)},recent={recent},page=2", int(length)).kept == [expected["kept"].tolist()]


def test_rerotation_equals_another_query_position():
    """The official code moves keys; ours moves the query: the same logits."""
    case = CASES["rerotate_kept_keys"]
    k, kept = case["inputs"]["k_rotated_at_original_positions"][0], np.asarray(case["inputs"]["kept"], int)
    moved = rope(k[kept], np.arange(len(kept)) - kept)
    np.testing.assert_allclose(moved, case["expected"]["k_rerotated"][0], atol=1e-5)
    q, end = np.random.default_rng(0).standard_normal(4), len(kept) - 1
    ours = [rope(q, end + shift) @ key for key, shift in zip(k[kept], kept - np.arange(len(kept)), strict=True)]
    np.testing.assert_allclose(ours, moved @ rope(q, end), atol=1e-5)
