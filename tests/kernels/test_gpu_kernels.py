"""Every card kernel against its reference: interpreted on small shapes, lowered for CUDA, and (marked gpu) on the card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import attention, gpu_attend, gpu_mass, gpu_pages, gpu_prefill, pages, tuned
from sejax.kernels.launch import on_gpu
from sejax.kernels.shapes import CARD, DECODE, SMALL, Listing, listing

TINY = tuned.Attend(block=16, programs=5)


@pytest.fixture(autouse=True)
def quick_compile(request):
    """Interpreted kernels are large programs that run once: compiling them is the whole cost."""
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("gpu") is None)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def apart(got: jax.Array, want: jax.Array) -> float:
    """Relative distance; NaN or a differing infinity never passes."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.array_equal(np.isinf(got), np.isinf(want))
    got, want = np.where(np.isinf(got), 0, got), np.where(np.isinf(want), 0, want)
    away = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-9)
    return float("inf") if np.isnan(away) else float(away)


def reference(function, q, view, *rest):
    """The reference in fp32 on the stored values."""
    view = view.replace(k=view.k.astype(jnp.float32), v=view.v.astype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        return getattr(function, "reference", function)(q.astype(jnp.float32), view, *rest)


def check(shape: Listing, seed: int, tune: tuned.Attend | None, attend=gpu_attend.attend) -> None:
    q, view, count = listing(shape, seed)
    close = 2e-5 if shape.dtype == "float32" else 1e-2
    real = jnp.arange(shape.new) < count[:, None]
    out, lse = attend(q, view, tune) if tune else attend(q, view)
    want, want_lse = reference(attention.attend, q, view)
    assert out.shape == q.shape and out.dtype == q.dtype and np.all(np.isfinite(np.asarray(out, np.float32)))
    out, want = (jnp.where(real[:, :, None, None, None], x.astype(jnp.float32), 0) for x in (out, want))
    lse, want_lse = (jnp.where(real[:, :, None, None], x, 0) for x in (lse, want_lse))
    assert apart(out, want) < close
    assert apart(lse, want_lse) < close
    got = gpu_mass.mass(q, view, want_lse, real, None if on_gpu() else tuned.Mass(block=16, steps=2, lanes=16))
    assert apart(got, reference(attention.mass, q, view, want_lse, real)) < close


@pytest.mark.parametrize("name", SMALL)
def test_attend_and_mass(name):
    check(SMALL[name], 0, TINY)


@pytest.mark.parametrize("name", ["plain", "ragged_heads", "window", "group_5_tokens_of_pages"])
def test_attend_in_one_piece(name):
    """Rows that no item is cut for leave their answer without a merge."""
    check(SMALL[name], 1, TINY._replace(fill=1, longest=2**10))


def test_an_answer_depends_neither_on_programs_nor_on_neighbours():
    shape = SMALL["plain"]._replace(heads=1, group=1, size=16, entries=9)
    q, view, _ = listing(shape, 5)
    view = view.replace(k=jnp.nan_to_num(view.k), v=jnp.nan_to_num(view.v))
    want = getattr(attention.attend, "reference", attention.attend)
    for programs in (1, 2, 7):
        run = jax.jit(lambda q, view, programs=programs: gpu_attend.attend(q, view, TINY._replace(programs=programs, longest=3)))
        for lengths in ([144, 144, 144], [144, 1, 0], [144, 143, 41], [144, 16, 1]):
            now = view.replace(length=jnp.asarray(lengths, jnp.int32))
            out, lse = run(q, now)
            assert apart(out, want(q, now)[0]) < 2e-5 and apart(lse, want(q, now)[1]) < 2e-5
            if programs == 1 and lengths[1] == 144:
                first = out[0]
            assert np.array_equal(out[0], first)


def test_all_rows_empty():
    q, view, _ = listing(SMALL["plain"], 2)
    out, lse = gpu_attend.attend(q, view.replace(length=jnp.zeros_like(view.length)), TINY)
    assert not np.any(np.asarray(out)) and np.all(np.asarray(lse) == -np.inf)


def bounds(rows: int, heads: int, group: int, size: int, width: int, seed: int, dtype=jnp.float32, stored=None):
    """Random queries, bounds (NaN where no page is listed), a table with padding ids, ragged counts."""
    rng = np.random.default_rng(seed)
    total = rows * width + 5
    ids = rng.permutation(total)[: rows * width].reshape(rows, width)
    count = rng.integers(0, width + 1, (rows, heads))
    count[0] = width
    listed = np.arange(width) < count.max(axis=1, keepdims=True)
    mine = np.zeros(total, bool)
    mine[ids[listed]] = True
    low, high = np.sort(rng.normal(size=(2, total, heads, size)), axis=0)
    low, high = (jnp.asarray(np.where(mine[:, None, None], x, np.nan), stored or dtype) for x in (low, high))
    ids = jnp.asarray(np.where(listed, ids, rng.choice([-3, 2**30], ids.shape)), jnp.int32)
    return jnp.asarray(rng.normal(size=(rows, heads, group, size)), dtype), low, high, ids, jnp.asarray(count, jnp.int32)


@pytest.mark.parametrize("size, group, width", [(64, 4, 41), (96, 1, 16), (128, 8, 3)])
def test_page_scores(size, group, width):
    given = bounds(3, 2, group, size, width, seed=size)
    got = gpu_pages.page_scores(*given, tune=tuned.Scores(16))
    want = getattr(pages.page_scores, "reference", pages.page_scores)(*given)
    assert apart(got, want) < 1e-5


def hard_scores(rows: int, width: int, seed: int) -> jax.Array:
    """Rows of ties, of signs, of few candidates, of none, of values apart by one unit in the last place."""
    rng = np.random.default_rng(seed)
    kinds = [
        rng.normal(size=width),
        rng.integers(-2, 3, width),
        np.where(rng.random(width) < 0.9, -np.inf, rng.normal(size=width)),
        np.full(width, -np.inf),
        np.nextafter(np.float32(1), np.float32(2)) ** rng.integers(0, 9, width).astype(np.float32),
        -np.abs(rng.normal(size=width)) * 1e-30,
        np.full(width, 3.5),
    ]
    return jnp.asarray(np.stack([kinds[row % len(kinds)] for row in range(rows)]), jnp.float32)


@pytest.mark.parametrize("width, k", [(50, 1), (50, 7), (64, 64), (20, 33)])
def test_select(width, k):
    scores = hard_scores(7, width, seed=k)
    assert np.array_equal(gpu_pages.select(scores, k), getattr(pages.select, "reference", pages.select)(scores, k))


def test_select_in_stages(monkeypatch):
    monkeypatch.setattr(gpu_pages, "WIDE", 64)
    scores = hard_scores(7, 700, seed=3)
    assert np.array_equal(gpu_pages.select(scores, 20), getattr(pages.select, "reference", pages.select)(scores, 20))


def check_listed(rows: int, heads: int, width: int, k: int, page: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = hard_scores(rows * heads, width, seed).reshape(rows, heads, width)
    n = jnp.asarray(rng.integers(0, width * page + 1, (rows, heads)).reshape(-1), jnp.int32).at[0].set(0).at[-1].set(width * page)
    n = n.reshape(rows, heads)
    scores = jnp.where(jnp.arange(width) < jnp.maximum(-(-n // page) - 1, 0)[..., None], scores, -jnp.inf)
    table = jnp.asarray(rng.permutation(rows * width).reshape(rows, width), jnp.int32)
    ids, length = gpu_pages.listed(scores, k, table, n, page)
    want, tokens = getattr(pages.listed, "reference", pages.listed)(scores, k, table, n, page)
    assert np.array_equal(length, tokens) and np.array_equal(ids, want)


@pytest.mark.parametrize("width, k, page", [(50, 7, 16), (20, 19, 1), (33, 4, 5)])
def test_listed(width, k, page):
    check_listed(4, 2, width, k, page, seed=width)


def test_listed_of_wide_rows(monkeypatch):
    monkeypatch.setattr(gpu_pages, "WIDE", 64)
    check_listed(3, 2, 150, 7, 4, seed=1)


@pytest.mark.parametrize("name", ["plain", "ragged_heads", "group_5_tokens_of_pages"])
def test_contiguous(name):
    q, view, _ = listing(SMALL[name], 4)
    full = view.length if view.length.ndim == 2 else jnp.broadcast_to(view.length[:, None], q.shape[:1] + q.shape[2:3])
    start, tokens = jnp.minimum(full, 3), view.ids.shape[-1] * view.run
    k, _ = gpu_prefill.contiguous(view, start, full, tokens, fill=True, block=16)
    for r, h in np.ndindex(*full.shape):
        listed = np.asarray(attention.gather(view.k, view.ids, view.run)[r, h, int(start[r, h]) : int(full[r, h])])
        assert np.array_equal(k[r, h, : len(listed)], listed) and not np.any(np.asarray(k[r, h, len(listed) :]))


def lowered(function, *args) -> str:
    """The program's text for an H200, made without one."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", CARD)
def test_lowers_for_cuda(name):
    shape = CARD[name]._replace(rows=2, entries=4)
    q, view, _ = abstract(listing(shape, 0))
    lse = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
    real = jax.ShapeDtypeStruct(q.shape[:2], jnp.bool_)
    for fill in (264, 1):  # several pieces, if the shape has them, and one
        run = functools.partial(gpu_attend.attend, tune=tuned.Attend(fill=fill))
        assert lowered(run, q, view).count("xla.gpu.triton") in (1, 2)
    assert lowered(gpu_mass.mass, q, view, lse, real).count("xla.gpu.triton") == 1
    length = jax.ShapeDtypeStruct((q.shape[0], q.shape[2]), jnp.int32)
    assert "xla.gpu.triton" in lowered(lambda v, n: gpu_prefill.contiguous(v, n, n, 64), view, length)


def test_pages_lower_for_cuda():
    given = abstract(bounds(2, 8, 4, 128, 40, 0, jnp.bfloat16))
    assert "xla.gpu.triton" in lowered(gpu_pages.page_scores, *given)
    for width in (2048, 8192, 131072):
        scores = jax.ShapeDtypeStruct((4, width), jnp.float32)
        assert "xla.gpu.triton" in lowered(lambda s: gpu_pages.select(s, 128), scores)
    scores, table, n = (jax.ShapeDtypeStruct(*x) for x in (((4, 8, 2048), jnp.float32), ((4, 2048), jnp.int32), ((4, 8), jnp.int32)))
    assert "xla.gpu.triton" in lowered(lambda *given: gpu_pages.listed(given[0], 127, *given[1:], 16), scores, table, n)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CARD)
def test_card_attend_and_mass(name):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    check(CARD[name], seed, None)
    q, view, _ = listing(CARD[name], seed)
    if q.shape[1] >= 128 and gpu_prefill.fits(q, view):
        check(CARD[name], seed, None, gpu_prefill.attend)


@pytest.mark.gpu
def test_card_pages():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    for stored in (None, jnp.float8_e4m3fn):
        given = bounds(7, 8, 4, 128, 777, seed, jnp.bfloat16, stored)
        wide = [x.astype(jnp.float32) for x in given[:3]]
        want = getattr(pages.page_scores, "reference", pages.page_scores)(*wide, *given[3:])
        assert apart(gpu_pages.page_scores(*given), want) < 1e-3
    for width, k in ((2048, 128), (8192, 128), (8192, 2048), (131072, 128), (131072, 4096), (300, 64)):
        scores = hard_scores(14, width, seed)
        assert np.array_equal(gpu_pages.select(scores, k), getattr(pages.select, "reference", pages.select)(scores, k))
    for width, k in ((2048, 127), (8192, 63), (300, 64), (9000, 127)):
        check_listed(5, 8, width, k, 16, seed)


@pytest.mark.gpu
def test_card_repeats_bit_equal():
    q, view, _ = listing(DECODE["b16_t2k_by_head"]._replace(entries=64), 0)
    run = jax.jit(gpu_attend.attend)
    first = run(q, view)
    for _ in range(20):
        again = run(q, view)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, again, strict=True))
