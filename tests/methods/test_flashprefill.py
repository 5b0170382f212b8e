"""FlashPrefill: version 1's vector, random prompts of version 2 against the oracle, chunks, what it goes with, that it skips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax import functional, methods
from sejax.kernels import tiles
from sejax.methods import flashprefill as factory
from sejax.methods.flashprefill import ALPHAS, Rule, as_rows, chosen, energies, listed_for, reader, tiling
from sejax.types import AttentionView, Qkv, Rows
from tests.methods.handmade import QUICK, Sequence, spec_of, vectors
from tests.models.tiny import tiny_model
from tests.oracles.adakv import Oracle as Dealt
from tests.oracles.flashprefill import Oracle
from tests.oracles.h2o import Oracle as Received
from tests.oracles.transformer import New, softmax

CASE = vectors("flashprefill")["gqa"]


def listed(k, v, page):
    """A view of keys [H,T,D] that lists all of them as this call's own, pages in reverse."""
    heads, length, dim = k.shape
    pool = lambda x: jnp.moveaxis(jnp.asarray(x, jnp.float32).reshape(heads, -1, page, dim), 0, 1)[::-1]  # noqa: E731
    ids = jnp.arange(length // page)[None, ::-1]
    return AttentionView(pool(k), pool(v), ids, jnp.full(1, length), own=jnp.full(1, length), run=page)


def test_version_1_scores_blocks_and_output():
    """The vector: per query head, no correction, blocks of 2."""
    q, k, v = (CASE["inputs"][n] for n in "qkv")
    params, expected = CASE["params"], CASE["expected"]
    edges = (params[name] for name in ("attention_sink_blocks", "window_blocks", "last_n_blocks_full"))
    rule = Rule(params["alpha"], 2, 2, *edges, shortest=0, apart=True, correction=False)
    view = listed(k, v, 2)
    query = jnp.moveaxis(jnp.asarray(q, jnp.float32).reshape(1, 2, 2, 16, 2), 3, 1)
    zero = jnp.zeros(1, jnp.int32)
    place = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), tiling(rule, 16, Rows(zero, zero, zero + 16, view.ids, zero[:, None])))
    means = [jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), tiles.block_means(view, 2))]
    views, rows = (listed_for(view, 2),), as_rows(query)
    energy = energies(rows, views, means, rule, place)
    share = np.asarray(energy[0])[:, :8]  # [G,tiles,H,B]: one place more than tiles, for calls that begin inside one
    share = np.moveaxis(share, 2, 0).reshape(4, 8, 8)
    np.testing.assert_allclose(share / share.sum(-1, keepdims=True), expected["block_score"], atol=1e-5)
    keep = np.moveaxis(np.asarray(chosen(views, energy, rule, place)[0][0])[:, :8], 2, 0).reshape(4, 8, 8)
    active = [[np.flatnonzero(row).tolist() for row in head] for head in keep]
    assert active == [[list(map(int, row)) for row in head] for head in expected["active_blocks_per_row"]]
    sequence = Sequence(
        "flashprefill:alpha=0.5,block=2,tile=2,sinks=1,window=2,last=1,shortest=0,correction=false,per_query_head=true", 2, 2, 2, 16
    )
    np.testing.assert_allclose(sequence.prompt(q, k, v), expected["out"], atol=1e-5)


HEADS, GROUP, DIM, LONGEST = 2, 2, 4, 48
SPEC = "flashprefill:alpha=0.7,block=4,tile=6,sinks=1,window=2,last=2,shortest=6"


def new_tokens(rng, start, count):
    """Random projections that arrive together, as the vectors' arrays and as the oracle's."""
    q = 2 * rng.standard_normal((HEADS * GROUP, count, DIM))
    k, v = (2 * rng.standard_normal((HEADS, count, DIM)) for _ in "kv")
    fold = np.moveaxis(q.reshape(HEADS, GROUP, count, DIM), 2, 0)
    swap = [x.swapaxes(0, 1) for x in (k, v)]
    return (q, k, v), New(fold, *swap, fold, swap[0], start + np.arange(count))


WITH = ("", " + h2o:budget=14,recent=4,period=3,page=4", " + adakv:budget=14,window=3,kernel=3,slack=2,page=4")


