"""RetroInfer: the vectors, random conversations against the oracle, sizes, truncation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sejax import methods
from sejax.cache import clusters
from sejax.cache.clusters import Job, Most, cluster
from sejax.kernels import gpu_attend
from sejax.kernels.attention import attend, attention
from sejax.methods import retroinfer as factory
from sejax.methods.retroinfer import Clustered, Rule, limits
from sejax.types import Qkv, Rows, State
from tests.methods.handmade import QUICK, Sequence, spec_of, vectors
from tests.oracles.retroinfer import Oracle, shares, split
from tests.oracles.transformer import New

CASES = vectors("retroinfer")


def job(begin: int, count: int, segments: int, number: int, apart: bool = False) -> Job:
    """One row's."""
    return Job(*(jnp.full(1, x, jnp.int32) for x in (begin, count, segments, number)), jnp.full(1, apart))


class Indexed:
    """A case's keys and values in a layer, clustered as its parameters say, not as its length would have it."""

    def __init__(self, name: str, spec: str, task: Job) -> None:
        inputs = CASES[name]["inputs"]
        k, self.q = inputs["k_postrope"], inputs["q"]
        self.sequence = Sequence(spec, len(k), len(self.q) // len(k), k.shape[-1], k.shape[1] + 1)
        self.layer: Clustered = self.sequence.layer.seal.__self__
        self.rows = self.sequence._rows(0, k.shape[1])
        qkv = self.sequence._qkv(np.zeros((len(self.q), *k.shape[1:])), k, inputs["v"])
        most = limits(self.layer.rule, k.shape[1] + 1)

        def index(state: State) -> State:
            state = self.sequence.layer.prefill.write(state, qkv, self.rows)
            return self.layer.index(state, self.rows, task, most.prompt, jnp.ones(1, bool))

        self.state = jax.jit(index, compiler_options=QUICK)(self.sequence.state)

    def out(self) -> np.ndarray:
        wide = np.asarray(self.q)[:, None]
        nothing = np.zeros((self.layer.layer.spec.heads, 1, 2))
        qkv = self.sequence._qkv(wide, nothing, nothing)
        read = lambda state: attention(qkv.q, self.layer.read(state, qkv, None, self.rows)[0], self.rows.count).out  # noqa: E731
        return self.sequence._unfold(jax.jit(read, compiler_options=QUICK)(self.state))[:, 0]

    def leaf(self, name: str, count: int) -> np.ndarray:
        """The first `count` entries of a run's page leaf, head first."""
        leaf = np.asarray(self.state.pages["clusters"][name][self.sequence.table[1]]).swapaxes(0, 1)
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])[:, :count]


def test_the_wave_index():
    """Four clusters in two segments, then one read, two estimated, one ignored."""
    expected = CASES["wave_index_gqa"]["expected"]
    spec = "retroinfer:ratio=0.25,estimate=0.5,sinks=1,recent=2,cluster=4,threshold=16,update=4,segment=10,page=1"
    made = Indexed("wave_index_gqa", spec, job(1, 16, 2, 4))
    size = made.leaf("size", 4)
    np.testing.assert_array_equal(size, expected["cluster_size"])
    np.testing.assert_allclose(made.leaf("k", 4), expected["centroids"], atol=1e-5)
    np.testing.assert_allclose(made.leaf("v", 4) * size[..., None], expected["value_sum"], atol=1e-5)
    first, member = made.leaf("first", 4), made.leaf("member", 19)
    for head, label in enumerate(expected["cluster_of_middle_token"]):
        for c in range(4):
            mine = member[head, first[head, c] : first[head, c] + size[head, c]]
            assert mine.tolist() == (1 + np.flatnonzero(label == c)).tolist()
    qkv = made.sequence._qkv(made.q[:, None], np.zeros((2, 1, 2)), np.zeros((2, 1, 2)))
    score = jax.jit(lambda s: made.layer.scores(s, qkv.q, made.rows, made.layer.own(s, made.rows), 4)[0])(made.state)
    np.testing.assert_allclose(score[0], expected["cluster_distance_sum_over_group"], atol=1e-5)
    np.testing.assert_array_equal(np.argsort(-score[0], axis=-1)[:, :3], expected["cluster_order"])
    np.testing.assert_allclose(made.out(), expected["out"], atol=1e-5)


