"""The session index against a plain list of sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sejax.cache.chain import BLOCK, Hit, Index, common, digests, root


def test_a_root_tells_fields_apart() -> None:
    assert root(["ab", "c"]) != root(["a", "bc"]) != root(["abc"])
    assert root(["ab", "c"]) == root(["ab", "c"])
    ids = np.arange(2 * BLOCK, dtype=np.int32)
    assert digests(root(["a"]), ids) != digests(root(["b"]), ids)
    assert len(digests(root(["a"]), ids[:-1])) == 1


def test_a_whole_session_must_be_inside_the_prompt() -> None:
    index, ids = Index(root(["m"])), list(range(100))
    index.insert(1, ids[:70])
    index.insert(2, ids[:40])
    assert index.lookup(ids, whole=True) == Hit(1, 70)
    assert index.lookup([*ids[:70], 5], whole=True) == Hit(1, 70)
    assert index.lookup(ids[:70], whole=True) == Hit(2, 40)  # one id is left to compute, so session 1 is a token too long
    assert index.lookup(ids[:70], whole=False) == Hit(1, 69)
    index.remove(1)
    index.remove(1)
    assert index.lookup(ids, whole=True) == Hit(2, 40)
    index.insert(2, ids[:3])
    assert index.lookup(ids, whole=True) == Hit(2, 3)
    assert index.lookup([9, 9], whole=False) is None


tokens = st.lists(st.integers(0, 2), max_size=6)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Lists that share long prefixes: a common text, cut somewhere, and a few ids."""
    cut = draw(st.integers(0, 3 * BLOCK))
    return [i % 7 for i in range(cut)] + draw(tokens)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), prompts()), max_size=12), prompts(), st.booleans())
def test_lookup_equals_a_search_of_all(steps: list[tuple[bool, int, list[int]]], asked: list[int], whole: bool) -> None:
    index, model = Index(root(["m"])), dict[int, list[int]]()
    for insert, key, ids in steps:
        if insert:
            index.insert(key, ids)
            model[key] = ids
        else:
            index.remove(key)
            model.pop(key, None)
    shared = {key: common(np.array(ids), np.array(asked[:-1])) for key, ids in model.items()}
    lengths = [n for key, n in shared.items() if n and (not whole or n == len(model[key]))]
    hit = index.lookup(asked, whole)
    assert (hit.length if hit else 0) == max(lengths, default=0)
    assert hit is None or shared[hit.key] == hit.length
    assert set(index._ids) == set(model) and (model or not index._through)
