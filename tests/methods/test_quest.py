"""Quest: the vectors, ragged rows and truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax.kernels import pages as kernel
from sejax.kernels.attention import attend
from sejax.methods import quest as quest_factory
from sejax.methods.quest import bounds, pages_read
from sejax.types import AttentionView
from tests.methods.handmade import Sequence, spec_of, vectors
from tests.oracles.quest import Oracle, chosen

CASES = vectors("quest")


def indexed(k: np.ndarray, page: int):
    """Bounds of keys [H,T,D], appended one token at a time through the selection -> (selection, leaves, table)."""
    heads, length, dim = k.shape
    selection = bounds(page, page, "each")
    count = -(-length // page)
    table = jnp.arange(count)[None]
    leaves = selection.init(spec_of(heads, 1, dim), count)
    for t in range(length):
        leaves = selection.observe(leaves, table, jnp.full((1, 1, heads), t), jnp.asarray(k[:, t], jnp.float32)[None, None])
    return selection, leaves, table


def grouped(q: np.ndarray, heads: int):
    return jnp.asarray(q, jnp.float32).reshape(1, heads, -1, q.shape[-1])


@pytest.mark.parametrize("name", ["eval_reference_per_query_head", "ties", "zero_and_negative_q"])
def test_bounds_and_scores(name):
    """The reference's page scores are per query head: keys repeated, a group of one. Its sets do not force the last page."""
    case = CASES[name]
    q, k = case["inputs"]["q"], case["inputs"]["k_postrope"]
    _, leaves, table = indexed(k, case["params"]["page_size"])
    if "page_max" in case["expected"]:
        np.testing.assert_allclose(np.swapaxes(leaves["high"], 0, 1), case["expected"]["page_max"], atol=1e-5)
        np.testing.assert_allclose(np.swapaxes(leaves["low"], 0, 1), case["expected"]["page_min"], atol=1e-5)
    repeat = len(q) // len(k)
    low, high = (jnp.repeat(leaves[n], repeat, axis=1) for n in ("low", "high"))
    count = jnp.full((1, len(q)), table.shape[1])
    scores = kernel.page_scores(grouped(q, len(q)), low, high, table, count)
    np.testing.assert_allclose(scores[0], case["expected"]["page_scores"], atol=1e-5)
    if "selected_pages" in case["expected"]:
        wanted = np.asarray(case["expected"]["selected_pages"])
        np.testing.assert_array_equal(kernel.select(scores, wanted.shape[1])[0], wanted)


def test_ties_two_pages():
    case = CASES["ties_two_pages"]
    _, leaves, table = indexed(case["inputs"]["k_postrope"], 2)
    scores = kernel.page_scores(grouped(case["inputs"]["q"], 1), leaves["low"], leaves["high"], table, jnp.full((1, 1), 4))
    np.testing.assert_array_equal(kernel.select(scores, 2)[0], case["expected"]["selected_pages"])


def test_the_dropped_page_is_the_references_own():
    """With budget >= T the evaluation reference drops a page (11 // 2 = 5): its scores and choice; ours reads all (next test)."""
    case = CASES["eval_reference_budget_ge_T_drops_a_page"]
    q, k = case["inputs"]["q"], case["inputs"]["k_postrope"]
    _, leaves, table = indexed(k, 2)
    low, high = (jnp.repeat(leaves[n], 2, axis=1) for n in ("low", "high"))
    scores = kernel.page_scores(grouped(q, 4), low, high, table, jnp.full((1, 4), 6))
    np.testing.assert_array_equal(kernel.select(scores, 5)[0], case["expected"]["selected_pages"])


@pytest.mark.parametrize(
    ("name", "heads", "budget", "repeat"),
    [
        ("kernel_last_page_forced", "each", 6, True),
        ("shared_all_heads_last_forced", "shared", 6, False),
        ("budget_ge_T_dense", "each", 12, True),
    ],
)
def test_pages_and_outputs(name, heads, budget, repeat):
    """The pages read and the attention over them."""
    case = CASES[name]
    q, k, v = (case["inputs"][n] for n in ("q", "k_postrope", "v"))
    if repeat:
        k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    _, leaves, table = indexed(k, 2)
    n = jnp.full((1, len(k)), k.shape[1], jnp.int32)
    picked = pages_read(grouped(q, len(k)), leaves["low"], leaves["high"], table, n, budget, 2, heads)
    pages = np.asarray(picked.ids[0]) // len(k)
    wanted = np.asarray(case["expected"]["selected_pages"])
    np.testing.assert_array_equal(pages[:, : wanted.shape[-1]], np.broadcast_to(wanted, (len(k), wanted.shape[-1])))
    pool = lambda x: jnp.moveaxis(jnp.asarray(np.pad(x, [(0, 0), (0, 1), (0, 0)]), jnp.float32).reshape(len(k), -1, 2, 2), 0, 1)  # noqa: E731
    view = AttentionView(pool(k), pool(v), picked.ids, picked.length, run=2)
    out, _ = attend(grouped(q, len(k))[:, None], view)
    np.testing.assert_allclose(out.reshape(len(q), -1), case["expected"]["out"], atol=1e-5)