def test_all_clusters_read_are_dense_attention():
    spec = "retroinfer:ratio=1,estimate=0,sinks=1,recent=2,cluster=4,threshold=16,update=4,segment=10,page=2"
    name = "all_clusters_retrieved_equals_dense"
    np.testing.assert_allclose(Indexed(name, spec, job(1, 16, 2, 4)).out(), CASES[name]["expected"]["out"], atol=1e-5)


def test_an_estimate_of_identical_keys_is_exact():
    name = "estimation_exact_for_identical_keys"
    made = Indexed(name, "retroinfer:estimate=1,sinks=0,recent=1,cluster=2,threshold=4,update=2,page=2", job(0, 6, 1, 3))
    np.testing.assert_array_equal(made.leaf("member", 6)[0], range(6))
    new = {"exact": jnp.zeros(2, jnp.int32), "estimated": jnp.full(2, 3, jnp.int32)}
    made.state = State(made.state.pages, made.state.rows | new)
    np.testing.assert_allclose(made.out()[0], CASES[name]["expected"]["out"], atol=1e-5)


def test_budget_arithmetic():
    case = CASES["budget_arithmetic"]
    for (length, ratio, estimate), expected in zip(case["inputs"]["rows"], case["expected"]["rows"], strict=True):
        rule = Rule(ratio, estimate, 4, 64, 16, 16384, 1024, 8192)
        segments, number = (int(x) for x in rule.split(jnp.int32(length)))
        exact, estimated = rule.shares(number)[number].tolist()
        found = dict(n_segments=segments, n_clusters=number, nprobe=exact, estimation=estimated)
        assert found == {k: int(v) for k, v in expected.items()}


def test_arithmetic_equals_pythons_for_every_length():
    rule = Rule(0.018, 0.232, 4, 64, 16, 16384, 1024, 8192)
    lengths = np.arange(1, 200_000, 61)
    found = np.stack(rule.split(lengths, np), axis=1)
    assert found.tolist() == [list(split(int(n), 8192, 16)) for n in lengths]
    assert rule.shares(9000).tolist() == [list(shares(n, 0.018, 0.232)) if n else [0, 0] for n in range(9001)]


