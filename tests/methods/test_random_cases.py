"""Random conversations in one layer of every evicting method: after each prompt and each decoded token the kept sets equal the oracle's.

One program a method runs two turns of any length in chunks of any size: prompts of one token, shorter than the observation window,
shorter than the budget; grouped query heads; keys and queries that are copies of others (ties).
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from sejax import methods
from sejax.kernels.attention import attention
from sejax.types import Qkv, Rows
from tests.cases import CASES
from tests.methods.handmade import QUICK, spec_of
from tests.oracles.transformer import New

HEADS, GROUP, DIM, LAYERS = 2, 2, 4, 2
PROMPT, ANSWER, TURNS = 24, 7, 2  # most tokens of each
CHUNKS = (1, 5, PROMPT)
EXAMPLES = 200
SUMS_DIFFER = ("rkv", "pooling=avg", "chunk=")  # a copy sums the same terms in another order: equal in mathematics only, so no copies
TWO_TIE = "keydiff:ratio"  # two keys are equally unlike their mean, again up to rounding: where one of two must go, begin with three


def evicting(case):
    """Methods that keep less and fill a stage; the others have their own random cases."""
    if "+" in case.spec or case.chunked:
        return False
    method = methods.method(case.spec)
    return method.order == "layer" and method.parts is not None and "retention" in method.parts.traits


ALL = [pytest.param(case.spec, id=case.spec.replace(":", "-"), marks=[pytest.mark.slow] * case.variant) for case in CASES if evicting(case)]


@functools.cache
def conversation(spec):
    """jitted (q, q_raw, k, v [TURNS,PROMPT+ANSWER,...], prompts, answers i32[TURNS], chunk) -> positions held after each event:
    i32[TURNS,1+ANSWER,H,C]. A prompt's tokens lie at [:PROMPT] of its turn, padded behind; an answer's behind PROMPT."""
    method = methods.method(spec)
    layer = method.layer(spec_of(HEADS, GROUP, DIM, 0, LAYERS, TURNS * (PROMPT + ANSWER)), None)
    width, staged = layer.pages(layer.run(TURNS * (PROMPT + ANSWER))), layer.pages(layer.stage_run(PROMPT))
    one = jnp.ones(1, jnp.int32)
    table = jnp.arange(2 * width, dtype=jnp.int32).reshape(2, width)[::-1][1:]  # slot 1 of 2

    def rows(start, count, turn=None):
        return Rows(one, one * start, one * count, table, jnp.zeros((1, 1), jnp.int32), turn)

    def part(tokens, first, count):
        """Qkv of `count` tokens from `first` on."""
        q, q_raw, k, v = (lax.dynamic_slice_in_dim(x, first, count)[None] for x in tokens)
        return Qkv(q, k, v, q_raw, k)

    def prompt(state, tokens, start, total, chunk):
        turn = jnp.stack([start, start + total])[None]
        padded = [jnp.pad(x[:PROMPT], [(0, PROMPT)] + [(0, 0)] * (x.ndim - 1)) for x in tokens]
        on_stage = lambda r: r._replace(slot=r.slot * 0, table=jnp.arange(staged, dtype=jnp.int32)[None])  # noqa: E731

        def step(i, stage):
            old = rows(start + i * chunk, jnp.minimum(chunk, total - i * chunk), turn)
            qkv, at = part(padded, i * chunk, PROMPT), on_stage(old)
            stage = layer.prefill.write(stage, qkv, at)
            views, carry = layer.prefill.before_attention(stage, qkv, None, at)
            seen = attention(qkv.q, (*layer.history(state, qkv, old), *views), at.count)
            return layer.prefill.after_attention(stage, qkv, seen, carry, at)[0]

        stage = lax.fori_loop(0, -(-total // chunk), step, layer.prefill.init(1, staged))
        whole = rows(start, total, turn)
        return layer.seal(stage, state, on_stage(whole), whole, whole)

    def turn(carry, xs):
        (state, start), (tokens, total, answer, chunk) = carry, xs
        state = prompt(state, tokens, start, total, chunk)
        first = layer.held(state, rows(start + total, 0))[0]

        def token(state, i):
            now, qkv = rows(start + total + i, (i < answer).astype(jnp.int32)), part(tokens, PROMPT + i, 1)
            state = layer.decode.write(state, qkv, now)
            views, carry = layer.decode.before_attention(state, qkv, None, now)
            state, _ = layer.decode.after_attention(state, qkv, attention(qkv.q, views, now.count), carry, now)
            if layer.decode.after_step:
                idle = now._replace(slot=jnp.where(now.count > 0, now.slot, 2))
                state = layer.decode.after_step(state, idle)
            return state, layer.held(state, now)[0]

        state, later = lax.scan(token, state, jnp.arange(ANSWER, dtype=jnp.int32))
        return (state, start + total + answer), jnp.concatenate([first[None], later])

    def run(q, q_raw, k, v, prompts, answers, chunk):
        state = layer.decode.init(2, 2 * width)
        xs = ((q, q_raw, k, v), prompts, answers, jnp.broadcast_to(chunk, prompts.shape))
        return lax.scan(turn, (state, jnp.int32(0)), xs)[1]

    return jax.jit(run, compiler_options=QUICK)


@functools.cache
def oracle_of(spec):
    method = methods.method(spec)
    arguments = dict(method.arguments)
    arguments["heads_mode"] = arguments.pop("heads", "each")
    return importlib.import_module(f"tests.oracles.{method.name}").Oracle, arguments


def drawn(seed, ties):
    """q, q_raw [TURNS,N,H,G,D], k, v [TURNS,N,H,D]; ties: most tokens are copies of a few others."""
    rng, size = np.random.default_rng(seed), PROMPT + ANSWER
    shapes = ((HEADS, GROUP, DIM), (HEADS, GROUP, DIM), (HEADS, DIM), (HEADS, DIM))
    q, q_raw, k, v = (rng.standard_normal((TURNS, size, *shape)).astype(np.float32) for shape in shapes)
    if ties:
        at = rng.integers(0, 4, (TURNS, size))
        k, v = (np.take_along_axis(x, at[..., None, None], axis=1) for x in (k, v))
    return q, q_raw, k, v


@pytest.mark.parametrize("spec", ALL)
def test_kept_sets_equal_the_oracle(spec):
    run, (layer, arguments) = conversation(spec), oracle_of(spec)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(1, PROMPT), min_size=TURNS, max_size=TURNS),
        st.lists(st.integers(0, ANSWER), min_size=TURNS, max_size=TURNS),
        st.sampled_from(CHUNKS),
        st.booleans(),
    )
    def check(seed, prompts, answers, chunk, ties):
        tokens = drawn(seed, ties and not any(part in spec for part in SUMS_DIFFER))
        prompts = [max(prompts[0], 3 if spec.startswith(TWO_TIE) else 1), *prompts[1:]]
        held = np.asarray(run(*tokens, np.asarray(prompts, np.int32), np.asarray(answers, np.int32), np.int32(chunk)))
        reference, start = layer(0, LAYERS, HEADS, **arguments), 0
        for turn in range(TURNS):
            q, q_raw, k, v = (x[turn].astype(np.float64) for x in tokens)
            parts = [(0, prompts[turn]), *((PROMPT + i, 1) for i in range(answers[turn]))]
            for event, (first, count) in enumerate(parts):
                at = slice(first, first + count)
                new = New(q[at], k[at], v[at], q_raw[at], k[at], start + np.arange(count))
                reference.token(new) if event else reference.prompt(new)
                start += count
                found = [sorted(p for p in head if p >= 0) for head in held[turn, event].tolist()]
                assert found == reference.kept, f"turn {turn}, event {event}"

    check()
