"""Laws 3, 4, 5, 6, 7: what happens to the state of sessions."""

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from sejax import functional, step
from sejax.types import Qkv, Rows
from tests.laws.conversation import (
    CHUNK,
    MAX_LEN,
    PRIMARY,
    QUICK,
    SLOTS,
    copy,
    each,
    equal,
    kept,
    model,
    programs,
    put,
    straight,
    take,
    turns,
    words,
)

cases = each()
HALF = 4  # turns before the session is moved


@cases
def test_law_3_programs_donate_and_copy_no_pool(case):
    p = programs(case.spec)
    p.prepare(("prefill", CHUNK), ("decode", 1), ("decode", SLOTS))
    before = p.cache()
    _, after = p.prefill(before, words()[0], 1)
    assert all(leaf.is_deleted() for state in before.states for leaf in jax.tree.leaves(state))
    for slots in ([1], [1, SLOTS, 0, SLOTS]):
        before, tokens = after, [5] * len(slots)
        _, after = p.decode(before, tokens, slots)
        assert all(leaf.is_deleted() for state in before.states for leaf in jax.tree.leaves(state))
    pools = {f"{_hlo(leaf)}" for state in after.states for leaf in jax.tree.leaves(state.pages)}
    for key, compiled in p.compiled.items():
        copied = [s for s in re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", compiled.as_text()) if s in pools]
        assert not copied, f"{key} copies {copied}"


def _hlo(leaf):
    kind = {"float32": "f32", "int32": "s32", "bool": "pred", "uint8": "u8"}[str(leaf.dtype)]
    return f"{kind}[{','.join(map(str, leaf.shape))}]"


@cases
def test_law_3_decode_needs_the_same_temporary_memory_for_any_pool(case):
    p = programs(case.spec)
    small, large = (p.program("decode", 1, slots).memory_analysis().temp_size_in_bytes for slots in (SLOTS, 3 * SLOTS))
    if large > small + 1024:  # XLA may pack the same buffers with wider gaps (skipkv on a card: 4 KB): then it is the buffers that count
        small, large = (sum(temporaries(p.lower("decode", 1, slots))) for slots in (SLOTS, 3 * SLOTS))
    assert 0 < large <= small + 1024, f"{small} bytes at {SLOTS} slots, {large} at {3 * SLOTS}"


def temporaries(lowered):
    """Sizes in bytes of the buffers that a compiled program packs into its temporary memory, ascending."""
    with tempfile.TemporaryDirectory() as place:
        lowered.compile(QUICK | {"xla_dump_to": place, "xla_dump_hlo_as_text": True})
        (said,) = Path(place).glob("*-buffer-assignment.txt")
        allocations = re.split(r"^allocation \d+: ", said.read_text(), flags=re.MULTILINE)
    packed = "".join(text for text in allocations if "preallocated-temp" in text.split("\n")[0])
    return sorted(int(size) for size in re.findall(r"^ value: .*\(size=(\d+),offset=", packed, re.MULTILINE))


def test_law_3_sees_the_buffers_that_a_program_packs():
    def run(pool, size):
        return jnp.sin(pool[:size]) @ pool[:size].T + jnp.sort(pool, axis=0).sum()  # the sort copies its pool

    small, large = (temporaries(jax.jit(run, static_argnums=1).lower(jnp.ones((n, 64)), 64)) for n in (128, 384))
    assert 128 * 64 * 4 in small and 384 * 64 * 4 in large and small != large
    assert small == temporaries(jax.jit(run, static_argnums=1).lower(jnp.zeros((128, 64)), 64))


@cases
def test_law_4_nothing_compiles_after_warm_up(case):
    p, found = programs(case.spec), []
    straight(case.spec)
    kept(put(p.method)(p.cache(), 0, take(p.method)(p.cache(), 1)), 1)

    def listen(event, seconds, **_):
        if "compile" in event:
            found.append(event)

    cache = p.cache()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        _, cache = p.run(cache, 2, turns(7))
        cache = put(p.method)(cache, 0, take(p.method)(cache, 2))
        p.run(cache, 0, [("decode", [3])], row=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not found


@cases
def test_law_5_a_session_continues_in_another_slot_and_through_the_host(case):
    p = programs(case.spec)
    _, cache = p.run(p.cache(), 1, turns()[:HALF])
    session = take(p.method)(cache, 1)
    on_host = jax.device_get(session)
    expected, _ = p.run(copy(cache), 1, turns()[HALF:])
    for slot, seed in ((1, 4), (2, 5)):
        _, cache = p.run(cache, slot, turns(seed)[:3])
    for moved in (session, on_host):
        there = put(p.method)(copy(cache), 2, moved)
        assert equal(expected, p.run(there, 2, turns()[HALF:])[0])


@pytest.fixture
def child(tmp_path):
    """Environment of another process. On a card it finds this one's compiled programs: each process tunes the ones it compiles itself."""
    if jax.default_backend() == "cpu":
        yield dict(os.environ)
        return
    named = {"compilation_cache_dir": str(tmp_path / "compiled"), "persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, f"jax_{name}") for name in named}
    programs.cache_clear()
    for name, value in named.items():
        jax.config.update(f"jax_{name}", value)
    yield os.environ | {f"JAX_{name.upper()}": str(value) for name, value in named.items()}
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)


def test_law_5_a_new_process_continues_bit_equal(tmp_path, child):
    """One child for all cases: it has the sessions' leaves and the code, nothing else."""
    expected = {}
    for i, case in enumerate(PRIMARY):
        p = programs(case.spec)
        _, cache = p.run(p.cache(), 1, turns()[:HALF])
        session = take(p.method)(cache, 1)
        np.savez(tmp_path / f"{i}.npz", *map(np.asarray, jax.tree.leaves(session)))
        expected[i], _ = p.run(cache, 1, turns()[5:6])
    root = functional.__file__.split("/sejax/")[0]
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True, timeout=280, cwd=root, env=child)
    for i, logits in expected.items():
        assert equal(logits, np.load(tmp_path / f"out{i}.npy")), PRIMARY[i].spec


CHILD = """
import sys, jax, numpy as np
from tests.laws.conversation import PRIMARY, programs, put, take, turns
for i, case in enumerate(PRIMARY):
    p = programs(case.spec)
    leaves = np.load(f"{sys.argv[1]}/{i}.npz")
    tree = jax.tree.structure(take(p.method)(p.cache(), 0))
    session = jax.tree.unflatten(tree, [leaves[f"arr_{n}"] for n in range(tree.num_leaves)])
    logits, _ = p.run(put(p.method)(p.cache(), 3, session), 3, turns()[5:6])
    np.save(f"{sys.argv[1]}/out{i}.npy", logits)
"""


@cases
def test_law_6_other_rows_stay_bit_equal(case):
    p, cache = programs(case.spec), programs(case.spec).cache()
    for slot in range(SLOTS):
        _, cache = p.prefill(cache, words(slot)[0], slot)
    look = take(p.method)
    before = [look(cache, slot) for slot in range(SLOTS)]
    for token in range(9):  # enough to trim
        logits, cache = p.decode(cache, [token, 7, token, 7], [2, SLOTS, 0, SLOTS + 5])
        assert np.isfinite(logits[[0, 2]]).all()
    _, cache = p.prefill(cache, words()[4], 2)
    assert all(equal(before[slot], look(cache, slot)) for slot in (1, 3))
    before = [look(cache, slot) for slot in range(SLOTS)]
    logits, cache = p.prefill(cache, [], 1)  # a turn of nothing
    assert np.isnan(logits).all()
    cache = cache.replace(length=cache.length.at[3].set(MAX_LEN))
    logits, cache = p.decode(cache, [1], [3])  # a full row
    assert np.isnan(logits).all()
    logits, cache = p.prefill(cache, words()[0], 3)
    assert np.isnan(logits).all()
    after = [look(cache, slot) for slot in range(SLOTS)]
    assert equal([s.pages for s in before], [s.pages for s in after])
    assert equal([s.rows for s in before], [s.rows for s in after])


@cases
def test_law_7_hooks_keep_tree_shapes_and_types(case):
    p, config = programs(case.spec), model().config
    cache, carries = p.cache(), {CHUNK: None, 1: None}
    for (spec, method), state, table in zip(cache.layers, cache.states, cache.layer_tables, strict=True):
        assert jax.eval_shape(lambda m=method, t=table: m.decode.init(SLOTS, t.size)) == jax.eval_shape(lambda s=state: s)
        stage = jax.eval_shape(lambda m=method: m.prefill.init(1, m.pages(m.stage_run(TURN_ROWS))))
        in_place = p.method.order == "chunk"
        one = jnp.zeros(1, jnp.int32)
        rows = Rows(one, one, one, table[:1], jnp.zeros((1, CHUNK), jnp.int32))
        for hooks, given, new in ((method.prefill, state if in_place else stage, CHUNK), (method.decode, state, 1)):
            x = jnp.zeros((1, new, config.hidden_size), model().dtype)

            def through(s, x, carry, rows=rows, hooks=hooks, spec=spec):
                weights = model().params["layers"][spec.index]
                return step.run_layer(weights, config, spec, hooks, s, x, carry, rows)

            hidden, out, carries[new] = jax.eval_shape(through, given, x, carries[new])
            assert out == jax.eval_shape(lambda s: s, given) and hidden.shape == x.shape and hidden.dtype == x.dtype
            q = jnp.zeros((1, new, spec.heads, spec.group, spec.head_dim), spec.dtype)
            k = jnp.zeros((1, new, spec.heads, spec.head_dim), spec.dtype)
            written = jax.eval_shape(lambda s, h=hooks, r=rows: h.write(s, Qkv(q, k, k, q, k), r), given)  # noqa: B023
            assert written == jax.eval_shape(lambda s: s, given)
        joint = step.joined(p.method, cache.states, cache.layer_tables, rows)
        same = [(method.decode.after_step, joint), (method.truncate, ()), (method.seal if in_place else None, joint)]
        for hook, more in same:
            if hook:
                assert jax.eval_shape(lambda s, f=hook, r=rows, m=more: f(s, r, *m), state) == jax.eval_shape(lambda s: s, state)
        if not in_place:
            sealed = jax.eval_shape(functools.partial(_seal, method, rows), stage, state)
            assert sealed == jax.eval_shape(lambda s: s, state)


def _seal(method, rows, stage, state):
    return method.seal(stage, state, rows, rows, rows)


TURN_ROWS = 2 * CHUNK
