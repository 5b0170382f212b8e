"""Laws 1, 2, 8, 9, 10: what a conversation answers and what it keeps."""

import jax.numpy as jnp
import numpy as np

from tests.cases import CASES
from tests.laws.conversation import (
    CHUNK,
    MAX_LEN,
    ODD,
    SLOTS,
    close,
    each,
    equal,
    kept,
    oracle,
    programs,
    straight,
    turns,
    words,
)

cases = each()
BASELINE = CASES[0].spec  # keeps and reads everything


@cases
def test_law_1_a_budget_that_is_never_reached_changes_nothing(case):
    p = programs(case.wide)
    p.prepare(("prefill", CHUNK), ("decode", 1))
    logits, _ = p.run(p.cache(), 1, turns())
    assert close(logits, straight(BASELINE)[0])


@cases
def test_law_1_the_same_program_on_the_same_input_gives_the_same_bits(case):
    p = programs(case.spec)
    logits, _ = straight(case.spec)
    again, cache = p.run(p.cache(), 1, turns())
    assert equal(logits, again)
    assert equal(cache, p.run(p.cache(), 1, turns())[1])


@cases
def test_law_2_kept_sets_and_logits_equal_the_oracle(case):
    """The oracle (float64 numpy) also says what a seal or trim leaves (law 8). Logits: 2e-4 of the largest."""
    logits, held = straight(case.spec)
    reference, step = oracle(case.spec), 0
    for kind, ids in turns():
        for part in [ids] if kind == "prompt" else [[token] for token in ids]:
            expected = reference.run(part, kind == "prompt")[-1]
            assert held[step] == [layer.kept for layer in reference.layers], f"step {step}, {kind}"
            assert close(logits[step], expected, 2e-4), f"step {step}, {kind}: {np.abs(logits[step] - expected).max()}"
            step += 1


@cases
def test_law_8_rows_fit_and_nothing_is_dropped_silently(case):
    p, length = programs(case.spec), 0
    capacity = [method.run(MAX_LEN) for _, method in p.cache().layers]
    _, cache = p.run(p.cache(), 1, turns())
    for state in cache.states:
        assert not np.any(state.rows.get("dropped", 0))
    lengths = [n for kind, ids in turns() for n in ([len(ids)] if kind == "prompt" else [1] * len(ids))]
    for count, held in zip(lengths, straight(case.spec)[1], strict=True):
        length += count
        for layer, rows in zip(held, capacity, strict=True):
            assert all(len(h) <= rows and len({*h}) == len(h) and max(h, default=0) < length for h in layer)


@each([case for case in CASES if not case.chunked])
def test_law_9_chunk_size_changes_nothing_where_none_compacts_between_chunks(case):
    p, held = programs(case.spec), []
    p.prepare(("prefill", ODD), ("decode", 1))
    logits, _ = p.run(p.cache(), 1, turns(), chunk=ODD, after=lambda cache: held.append(kept(cache, 1)))
    assert close(logits, straight(case.spec)[0])
    assert tuple(held) == straight(case.spec)[1]


def permuted(cache, seed=0):
    """The same empty cache with every page somewhere else."""
    rng = np.random.default_rng(seed)
    return cache.replace(tables=tuple(jnp.asarray(rng.permutation(t.size).astype(np.int32).reshape(t.shape)) for t in cache.tables))


@cases
def test_law_10_neighbours_rows_slots_and_pages_do_not_matter(case):
    p = programs(case.spec)
    alone, _ = p.run(p.cache(), 1, turns(), row=0)
    cache = permuted(p.cache())
    others = {0: words(1), 1: words(2), 2: words(3)}
    for slot, ids in others.items():
        _, cache = p.prefill(cache, ids[0], slot)
    crowded, at = [], 0
    for turn, (kind, ids) in enumerate(turns()):
        if kind == "prompt":
            logits, cache = p.prefill(cache, ids, 3)
            crowded.append(logits)
            continue
        for i, token in enumerate(ids):
            near = [others[slot][turn][i] for slot in others]
            logits, cache = p.decode(cache, [near[1], near[0], token, near[2]], [1, 0, 3, 2 if at % 3 else SLOTS])
            crowded.append(logits[2])
            at += 1
    assert equal(alone, np.stack(crowded))
    # Across buckets: another program, so another rounding.
    single, _ = straight(case.spec)
    assert close(single, alone)
    for a, b in zip(single, alone, strict=True):
        top = np.sort(a)[-2:]
        assert a.argmax() == b.argmax() or top[1] - top[0] < 1e-4 * max(1.0, np.abs(a).max())