@pytest.mark.parametrize(
    "rule",
    [
        Rule(0.018, 0.232, 4, 64, 16, 16384, 1024, 8192),
        Rule(0.018, 0.232, 4, 64, 8, 512, 64, 128),
        Rule(0.3, 0.4, 2, 3, 2, 12, 4, 16),
        Rule(0.3, 0.4, 0, 1, 4, 4, 4, 3),
    ],
)
def test_pages_cover_tokens_and_clusters(rule):
    """At every length, whatever the length at which the first index was made; never fewer for more tokens."""
    page, lengths = rule.cluster, [*range(1, 400, 3), *range(400, 140_000, 1777)]
    pages = [rule.pages(n, page) for n in lengths]
    assert pages == sorted(pages)
    for n, found in zip(lengths, pages, strict=True):
        most = limits(rule, n)
        assert found >= max(-(-n // page), most.clusters if most else 0)
        assert found <= -(-n // page) + 16 * (n // rule.segment + 1)


SPEC = "retroinfer:ratio=0.2,estimate=0.3,sinks=2,recent=3,cluster=2,threshold=12,update=4,segment=16,page=4"
HEADS, GROUP, DIM, LONGEST, TURN = 2, 3, 4, 80, 32


@functools.cache
def programs(spec: str):
    """A layer's write, seal, decode step and trim, each compiled once; slot 1 of 2."""
    layer = methods.method(spec).layer(spec_of(HEADS, GROUP, DIM), None)
    width = layer.pages(layer.run(LONGEST))
    table = jnp.asarray(np.random.default_rng(0).permutation(2 * width).reshape(2, width).astype(np.int32))

    def rows(start, count):
        one = jnp.ones(1, jnp.int32)
        return Rows(one, one * start, one * count, table[1:], jnp.zeros((1, 1), jnp.int32))

    def step(state, q, k, v, start):
        at, qkv = rows(start, 1), Qkv(q, k, v, q, k)
        state = layer.decode.write(state, qkv, at)
        views, _ = layer.decode.before_attention(state, qkv, None, at)
        out = attention(q, views, at.count).out[0, 0]
        due = layer.due(state, at)[0]
        return out, jax.lax.cond(due, lambda s: layer.decode.after_step(s, at), lambda s: s, state)

    def poisoned():
        state = layer.decode.init(2, 2 * width)
        return State(state.pages | {"kv": jax.tree.map(lambda x: x * jnp.nan, state.pages["kv"])}, state.rows)

    write = lambda state, q, k, v, start, count: layer.prefill.write(state, Qkv(q, k, v, q, k), rows(start, count))  # noqa: E731
    seal = lambda state, start, count: layer.seal(state, rows(start, count))  # noqa: E731
    truncate = lambda state, start: layer.truncate(state, rows(start, 0))  # noqa: E731
    made = [jax.jit(f, compiler_options=QUICK) for f in (poisoned, write, seal, step, truncate)]
    return layer, table, *made


class Talk:
    """One conversation, in the layer and in the oracle. Memory that nobody wrote is NaN."""

    def __init__(self, seed: int, kind: str = "random", spec: str = SPEC) -> None:
        self.rng, self.kind, self.length = np.random.default_rng(seed), kind, 0
        self.layer, self.table, init, *self.calls = programs(spec)
        self.state = init()
        arguments = dict(methods.method(spec).arguments)
        self.oracle = Oracle(0, 1, HEADS, **arguments)

    def draw(self, count: int) -> New:
        q, k, v = (self.rng.standard_normal((count, HEADS, *size)).astype(np.float32) for size in ((GROUP, DIM), (DIM,), (DIM,)))
        q, k = (q * 0 if self.kind == "zero queries" else q), (k * 0 + 3 if self.kind == "equal keys" else k)
        return New(q, k, v, q, k, self.length + np.arange(count))

    def prompt(self, count: int, chunk: int) -> None:
        write, seal, *_ = self.calls
        new = self.draw(count)
        for at in range(0, count, chunk):
            part = [np.zeros((1, TURN, *x.shape[1:]), np.float32) for x in (new.q, new.k, new.v)]
            size = min(chunk, count - at)
            for whole, x in zip(part, (new.q, new.k, new.v), strict=True):
                whole[0, :size] = x[at : at + size]
            self.state = write(self.state, *part, self.length + at, size)
        self.state = seal(self.state, self.length, count)
        self.oracle.add(new)
        self.oracle.seal(new)
        self.length += count

    def token(self) -> np.ndarray:
        """Output and, beside it, the oracle's."""
        new = self.draw(1)
        out, self.state = self.calls[2](self.state, *(x[None] for x in (new.q, new.k, new.v)), self.length)
        self.oracle.add(new)
        expected = self.oracle.read(new)[0]
        self.oracle.trim(new)
        self.length += 1
        return np.stack([np.asarray(out), expected])

    def views(self, q: jax.Array) -> tuple:
        """What a step with this query reads."""
        rows = Rows(*(jnp.ones(1, jnp.int32),) * 3, self.table[1:], jnp.zeros((1, 1), jnp.int32))
        read = lambda state: self.layer.decode.before_attention(state, Qkv(q, q, q, q, q), None, rows)[0]  # noqa: E731
        return jax.jit(read, compiler_options=QUICK)(self.state)

    def truncate(self, length: int) -> None:
        self.state, self.length = self.calls[3](self.state, length), length

    def members(self) -> list[list[list[int]]]:
        """[kv head][cluster] -> tokens."""
        own = {name: int(self.state.rows[name][1]) for name in Clustered.LEAVES}
        rule = self.layer.seal.__self__.rule
        leaves = {n: np.asarray(x[self.table[1]]).swapaxes(0, 1) for n, x in self.state.pages["clusters"].items()}
        size, first, member = (leaves[n].reshape(HEADS, -1) for n in ("size", "first", "member"))
        count = own["groups"] + own["updates"] * rule.block[0]
        return [[member[h, first[h, c] : first[h, c] + size[h, c]].tolist() for c in range(count)] for h in range(HEADS)]


def test_random_conversations_equal_the_oracle():
    """Chunks of any size, prompts shorter than the window, first indices at both turns' ends and while decoding, equal keys, equal
    ranks. A case is left out where rounding decides which cluster is nearer."""
    seen = {"random": 0, "equal keys": 0, "zero queries": 0}
    indexed, left_out = set(), 0

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(
        st.integers(0, 2**32 - 1),
        st.sampled_from([*seen]),
        st.sampled_from([1, 2, 4, 9, 20, 27]),
        st.integers(0, 16),
        st.sampled_from([1, 3, 14, 32]),
        st.sampled_from([1, 5, 7, TURN]),
    )
    def check(seed, kind, first, decoded, second, chunk):
        nonlocal left_out
        talk = Talk(seed, kind)
        talk.prompt(first, chunk)
        for turn in range(2):
            for _ in range(decoded if turn == 0 else 3):
                out, expected = talk.token()
                if talk.oracle.margin < 2e-6:
                    left_out += 1
                    return
                np.testing.assert_allclose(out, expected, atol=2e-5)
            if talk.oracle.margin >= 2e-6:
                assert talk.members() == [[c.members for c in head] for head in talk.oracle.clusters]
                indexed.add((turn, bool(talk.oracle.clusters[0])))
            if turn == 0:
                talk.prompt(second, chunk)
        seen[kind] += 1

    check()
    assert min(seen.values()) >= 30 and left_out <= 20, (seen, left_out)
    assert indexed == {(0, False), (0, True), (1, False), (1, True)}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_tiles_do_not_matter(monkeypatch, segments, apart):
    """Tiles smaller than a segment give the same members and the same means."""
    rng = np.random.default_rng(2)
    k, v = (jnp.asarray(rng.standard_normal((2, 60, 4)), jnp.float32) for _ in range(2))
    one, most = jax.tree.map(lambda x: x[0], job(5, 50, segments, 12, apart)), Most(52, 4, 52, 13, 13)
    read = lambda leaf: lambda row: leaf[:, jnp.clip(row, 0, 59)]  # noqa: E731
    whole = cluster(read(k), read(v), one, most)
    monkeypatch.setattr(clusters, "TILE", 8)
    tiled = cluster(read(k), read(v), one, most)
    for name in ("size", "first"):
        np.testing.assert_array_equal(getattr(whole, name)[:, :12], getattr(tiled, name)[:, :12])
    np.testing.assert_array_equal(whole.member[:, :50], tiled.member[:, :50])
    assert sorted(whole.member[0, :50].tolist()) == list(range(50))
    for name in ("centroid", "value"):
        np.testing.assert_allclose(getattr(whole, name)[:, :12], getattr(tiled, name)[:, :12], atol=1e-5)


def test_what_does_not_fit_the_exact_list_is_estimated():
    """Equal keys make one cluster of everything: too long for the list, and its estimate is exact."""
    talk = Talk(3, "equal keys")
    talk.prompt(27, TURN)
    assert [len(c) for c in talk.members()[0] if c] == [22]
    near, far, _ = talk.views(jnp.ones((1, 1, HEADS, GROUP, DIM)))
    assert near.length.tolist() == [[2, 2]] and far.first.tolist() == [[0, 0]] and far.length.tolist() == [[1, 1]]
    out, expected = talk.token()
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(out[0, 0], np.mean([talk.oracle.v[p][0] for p in range(28)], axis=0), atol=2e-5)


def test_the_cards_kernels_read_the_views_alike():
    """Interpreted: lists by head, of single tokens, with a bias."""
    talk = Talk(4)
    talk.prompt(27, TURN)
    q = jnp.asarray(talk.draw(1).q)[None]
    views = talk.views(q)
    assert len(views) == 3 and all((view.length > 0).all() for view in views)
    for view in views:
        for a, b in zip(gpu_attend.attend(q, view), attend(q, view), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("length", "updates"), [(35, 3), (30, 2), (24, 1), (20, 0)])
def test_truncation_leaves_what_a_shorter_conversation_would_have(length, updates):
    long, short = Talk(5), Talk(5)
    for talk, decoded in ((long, 18), (short, length - 20)):
        talk.prompt(20, TURN)
        for _ in range(decoded):
            talk.token()
    long.truncate(length)
    assert int(long.state.rows["updates"][1]) == updates
    assert all(np.array_equal(long.state.rows[n], short.state.rows[n]) for n in long.state.rows)
    assert long.members() == short.members()
    for talk in (long, short):
        talk.rng = np.random.default_rng(6)
    np.testing.assert_array_equal(long.token()[0], short.token()[0])


def test_truncation_into_the_first_index_drops_it():
    """The next prompt clusters all there is, with the length it then has, as if it had come in one piece."""
    talk, whole = Talk(7), Talk(7)
    talk.prompt(27, TURN)
    talk.truncate(13)
    assert not any(int(talk.state.rows[name][1]) for name in Clustered.LEAVES)
    first = whole.draw(27)
    talk.rng = np.random.default_rng(8)
    talk.prompt(9, TURN)
    whole.rng = np.random.default_rng(8)
    joined = New(*(np.concatenate([a[:13], b]) for a, b in zip(first, whole.draw(9), strict=True)))
    whole.draw = lambda count: joined
    whole.prompt(22, TURN)
    assert talk.members() == whole.members() and len(talk.members()[0]) == 8


def test_combinations():
    alone = methods.method("retroinfer")
    assert methods.method("full + retroinfer") == alone == methods.method("retroinfer+full")


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("snapkv + retroinfer", "snapkv with retroinfer: what is kept is too little to be clustered; use"),
        ("retroinfer + pyramidkv", "too little to be clustered"),
        ("expected_attention + retroinfer", "too little to be clustered"),
        ("keydiff + retroinfer", "too little to be clustered"),
        ("rkv + retroinfer", "too little to be clustered"),
        ("adakv + retroinfer", "; use"),
        ("h2o + retroinfer", "tokens that are not read receive no attention"),
        ("tova + retroinfer", "tokens that are not read receive no attention"),
        ("streamingllm + retroinfer", "all that is kept is read"),
        ("retroinfer + quest", "both decide which tokens are read"),
    ],
)
def test_refusals(pair, sentence):
    with pytest.raises(ValueError, match=sentence):
        methods.method(pair)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(ratio=0), "ratio=0 must lie in"),
        (dict(estimate=1.5), "estimate=1.5"),
        (dict(recent=0), "recent=0 must be at least 1"),
        (dict(sinks=-1), "sinks=-1"),
        (dict(cluster=0), "cluster=0"),
        (dict(update=1000), "update=1000 must be a multiple of cluster=16; use 992"),
        (dict(threshold=4), "threshold=4 must be a multiple of cluster=16; use 16"),
        (dict(segment=0), "segment=0"),
        (dict(page=0), "page=0"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory(**arguments)
