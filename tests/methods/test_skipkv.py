"""SkipKV: the vectors, the sentence table, random sequences against the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sejax
from sejax.methods import skipkv as factory
from sejax.methods.skipkv import Rule, delimiters_of, empty, final, listen, penalty_at, repeated, segment_penalty, token_redundancy
from sejax.types import Qkv, Rows
from tests.methods.handmade import QUICK, spec_of, vectors
from tests.models.tiny import tiny_model
from tests.oracles import skipkv as oracle
from tests.oracles.transformer import New

RULE = Rule(4, 0.0, 1.0, 0.8, 0.95, 64, 32, 4, 256, 8, (9,))
f32 = functools.partial(jnp.asarray, dtype=jnp.float32)


def test_the_sentence_vector():
    case = vectors("skipkv")["sentence_penalty"]
    inputs, expected = case["inputs"], case["expected"]
    mean = f32(inputs["sentence_embeddings_mean_hidden"])
    mean /= jnp.linalg.norm(mean, axis=-1, keepdims=True)
    np.testing.assert_allclose(mean @ mean.T, expected["pairwise_cosine"], atol=1e-5)
    shuffled = np.array([3, 0, 4, 2, 1])  # a ring's entries lie in any order
    first, end = (jnp.asarray(inputs["sentence_spans"][shuffled, i]) for i in range(2))
    repeats = repeated(mean[shuffled][None], first[None], end[None], case["params"]["tau"])
    np.testing.assert_allclose(repeats["penalty"][0], expected["sentence_redundancy"], atol=1e-5)
    told = penalty_at(repeats, jnp.arange(26)[None, None])
    zero, nowhere = jnp.zeros((1, 1, 0)), jnp.zeros((1, 1, 0), jnp.int32)
    found = final(f32(inputs["importance"])[None, None], told, zero, zero, nowhere, RULE)[0, 0]
    np.testing.assert_allclose(found[4:20], expected["final_score_candidates"], atol=1e-5)
    kept = {0, 1, 2, 3, *range(20, 26), *(4 + np.argsort(-np.asarray(found[4:20]), kind="stable")[:6]).tolist()}
    assert sorted(kept) == expected["kept"].tolist()


def test_the_segment_vector():
    case = vectors("skipkv")["segment_penalty_fallback"]
    keys = f32(np.moveaxis(case["inputs"]["window_keys"], 1, 0))[None]
    found = segment_penalty(keys, jnp.ones((1, 1, 8), bool), case["params"]["segment_size"], case["params"]["tau"])[0, 0]
    np.testing.assert_allclose(found, case["expected"]["token_penalty"], atol=1e-5)
    np.testing.assert_allclose(found[::2], case["expected"]["segment_penalty"], atol=1e-5)


def test_the_existing_systems_importance_and_token_redundancy():
    """rkv's vector `sparse_vllm_shared`: one set for all heads, so its keys are joined and its importance is the largest of all heads."""
    case = vectors("rkv")["sparse_vllm_shared"]
    q, k, expected = case["inputs"]["q"], case["inputs"]["k"], case["expected"]
    joined = f32(np.concatenate(list(k), axis=-1))[None, None, 1:6]
    found = token_redundancy(joined, jnp.ones((1, 1, 5), bool), case["params"]["threshold"])
    np.testing.assert_allclose(found[0, 0], expected["redundancy"], atol=1e-5)
    queries = np.moveaxis(q.reshape(2, 2, 8, 2)[:, :, 6:], 2, 1)
    np.testing.assert_allclose(
        np.max([oracle.importance(*x) for x in zip(queries, k[:, 1:6], strict=True)], 0), expected["importance"], atol=1e-5
    )


HEADS, GROUP, DIM, HIDDEN, WIDTH, LONGEST = 2, 2, 4, 6, 16, 48
ARGUMENTS = dict(budget=8, sinks=1, window=3, near=4, segment=2, shortest=2, longest=7, sentences=4)
ARGUMENTS |= dict(threshold=0.6, tau=0.9, alpha=0.2, delimiters=(0, 1), period=3, page=4)


def padded(x, dtype=np.float32):
    """[T,...] -> [1,WIDTH,...]."""
    x = np.asarray(x, dtype)
    return np.pad(x, [(0, WIDTH - len(x)), *[(0, 0)] * (x.ndim - 1)])[None]