@pytest.mark.parametrize(("with_", "counts"), [(WITH[0], (21, 13, 9)), (WITH[1], (21, 13, 9)), (WITH[1], (7, 26, 6)), (WITH[2], (25, 18))])
def test_turns_equal_the_formula(with_, counts):
    """Prompts of a conversation: dense short ones, tiles cut by a turn's start, blocks of earlier turns, partial tails."""
    rng, start = np.random.default_rng(sum(counts)), 0
    sequence = Sequence(SPEC + with_, HEADS, GROUP, DIM, LONGEST)
    reads = Oracle(0, 1, HEADS, **dict(methods.method(SPEC).arguments))
    rule = {WITH[1]: Received, WITH[2]: Dealt}.get(with_)
    oracle = rule(0, 1, HEADS, **dict(methods.method(with_[3:]).arguments)) if rule else reads
    oracle.prompter = reads if rule else None
    for count in counts:
        arrays, new = new_tokens(rng, start, count)
        out = np.moveaxis(sequence.prompt(*arrays).reshape(HEADS, GROUP, count, DIM), 2, 0)
        np.testing.assert_allclose(out, oracle.prompt(new), atol=2e-5)
        assert sequence.kept == oracle.kept
        start += count
    assert reads.sparse > 5  # blocks were left out
    if rule is Received:
        expected = [[oracle.received[h][p] for p in held] for h, held in enumerate(oracle.kept)]
        np.testing.assert_allclose(sequence.leaf("score"), expected, atol=1e-5)


CALL = 12


@pytest.mark.parametrize("apart", [False, True])
def test_random_calls_equal_the_formula(apart):
    """A prompt that begins anywhere, in calls of 12 tokens, the last one partial: 60 draws, one program."""
    rule = Rule(0.6, 4, 4 if apart else 3, 1, 1, 1, 8, apart, not apart)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, view, start, count, turn):
        rows = Rows(start, start, count, view.ids, start[:, None], turn)
        return reader(rule)(q, (view.replace(length=start + count, own=count),), rows).out

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.integers(1, 32), st.booleans())
    def check(seed, begin, total, ties):
        (_, k, v), new = new_tokens(np.random.default_rng(seed), 0, LONGEST)
        if ties:
            k = np.round(k)
            new = new._replace(k=k.swapaxes(0, 1))
        oracle = Oracle(0, 1, HEADS, alpha=0.6, block=4, tile=4 if apart else 6, sinks=1, window=1, last=1, shortest=8)
        oracle.per_query_head, oracle.correction, oracle.call = apart, not apart, CALL
        prompt = New(*(x[begin : begin + total] for x in new))
        oracle.add(New(*(x[:begin] for x in new)))
        expected = oracle.prompt(prompt)
        for at in range(0, total, CALL):
            start, count = begin + at, min(CALL, total - at)
            one = lambda x: jnp.asarray([x], jnp.int32)  # noqa: E731
            x = np.zeros((1, CALL, HEADS, GROUP, DIM), np.float32)
            x[0, :count] = new.q[start : start + count]
            out = run(x, listed(k, v, 4).replace(own=None), one(start), one(count), one([begin, begin + total]))
            np.testing.assert_allclose(out[0, :count], expected[at : at + count], atol=2e-5)

    check()


@pytest.mark.parametrize("with_", ["full", "snapkv:budget=12,window=3,slack=2,page=4"])
def test_chunks_of_whole_tiles_change_nothing(with_):
    """Two turns, the second beginning at a multiple of the tile; chunks of one tile, of five, and the whole turn."""
    model = tiny_model()
    method = methods.method(f"flashprefill:alpha=0.7,block=4,tile=8,sinks=1,window=1,last=2,shortest=0 + {with_}")
    found = []
    for chunk in (4, 20):
        cache = functional.init(model, method, 1, 80)
        for turn in (jnp.arange(40) * 7 % 101, jnp.arange(40) * 11 % 101):
            logits, cache = functional.prefill(model, method, cache, turn, 0, 38 if turn[1] == 11 else 40, chunk=chunk)
            found.append(np.asarray(logits))
    for first, second in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(first, found[0], atol=1e-4)
        np.testing.assert_allclose(second, found[1], atol=1e-4)
    dense = methods.method(with_)
    cache = functional.init(model, dense, 1, 80)
    logits, _ = functional.prefill(model, dense, cache, jnp.arange(40) * 7 % 101, 0)
    assert np.abs(np.asarray(logits) - found[0]).max() > 1e-3  # it did leave blocks out


def test_blocks_that_no_tile_chose_are_not_read():
    """Their keys and values are NaN, and the answer is not."""
    rng, size = np.random.default_rng(0), 8
    q = jnp.asarray(rng.standard_normal((1, 32, 1, 2, 4)), jnp.float32)
    view = listed(*rng.standard_normal((2, 1, 32, 4)), 4)
    keep = np.zeros((1, tiles.tiles_of(32, 8), 1, 4), bool)
    for tile in range(4):
        keep[0, tile, 0, [0, tile]] = True
    keep[0, 2:, 0, 0] = False
    run = jax.jit(lambda view: tiles.attend_blocks(q, view, jnp.asarray(keep), jnp.zeros(1, jnp.int32), 8, size), compiler_options=QUICK)
    whole, lse = run(view)
    broken = view.replace(k=view.k.at[6:].set(jnp.nan), v=view.v.at[6:].set(jnp.nan))  # pages of block 0
    np.testing.assert_array_equal(whole[:, 16:], run(broken)[0][:, 16:])
    np.testing.assert_array_equal(lse[:, 16:], run(broken)[1][:, 16:])
    assert not np.any(whole[:, :16] == run(broken)[0][:, :16])


