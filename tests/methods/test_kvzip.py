"""KVzip: the vectors, whole prompts and score tables against the oracle, replays without a trace, pages after the seal."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sejax
from sejax import functional, methods
from sejax.methods import kvzip as factory
from sejax.methods.kvzip import context_of, passes, probability, split
from sejax.types import Qkv, Rows
from tests.methods.handmade import QUICK, spec_of, vectors
from tests.models.tiny import tiny_model
from tests.oracles.kvzip import Oracle, chunk_scores, inputs, pair_mask, uniform_mask
from tests.oracles.transformer import Transformer
from tests.serve.fake import FakeTokenizer

CASES = vectors("kvzip")
MODEL = tiny_model()
LAYERS, HEADS, LONGEST = 2, 2, 24
f32 = functools.partial(jnp.asarray, dtype=jnp.float32)


def test_scores_of_two_chunks():
    params, given_, expected = (CASES["scores_two_chunks_gqa"][name] for name in ("params", "inputs", "expected"))
    chunk, found = params["chunk"], []
    for i, q in enumerate(given_["q_repeat"]):
        context = given_["k_context"][:, i * chunk : (i + 1) * chunk]
        keys = f32(np.concatenate([given_["k_system"], context, given_["k_repeat"][i]], axis=1))[None]
        heads, group = len(context), len(q) // len(context)
        q = jnp.moveaxis(f32(q).reshape(1, heads, group, -1, q.shape[-1]), 3, 1)
        system = given_["k_system"].shape[1]
        real = jnp.ones((1, system + chunk), bool)
        found.append(probability(q, keys, slice(system, system + chunk), real, jnp.full(1, q.shape[1]))[0])
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected["score"], atol=1e-5)


class Table:
    """The real joint and seals over scores that are given: a model of L layers, H heads, one sequence in slot 1 of 2."""

    def __init__(self, method, layers, heads, longest):
        self.method, self.heads = method, heads
        specs = [spec_of(heads, 1, 2, i, layers) for i in range(layers)]
        self.layers = [method.layer(spec, None) for spec in specs]
        width = self.layers[0].pages(self.layers[0].run(longest))
        self.table, self.longest, self.page = jnp.arange(width, dtype=jnp.int32)[None] + width, longest, self.layers[0].page
        self.run = jax.jit(self._run, compiler_options=QUICK)

    def _rows(self, start, count):
        one = jnp.ones(1, jnp.int32)
        return Rows(one, one * start, one * count, self.table, jnp.zeros((1, 1), jnp.int32))

    def _run(self, scores, count):
        """scores [L,H,longest] in order of position -> positions held a layer, pages used, threshold."""
        rows = self._rows(0, count)
        x = jnp.zeros((1, self.longest, self.heads, 2))
        states = []
        for layer, score in zip(self.layers, scores, strict=True):
            state = layer.prefill.write(layer.decode.init(2, 2 * self.table.shape[1]), Qkv(x[..., None, :], x, x, x[..., None, :], x), rows)
            at = jnp.arange(self.longest)
            where = (self.table[0, at // self.page][:, None], jnp.arange(self.heads), at[:, None] % self.page)
            states.append(state._replace(pages=state.pages | {"score": state.pages["score"].at[where].set(score.T)}))
        joint = (self.method.joint(tuple(states), (rows,) * len(states)),) if self.method.joint else ()
        if self.layers[0].seal:
            states = [layer.seal(state, rows, *joint) for layer, state in zip(self.layers, states, strict=True)]
        held = [layer.held(state, self._rows(count, 0))[0] for layer, state in zip(self.layers, states, strict=True)]
        return jnp.stack(held), jnp.stack([layer.used(s, rows)[0] for layer, s in zip(self.layers, states, strict=True)]), joint

    def stays(self, scores, count=None):
        """scores [L,H,T] -> (bool [L,H,T], pages used, joint)."""
        scores = np.asarray(scores, np.float32)
        padded = np.full((*scores.shape[:2], self.longest), np.nan, np.float32)
        padded[..., : scores.shape[2]] = scores
        held, used, joint = self.run(padded, jnp.int32(scores.shape[2]))
        found = np.zeros(scores.shape, bool)
        for layer, head, at in zip(*np.nonzero(np.asarray(held) >= 0), strict=True):
            found[layer, head, held[layer, head, at]] = True
        return found, np.asarray(used), joint


@functools.cache
def table(layers, heads, **arguments):
    return Table(factory(instruction_ids=(1,), sinks=0, **arguments), layers, heads, LONGEST)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("pair") or n in ("ties_dropped", "ratio_1_keeps_all")])
def test_pair_thresholds(name):
    """The case of ratio 1 has no threshold here: nothing is scored, nothing sealed."""
    case, expected = CASES[name], CASES[name]["expected"]
    scores = case["inputs"]["score_layers_heads_tokens"]
    found, _, joint = table(*scores.shape[:2], ratio=case["params"]["ratio"], page=2).stays(scores)
    np.testing.assert_array_equal(found, expected["valid"])
    if joint:
        np.testing.assert_allclose(np.asarray(joint[0]).view(np.float32), [expected["threshold"]], atol=1e-6)
    if "kept_pairs" in expected:
        assert found.sum() == expected["kept_pairs"]


def test_uniform():
    case = CASES["uniform_ratio_0.5"]
    scores = case["inputs"]["score_layers_heads_tokens"]
    found, *_ = table(*scores.shape[:2], mode="pair-uniform", ratio=0.5, page=2).stays(scores)
    assert [[np.flatnonzero(h).tolist() for h in layer] for layer in found] == case["expected"]["kept"].tolist()


def test_head_level():
    case, expected = CASES["head_level_ratio_0.6"], CASES["head_level_ratio_0.6"]["expected"]
    scores = case["inputs"]["score_layers_heads_tokens"]
    np.testing.assert_allclose(scores.max(-1), expected["head_score"], atol=1e-6)
    method = factory(ratio=0.6, mode="head", scores=tuple(scores.max(-1).reshape(-1).tolist()), sinks=0, page=2)
    given_ = Table(method, 2, 2, LONGEST)
    every = np.broadcast_to(np.float32(scores.max(-1))[..., None], scores.shape)
    found, _, joint = given_.stays(every)
    np.testing.assert_array_equal(found, np.broadcast_to(expected["head_kept"].astype(bool)[..., None], found.shape))
    np.testing.assert_allclose(np.asarray(joint[0]).view(np.float32), [expected["threshold"]], atol=1e-6)


def test_kvpress_pruning():
    case, expected = CASES["kvpress_global_prune_0.4"], CASES["kvpress_global_prune_0.4"]["expected"]
    scores = case["inputs"]["score_layers_heads_tokens"]
    found, *_ = table(*scores.shape[:2], ratio=1 - case["params"]["compression_ratio"], rule="kvpress", page=2).stays(scores)
    np.testing.assert_array_equal(found, expected["valid"])
    assert (~found).sum() == expected["pruned"]


def test_random_score_tables_equal_the_formula():
    """Also: every page that used() does not count is free, and a head's last page is the only one that may be begun."""
    rules = [dict(ratio=0.3), dict(ratio=0.55), dict(ratio=0.4, mode="pair-uniform"), dict(ratio=0.7, rule="kvpress")]

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, LONGEST), st.sampled_from(rules), st.booleans())
    def check(seed, count, rule, ties):
        scores = np.random.default_rng(seed).random((LAYERS, 3, count)).astype(np.float32)
        scores = np.round(scores * 4) / 4 if ties else scores
        found, used, _ = table(LAYERS, 3, page=3, **rule).stays(scores)
        uniform = "mode" in rule
        expected = uniform_mask(scores, rule["ratio"]) if uniform else pair_mask(scores, rule["ratio"], rule.get("rule", "official"))
        np.testing.assert_array_equal(found, expected)
        assert used.tolist() == [-(-sum(-(-n // 3) for n in layer) // 3) for layer in expected.sum(-1).tolist()]

    check()


def test_random_chunks_equal_the_formula():
    run = jax.jit(
        lambda q, keys, real, count: probability(q, keys, slice(2, 9), real, count), compiler_options=QUICK
    )  # two of the system's keys, up to seven of a chunk, five queries of two groups

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(1, 5))
    def check(seed, size, count):
        rng = np.random.default_rng(seed)
        q, keys = 2 * rng.standard_normal((1, 5, 2, 3, 4)), 2 * rng.standard_normal((1, 2, 14, 4))
        real = np.arange(9) < 2 + size
        found = run(f32(q), f32(keys), jnp.asarray(real)[None], jnp.full(1, count))[0]
        for h in range(2):
            system, context, own = keys[0, h, :2], keys[0, h, 2 : 2 + size], keys[0, h, 9 : 9 + count]
            np.testing.assert_allclose(found[h, :size], chunk_scores(q[0, :count, h], system, context, own), atol=1e-5)
        assert not np.any(found[:, size:])

    check()


@functools.cache
def programs(spec):
    """(functional.prefill, functional.decode) of a method, and an empty cache of one slot."""
    method = spec if isinstance(spec, sejax.Method) else sejax.method(spec)
    prefill = jax.jit(functional.prefill, static_argnums=1, static_argnames="chunk", compiler_options=QUICK)
    decode = jax.jit(functional.decode, static_argnums=1, compiler_options=QUICK)
    cache = sejax.init(MODEL, method, 1, 2 * LONGEST)
    take = lambda cache, ids: prefill(  # noqa: E731
        MODEL, method, cache, jnp.asarray([*ids, *[0] * (LONGEST - len(ids))], jnp.int32), 0, jnp.int32(len(ids)), chunk=8
    )
    return take, lambda cache, id: decode(MODEL, method, cache, jnp.asarray([id], jnp.int32), jnp.zeros(1, jnp.int32)), cache


def held(cache):
    return [[[p for p in head if p >= 0] for head in layer.tolist()] for layer in jax.device_get(jitted_kept(cache, 0))]


jitted_kept = jax.jit(functional.kept)


def test_random_conversations_equal_the_oracle():
    """Prompts of 1 token up, chunks of one token, odd, whole; a group of two queries; a decoded token and a second turn."""
    specs = [
        f"kvzip:ratio={ratio},sinks={sinks},chunk={chunk},tail=3,instruction_ids={ids},page=4"
        for ratio, sinks, chunk, ids in (
            (0.4, 2, 1, "(5,6)"),
            (0.3, 0, 5, "(5,6,-1,7,-1,8)"),
            (0.6, 1, 2000, "(9)"),
            (1, 4, 7, "(9)"),
            (0.4, 1, 5, "(5,6,-1,7,-1,8),turn_ids=(3,4)"),
        )
    ]

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), st.integers(1, LONGEST - 8), st.integers(1, 8), st.sampled_from(specs))
    def check(seed, first, second, spec):
        rng = np.random.default_rng(seed)
        (take, step, cache), words = programs(spec), rng.integers(0, 101, first + second + 1).tolist()
        arguments = dict(sejax.method(spec).arguments)
        for at in rng.integers(0, first, rng.integers(0, 4)) if arguments["turn_ids"] else ():
            words[at : at + 2] = [3, 4][: len(words) - at]
        oracle = Transformer(MODEL.params, MODEL.config, [Oracle(i, LAYERS, HEADS, **arguments) for i in range(LAYERS)])
        for kind, ids in (("prompt", words[:first]), ("decode", words[first : first + 1]), ("prompt", words[first + 1 :])):
            logits, cache = take(cache, ids) if kind == "prompt" else step(cache, ids[0])
            expected = oracle.run(ids, kind == "prompt")[-1]
            assert held(cache) == [layer.kept for layer in oracle.layers], kind
            assert np.abs(np.ravel(logits) - expected).max() <= 2e-4 * max(1, np.abs(expected).max())

    check()


def test_a_replay_leaves_no_trace_but_scores():
    """The state after the replays is bit-equal to the one before, but for the scores of the context."""
    method = sejax.method("kvzip:ratio=0.4,sinks=2,chunk=8,tail=3,instruction_ids=(5,6,-1,7,-1,8),page=4")
    unsealed = lambda spec, aux=None: method.layer(spec, aux)._replace(seal=None)  # noqa: E731
    before, after = (
        dataclasses.replace(method, name=name, layer=unsealed, joint=None, passes=again)
        for name, again in (("before", None), ("after", method.passes))
    )
    words = np.random.default_rng(1).integers(0, 101, 21).tolist()
    states = [programs(m)[0](programs(m)[2], words)[1].states for m in (before, after)]
    for plain, scored in zip(*states, strict=True):
        score = np.asarray(scored.pages["score"]).swapaxes(0, 1).reshape(HEADS, -1)
        assert np.isposinf(score[:, :2]).all() and ((score[:, 2:21] > 0) & (score[:, 2:21] <= 1)).all() and not score[:, 21:].any()
        assert np.isposinf(np.asarray(plain.pages["score"]).swapaxes(0, 1).reshape(HEADS, -1)[:, :21]).all()
        for tree in (plain, scored):
            tree.pages.pop("score")
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(scored), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_scores_travel_with_their_rows():
    method = sejax.method("kvzip:ratio=0.5,sinks=2,chunk=6,tail=3,instruction_ids=(5,6),page=4")
    take, step, cache = programs(method)
    words = np.random.default_rng(2).integers(0, 101, 20).tolist()
    _, cache = take(cache, words)
    _, cache = step(cache, 3)
    arguments = dict(method.arguments) | {"ratio": 0.999999}
    oracle = Transformer(MODEL.params, MODEL.config, [Oracle(i, LAYERS, HEADS, **arguments) for i in range(LAYERS)])
    oracle.run(words, True)
    for (spec, layer), state, scores in zip(cache.layers, cache.states, oracle.layers[-1].scores_seen, strict=True):
        rows = functional._slot_rows(cache, spec.index, jnp.int32(0), cache.length[0], jnp.int32(0), jnp.zeros((1, 1), jnp.int32))
        own = {name: leaf[:1] for name, leaf in state.rows.items()}
        placed = layer.held.__self__.placed(own, rows).table[0]
        for h, kept in enumerate(held(cache)[spec.index]):
            at = np.arange(len(kept))
            entry = np.asarray(placed[h])[at // 4]
            found = np.asarray(state.pages["score"])[entry // HEADS, entry % HEADS, at % 4]
            expected = [scores[h, p - 2] if 2 <= p < 20 else np.inf for p in kept]
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_inputs_of_the_passes():
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.integers(1, LONGEST), st.sampled_from([(0, 1), (2, 5), (4, 2000)]), st.sampled_from([(5,), (5, 6, -1, 7), (5, -1, 6, 7, -1, 8)])
    )
    def check(length, sizes, ids):
        tokens = list(range(20, 20 + LONGEST))
        made = maker(*sizes, ids)
        expected = inputs(tokens[:length], *sizes, 3, ids)
        assert max(0, made.number(np.asarray(tokens), length)) == len(expected)
        for index, (wanted, low, high) in enumerate(expected):
            found, count, (first, size) = jax.device_get(made.input(index, jnp.asarray(tokens), jnp.int32(length)))
            assert found[:count].tolist() == wanted and [first, first + size] == [low, high] and len(found) == made.width(LONGEST)

    check()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([9, 9, 9, 9, 9, 9], (2, 6)),  # no user turn: all behind the sinks
        ([9, 9, 9, 3, 4, 9, 9, 9], (5, 7)),  # one: it is the context, but for what asks for the answer
        ([3, 4, 9, 9, 9, 3, 4, 9], (2, 5)),  # from the first to the last
        ([9, 3, 4, 9, 3, 4, 9, 3, 4, 9, 0, 0], (3, 7)),
        ([9, 9, 3, 4, 3, 4, 9], (4, 4)),  # nothing between
        ([3], (2, 1)),
    ],
)
def test_what_stands_between_the_first_and_the_last_user_turn_is_context(tokens, expected):
    length = len(tokens) - tokens.count(0)  # 0: padding
    assert tuple(int(x) for x in context_of(np.asarray(tokens), length, 2, (3, 4), 1)) == expected
    assert tuple(int(x) for x in context_of(jnp.asarray(tokens), jnp.int32(length), 2, (3, 4), 1)) == expected
    assert context_of(np.asarray(tokens), length, 2, (), 1) == (2, length)