class Driven:
    """The one layer of a model of one layer, slot 1 of 2: prompts chunk by chunk, tokens, as the engine calls the hooks."""

    def __init__(self):
        self.method = factory(**ARGUMENTS)
        self.layer = self.method.layer(dataclasses.replace(spec_of(HEADS, GROUP, DIM), hidden=HIDDEN), None)
        width = self.layer.pages(self.layer.run(LONGEST))
        self.table = np.arange(2 * width, dtype=np.int32).reshape(2, width)[::-1]
        self.start = self.layer.decode.init(2, 2 * width)
        steps = (self._written, self._sealed, self._trimmed, self.layer.held)
        self._write, self._seal, self._trim, self._held = (jax.jit(f, compiler_options=QUICK) for f in steps)

    def _written(self, state, qkv, hidden, rows):
        state = self.layer.prefill.write(state, qkv, rows)
        return self.layer.prefill.after_layer(state, hidden, None, rows)[0]

    def _sealed(self, state, rows):
        return self.layer.seal(state, rows, self.method.joint((state,), (rows,)))

    def _trimmed(self, state, rows):
        return self.layer.decode.after_step(state, rows, self.method.joint((state,), (rows,)))

    def rows(self, start, count, tokens):
        one = lambda n: np.full(1, n, np.int32)  # noqa: E731
        return Rows(one(1), one(start), one(count), self.table[1:], padded(tokens, np.int32))

    def write(self, state, new, tokens, hidden, size):
        """Calls of at most `size` tokens."""
        start = int(new.pos[0])
        for at in range(0, len(tokens), size):
            part = slice(at, min(at + size, len(tokens)))
            qkv = Qkv(*(padded(x[part]) for x in (new.q, new.k, new.v, new.q_raw, new.k_raw)))
            state = self._write(state, qkv, padded(hidden[part]), self.rows(start + at, part.stop - at, tokens[part]))
        return state

    def prompt(self, state, new, tokens, hidden, size):
        return self._seal(self.write(state, new, tokens, hidden, size), self.rows(int(new.pos[0]), len(tokens), []))

    def token(self, state, new, tokens, hidden):
        return self._trim(self.write(state, new, tokens, hidden, 1), self.rows(int(new.pos[0]), 1, []))

    def kept(self, state):
        held = np.asarray(self._held(state, self.rows(0, 0, []))[0])
        return [sorted(p for p in head if p >= 0) for head in held.tolist()]


class Careful(oracle.Oracle):
    """Knows how close a decision was: `gap` between the best score dropped and the worst kept, where they are not equal."""

    gap = np.inf

    def joined(self, scores):
        for score in scores:
            best = np.sort(score)[::-1]
            if len(best) > self.budget and best[self.budget - 1] != best[self.budget]:
                self.gap = min(self.gap, best[self.budget - 1] - best[self.budget])
        return scores


def talk(rng, count, start, ties):
    """New tokens that repeat few sentences: (New, ids, hidden states)."""
    ids = rng.integers(0, 7, count)
    meant = np.eye(3, HIDDEN)[np.cumsum(ids < 2) % 3] * 2
    hidden = meant + 0.15 * rng.standard_normal((count, HIDDEN))
    q, k = rng.standard_normal((count, HEADS, GROUP, DIM)), rng.standard_normal((count, HEADS, DIM))
    k = np.zeros_like(k) if ties else np.where(rng.random((count, 1, 1)) < 0.4, k[:1], k)
    q, k, hidden = (x.astype(np.float32).astype(np.float64) for x in (q, k, hidden))
    return New(q, k, k, q, k, start + np.arange(count)), ids.tolist(), hidden