def test_metadata_after_each_append():
    case = CASES["metadata_after_each_append"]
    k = case["inputs"]["k_postrope"]
    for i, length in enumerate((3, 4, 5)):
        _, leaves, _ = indexed(k[:, :length], 2)
        for leaf, field in (("high", "page_max_after_T3_T4_T5"), ("low", "page_min_after_T3_T4_T5")):
            np.testing.assert_allclose(leaves[leaf][:, 0], np.asarray(case["expected"][field][i])[0], atol=1e-6)


PAGES, PAGE, HEADS, GROUP, DIM = 6, 4, 2, 3, 4


@pytest.mark.parametrize(("heads", "top_p"), [("each", 1.0), ("shared", 1.0), ("each", 0.6)])
def test_random_ragged_rows_equal_the_formula(heads, top_p):
    """Heads with different numbers of rows, a partial last page, more budget than pages, ties, fewer pages than the budget."""
    run = jax.jit(lambda q, low, high, table, n: pages_read(q, low, high, table, n, 3 * PAGE, PAGE, heads, top_p))
    built = jax.jit(kernel.page_bounds)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, PAGES * PAGE), min_size=2, max_size=2), st.booleans())
    def check(seed, n, ties):
        n = [n[0]] * 2 if heads == "shared" else n  # a shared list needs equal lengths
        rng = np.random.default_rng(seed)
        q, k = rng.standard_normal((1, HEADS, GROUP, DIM)), rng.standard_normal((HEADS, PAGES * PAGE, DIM))
        q, k = (np.round(q), np.round(k)) if ties else (q, k)
        table = rng.permutation(PAGES)[None].astype(np.int32)
        real = np.arange(PAGES * PAGE) < np.asarray(n)[:, None]
        low, high = (np.asarray(x) for x in built(k.astype(np.float32).reshape(HEADS, PAGES, PAGE, DIM), real.reshape(HEADS, PAGES, PAGE)))
        at = np.argsort(table[0])
        picked = run(q.astype(np.float32), low[:, at].swapaxes(0, 1), high[:, at].swapaxes(0, 1), table, np.asarray([n], np.int32))
        oracle = Oracle(0, 1, HEADS, page=PAGE, budget=3 * PAGE, dense_layers=0, heads_mode=heads)
        oracle.k = {p: k[:, p].astype(np.float32) for p in range(PAGES * PAGE)}
        oracle.kept = [list(range(m)) for m in n]
        wanted = [oracle.bound(h, q[0, h].astype(np.float32)) for h in range(HEADS)]
        wanted = [list(np.max(wanted, axis=0))] * 2 if heads == "shared" else wanted
        for h in range(HEADS):
            pages = chosen(wanted[h], 3, top_p, DIM)
            read = sum(min(PAGE, n[h] - page * PAGE) for page in pages)
            assert int(picked.length[0, h]) == read
            assert np.asarray(picked.ids[0, h, : len(pages)]).tolist() == [int(table[0, page]) * HEADS + h for page in pages]

    check()


def test_truncation_recomputes_the_last_pages_bounds():
    """After dropping tokens the bounds are those of a sequence that never had them."""
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((2, 11, 4)), rng.standard_normal((1, 11, 4)), rng.standard_normal((1, 11, 4))
    long = Sequence("quest:budget=4,page=4,dense_layers=0", 1, 2, 4, 12)
    long.prompt(q, k, v)
    long.state = jax.jit(long.layer.truncate)(long.state, long._rows(6, 0))
    short = Sequence("quest:budget=4,page=4,dense_layers=0", 1, 2, 4, 12)
    short.prompt(q[:, :6], k[:, :6], v[:, :6])
    assert long.kept == short.kept == [list(range(6))]
    for leaf in ("low", "high"):
        a, b = (np.asarray(s.state.pages["index"][leaf][s.table[1]]) for s in (long, short))
        np.testing.assert_array_equal(a[:2], b[:2])
    long.length = 6
    step = rng.standard_normal((3, 2, 4))
    np.testing.assert_array_equal(long.token(step[0], step[1][:1], step[2][:1]), short.token(step[0], step[1][:1], step[2][:1]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(budget=100), "budget=100 must be a multiple of page=16; use 96"),
        (dict(page=0), "page=0 must be at least 1"),
        (dict(dense_layers=-1), "dense_layers=-1"),
        (dict(top_p=0), "top_p=0 must lie in"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        quest_factory(**arguments)