@pytest.mark.parametrize("other", ["quest", "rkv + quest:budget=512", "omnikv", "h2o", "tova", "adakv", "streamingllm", "kvzip"])
def test_it_goes_with(other):
    method = methods.method(f"flashprefill:alpha=0.1 + {other}")
    plain = methods.method(other)
    assert (method.order, method.growing) == (plain.order, plain.growing)
    assert dict(method.arguments)["flashprefill.alpha"] == 0.1
    assert method == methods.method(f"flashprefill:alpha=0.1 + {other}") != plain


def test_with_what_keeps_and_reads_everything_it_stays_itself():
    method = methods.method("flashprefill:alpha=0.1")
    assert methods.method("flashprefill:alpha=0.1 + full") == method == methods.method("full + flashprefill:alpha=0.1")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("flashprefill:alpha=1.5", "alpha=1.5 must lie between 0 and 1"),
        ("flashprefill", "needs alpha"),
        ("flashprefill:alpha=0.1,window=0", "window=0 must be at least 1"),
        ("flashprefill:alpha=0.1,block=24,page=16", "block=24 must be a multiple of page=16"),
        ("flashprefill:alpha=0.1,tile=0", "tile=0"),
        ("flashprefill:alpha=0.1 + flashprefill:alpha=0.2", "both decide how a prompt is read"),
        ("flashprefill:alpha=0.1 + h2o:prefill_budget=8192", "leave out prefill_budget"),
        ("flashprefill:alpha=0.1 + streamingllm:prefill=window", "use prefill=dense"),
    ],
)
def test_refusals(spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        methods.method(spec)


def test_a_block_must_hold_whole_pages_of_the_other_method():
    with pytest.raises(ValueError, match="block=24 must be a multiple of the other method's page=16"):
        functional.init(tiny_model(), methods.method("flashprefill:alpha=0.1,block=24 + snapkv"), 1, 64)
    with pytest.raises(ValueError, match="needs alpha"):
        methods.method("flashprefill")
    assert factory(0.1) == methods.method("flashprefill:alpha=0.1")


def test_calibration_reads_as_much_attention_as_asked():
    """One layer of random projections: the shares of every alpha tried, in plain numpy, give the same alpha."""
    rng, length, size, width = np.random.default_rng(5), 72, 8, 4
    q, k, v = (2 * rng.standard_normal(shape) for shape in ((1, length, HEADS, GROUP, DIM), *[(1, length, HEADS, DIM)] * 2))
    qkv = Qkv(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, q, k)))
    logits = np.einsum("thgd,chd->hgtc", q[0], k[0]) / np.sqrt(DIM)
    weight = softmax(np.where(np.arange(length) <= np.arange(length)[:, None], logits, -np.inf))
    received = weight.reshape(HEADS, GROUP, length // width, width, length // size, size).sum((1, 3, 5))  # [H,tiles,B]
    energy = np.exp(np.einsum("thgd,bhd->hgtb", q[0], k[0].reshape(-1, size, HEADS, DIM).mean(1)) / np.sqrt(DIM))
    energy = energy.reshape(HEADS, GROUP, length // width, width, -1).sum((1, 3))
    tile, block = np.arange(length // width)[:, None] * width, np.arange(length // size)
    past = (block + 1) * size <= tile
    decided = past & (block >= 1) & (block <= tile // size - 2)
    most = np.where(past, energy, 0).max(-1, keepdims=True)
    shares = {a: [(x * (decided & (energy >= a * most))).sum() / (x * decided).sum() for x in (received, 1.0 + 0 * energy)] for a in ALPHAS}
    alpha = max(a for a, (attended, _) in shares.items() if attended >= 0.8)
    measure = methods.calibration("flashprefill", recall="0.8", block="8", tile="8", sinks="1", window="2")
    found = measure(lambda ids: [(spec_of(HEADS, GROUP, DIM), qkv)], [list(range(length)), [1, 2, 3]])
    assert 0.01 < alpha < 1 and found["alpha"] == alpha and found["tokens"] == length
    np.testing.assert_allclose([found["recall"], found["blocks"]], shares[alpha], atol=1e-3)
    with pytest.raises(ValueError, match="texts has no piece of 1024 tokens"):
        methods.calibration("flashprefill")(lambda ids: [], [[1, 2, 3]])