def test_random_conversations_keep_what_the_oracle_keeps(monkeypatch):
    """Two turns: prompts of one token, shorter than the window or the budget, in chunks of 1, 3 or as a whole; equal scores."""
    driven, near, seen, cosines = Driven(), [], {"sentences": 0, "segments": 0}, oracle.cosines

    def noted(x):
        like = cosines(x)
        near.append(min(np.abs(like - limit).min() for limit in (ARGUMENTS["threshold"], ARGUMENTS["tau"])))
        return like

    monkeypatch.setattr(oracle, "cosines", noted)
    length = st.one_of(st.integers(1, 4), st.integers(1, WIDTH))

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.integers(0, 2**32 - 1), length, st.integers(0, 7), length, st.integers(0, 4), st.sampled_from([1, 3, WIDTH]), st.booleans())
    def check(seed, first, decoded, second, more, chunk, ties):
        rng, state, layer, start = np.random.default_rng(seed), driven.start, Careful(0, 1, HEADS, **dict(driven.method.arguments)), 0
        near.clear()
        for count, prompt in [(first, True), *[(1, False)] * decoded, (second, True), *[(1, False)] * more]:
            new, ids, hidden = talk(rng, count, start, ties)
            start += count
            layer.add(new)
            (layer.seal if prompt else layer.trim)(new)
            layer.finish([layer], ids, hidden, prompt)
            assume(layer.gap > 1e-5 and min(near, default=1) > 1e-6)  # else rounding decides
            state = driven.prompt(state, new, ids, hidden, chunk) if prompt else driven.token(state, new, ids, hidden)
            assert driven.kept(state) == layer.kept
            if prompt:  # what a first prompt's seal leaves empty goes back to the pool
                pages = driven.layer.used(state, driven.rows(0, 0, []))
                assert pages.tolist() == [-(-max(map(len, layer.kept)) // ARGUMENTS["page"])]
            seen["sentences" if any(layer.penalty.values()) else "segments"] += 1

    check()
    assert min(seen.values()) > 200


def test_the_table_is_that_of_the_whole_history():
    """Sentences over the edges of calls, more in one call than the table holds, too short, too long; an idle row stays bit-equal."""
    rule = RULE._replace(shortest=2, longest=9, sentences=5, delimiters=(0, 1))
    run = jax.jit(lambda table, hidden, rows: listen(table, hidden, rows, rule))
    for seed in range(20):
        rng, told, hidden, table = np.random.default_rng(seed), [], [], empty(2, 5, HIDDEN, jnp.float32)
        for count in (7, 1, 0, WIDTH, 2, 1, 13):
            new, ids = rng.standard_normal((1, WIDTH, HIDDEN)), rng.integers(0, 5 if seed % 2 else 12, (1, WIDTH))
            at = lambda n: jnp.full(1, n, jnp.int32)  # noqa: E731
            before = table
            table = run(table, f32(new), Rows(at(1), at(len(told)), at(count), at(0)[None], jnp.asarray(ids, jnp.int32)))
            told, hidden = told + ids[0, :count].tolist(), [*hidden, *new[0, :count]]
            if not count:
                assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, table))
        spans = oracle.spans(told, (0, 1), 2, 9)
        assert int(table["ended"][1]) == len(spans) and not any(np.any(leaf[0]) for leaf in table.values())
        for number, (first, end) in list(enumerate(spans))[-5:]:
            mean = np.mean(hidden[first:end], axis=0)
            assert (int(table["first"][1, number % 5]), int(table["end"][1, number % 5])) == (first, end)
            np.testing.assert_allclose(table["mean"][1, number % 5], mean / np.linalg.norm(mean), atol=1e-5)


def test_delimiters_come_from_the_tokenizer():
    texts = [b"a", b".", b"\n", b".\n", b")\n\n", b"a.\n", b" \n", b";\n", b"?\n", b".\n ", b"\xe3\x80\x82\n", b""]
    tokenizer = type("Text", (), {"vocab_size": len(texts), "token_bytes": lambda self, i: texts[i]})()
    assert delimiters_of(tokenizer) == (2, 3, 4, 6, 8, 10)
    model = tiny_model(layers=1).replace(tokenizer=tokenizer)
    method = factory(budget=16, window=2)
    cache = sejax.init(model, method, 1, 32)
    assert cache.method == factory(budget=16, window=2, delimiters=(2, 3, 4, 6, 8, 10))
    logits, after = sejax.prefill(model, method, cache, np.arange(20)[::-1], 0)  # the method as it was written goes with the cache
    assert np.isfinite(logits).all() and int(after.states[0].rows["table"]["ended"][0]) == 1
    with pytest.raises(ValueError, match="skipkv with omnikv: kept sets differ by layer and head"):
        sejax.method("skipkv + omnikv")
    both = sejax.method("skipkv:budget=64 + quest:budget=32").fitted(model)
    assert dict(both.arguments)["skipkv.delimiters"] == (2, 3, 4, 6, 8, 10)


def test_what_all_layers_share_needs_all_of_them_unsealed():
    with pytest.raises(ValueError, match="need all layers unsealed"):
        dataclasses.replace(factory(delimiters=(1,)), order="layer")


def test_without_a_tokenizer_delimiters_must_be_given():
    with pytest.raises(ValueError, match="delimiters must be given"):
        sejax.init(tiny_model(layers=1), factory(), 1, 32)
    with pytest.raises(ValueError, match="delimiters must be given"):
        factory().layer(spec_of(1, 1, 2), None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(budget=12), "budget=12 leaves nothing beside window=8 and sinks=4"),
        (dict(window=0), "window=0 at least 1"),
        (dict(tau=0), "tau=0 are cosines"),
        (dict(shortest=9, longest=8), "shortest=9 must be at least 1 and at most longest=8"),
        (dict(delimiters=()), "delimiters=\\(\\) is empty"),
        (dict(near=0), "near=0"),
        (dict(sentences=0), "sentences=0"),
        (dict(period=-1), "period=-1"),
        (dict(budget=20, ratio=0.5), "both given"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory(**arguments)