@functools.cache
def maker(sinks, chunk, ids):
    made = passes(sinks, chunk, 3, split(ids))
    return made._replace(input=jax.jit(made.input))


def test_the_wording_comes_from_the_tokenizer_and_its_template():
    tokenizer = FakeTokenizer()
    method = factory().fitted(MODEL.replace(tokenizer=tokenizer))
    first, later, end = split(dict(method.arguments)["instruction_ids"])
    assert "Write the whole text" in tokenizer.decode(first) and "from the place" in tokenizer.decode(later)
    assert tokenizer.decode(end) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(dict(method.arguments)["turn_ids"]) == "<|im_start|>user"
    assert method.passes and method == method.fitted(MODEL) and factory(ratio=1).fitted(MODEL) == factory(ratio=1)
    both = sejax.method("kvzip + quest").fitted(MODEL.replace(tokenizer=tokenizer))
    assert both.passes and both.joint and both.order == "chunk" and both.growing
    with pytest.raises(ValueError, match=r"it has no tokenizer: give instruction_ids=\(id,id"):
        sejax.init(MODEL, factory(), 1, 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(ratio=0), "ratio=0 must be above 0"),
        (dict(mode="pairs"), "mode='pairs' must be \"pair\""),
        (dict(mode="head"), "scores go with mode=head, and it needs them"),
        (dict(turn_ids=(3, -1)), r"turn_ids=\(3, -1\) must be ids >= 0"),
        (dict(mode="head", scores=(1, 1, 1, 1), turn_ids=(3,)), 'leave it out for the template\'s, or with mode="head"'),
        (dict(scores=(0.5,)), "scores go with mode=head"),
        (dict(mode="pair-uniform", rule="kvpress"), "a rule over pairs"),
        (dict(chunk=0), "chunk=0 at least 1"),
        (dict(instruction_ids=(1, -2)), "must be ids >= 0"),
        (dict(instruction_ids=(1, -1, 2, -1, 3, -1, 4)), "at most 3 parts"),
        (dict(mode="head", scores=(-0.5,)), "numbers >= 0"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory(**arguments)


def test_head_scores_are_measured_and_read(tmp_path):
    """calibrate, on two texts with two chunks each, equals the oracle's pair scores' maxima; its file makes a method."""
    texts = [np.random.default_rng(seed).integers(0, 101, size).tolist() for seed, size in ((1, 14), (2, 14))]
    measured = methods.calibration("kvzip", chunk="6", sinks="2", tail="3", instruction_ids="(5,6,-1,7)")(trace, [*texts, [1]])
    best = np.zeros((LAYERS, HEADS))
    for text in texts:
        arguments = dict(factory(ratio=0.5, chunk=6, sinks=2, tail=3, instruction_ids=(5, 6, -1, 7)).arguments)
        oracle = Transformer(MODEL.params, MODEL.config, [Oracle(i, LAYERS, HEADS, **arguments) for i in range(LAYERS)])
        oracle.run(text, True)
        best = np.maximum(best, oracle.layers[-1].scores_seen.max(-1))
    np.testing.assert_allclose(measured["scores"], best, atol=1e-5)
    file = tmp_path / "heads.json"
    file.write_text(json.dumps(measured | {"config": MODEL.config.digest}))
    method = factory(mode="head", ratio=0.6, scores=str(file)).fitted(MODEL)
    assert method == factory(mode="head", ratio=0.6, scores=tuple(np.ravel(measured["scores"]).tolist()))
    assert sum(map(len, str(method))) < 200 and method.fit is None
    with pytest.raises(ValueError, match="was made for another model"):
        factory(mode="head", scores=str(file)).fitted(tiny_model(layers=1))
    with pytest.raises(ValueError, match=r"is not a file that can be read \(FileNotFoundError"):
        factory(mode="head", scores=str(tmp_path / "none")).fitted(MODEL)
    with pytest.raises(ValueError, match="longer than the 4 sinks"):
        methods.calibration("kvzip", instruction_ids=(1,))(trace, [[1, 2]])


def trace(ids):
    return functional.trace(MODEL, jnp.asarray(ids, jnp.int32)[None])


def test_scores_must_fit_the_model():
    with pytest.raises(ValueError, match="scores has 3 numbers: a model of 2 layers and 2 kv heads needs 4"):
        sejax.prefill(MODEL, *(lambda m: (m, sejax.init(MODEL, m, 1, 8)))(factory(mode="head", scores=(1.0, 2.0, 3.0))), jnp.arange(4))
