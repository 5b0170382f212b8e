"""Keep what recent queries attend to and nothing else in the cache repeats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sejax.cache.method import check, composed, either
from sejax.cache.retention import LOCAL_SETS, Candidates, Retention, amount, pool
from sejax.cache.storage import raw
from sejax.types import Array, LayerSpec, Method

TILE = 128  # rows of the similarity matrix at a time: [R,H,TILE,C] floats exist at once


def importance(queries: Array, keys: Array, real: Array, past: Array, kernel: int) -> Array:
    """Mean over the window of softmax over the past of the group's largest logit, max-pooled.

    queries [R,W,H,G,D], real bool[R,W]; keys [R,H,C,D], past bool[R,H,C] -> f32[R,H,C].
    """
    logits = jnp.einsum("rwhgd,rhcd->rhgwc", queries.astype(jnp.float32), keys) * keys.shape[-1] ** -0.5
    logits = jnp.where(past[:, :, None, :], logits.max(axis=2), -jnp.inf)
    some = jnp.any(past, axis=-1)[..., None, None]
    weight = jax.nn.softmax(jnp.where(some, logits, 0.0), axis=-1)
    weight = jnp.where(real[:, None, :, None], weight, 0.0).sum(axis=2) / jnp.maximum(real.sum(axis=1), 1)[:, None, None]
    return pool(weight, past, kernel, "max")


def redundancy(keys: Array, total: Array, threshold: float, zero_column0: bool) -> Array:
    """Softmax of each key's mean similarity to all others; of the keys like it, a key forgives the latest one.

    keys f32[R,H,C,D] -> f32[R,H,C].
    """
    width = keys.shape[2]
    column = jnp.arange(width, dtype=jnp.int32)
    real = column < total[..., None]
    unit = jnp.where(real[..., None], keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8), 0.0)
    tile = min(TILE, width)
    padded = jnp.pad(unit, [(0, 0), (0, 0), (0, -width % tile), (0, 0)])

    def step(i: Array, summed: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(padded, i * tile, tile, axis=2)
        like = jnp.einsum("rhid,rhjd->rhij", rows, unit)
        row = i * tile + jnp.arange(tile, dtype=jnp.int32)
        like = jnp.where(row[:, None] == column, 0.0, like)
        latest = jnp.max(jnp.where(like > threshold, column, -1), axis=-1, keepdims=True)
        latest = jnp.maximum(latest, 0) if zero_column0 else latest
        return summed + jnp.where(column == latest, 0.0, like).sum(axis=2)

    tiles = -(-jnp.max(total) // tile)
    mean = lax.fori_loop(0, tiles, step, jnp.zeros(keys.shape[:3], jnp.float32)) / jnp.maximum(total, 1)[..., None]
    return jax.nn.softmax(jnp.where(real, mean, -jnp.inf), axis=-1, where=real)


def score(candidates: Candidates, kernel: int, mix: float, threshold: float, zero_column0: bool) -> Array:
    """mix * importance - (1 - mix) * redundancy, +inf for the window: Candidates -> f32[R,H,C]."""
    assert candidates.read is not None and candidates.queries is not None
    keys = candidates.read("keys").astype(jnp.float32)
    width = candidates.queries.shape[1]
    real = jnp.arange(width) >= width - candidates.window[:, None]
    past = jnp.arange(keys.shape[2]) < (candidates.total - candidates.window[:, None])[..., None]
    important = importance(candidates.queries, keys, real, past, kernel)
    redundant = redundancy(keys, candidates.total, threshold, zero_column0)
    return jnp.where(past, mix * important - (1 - mix) * redundant, jnp.inf)


def rkv(
    budget: int | None = None,
    window: int = 8,
    kernel: int = 7,
    mix: float = 0.1,
    threshold: float = 0.5,
    period: int = 128,
    zero_column0: bool = False,
    ratio: float | None = None,
    page: int = 16,
) -> Method:
    """Keep important, non-redundant tokens while a long answer is written.

    score = mix * pool(mean over the window of softmax(max over the group of q K^T / sqrt(D)))
    - (1 - mix) * softmax(mean_i S_ij), S the cosines between keys, diagonal and each row's latest similar column set to 0.

    Family: eviction
    Paper: Cai et al. 2025, arXiv 2505.24133.
    Differs: a row without a similar key loses nothing (the official code clears its column 0: `zero_column0`). The first prompt
        is compressed at its end, with its own attention uncompressed. Similarities are computed 128 rows at a time.
    Keeps: budget tokens per kv head and layer after a prompt or trim, at most budget + period.

    Args:
        budget: tokens kept per kv head and layer, window included (default 4096, where ratio is not given).
        window: latest queries that judge importance; their tokens always stay. It starts anew with each prompt.
        kernel: max-pooling width in tokens, odd.
        mix: weight of importance against redundancy, 0 to 1 (lambda in the paper).
        threshold: cosine above which two keys are similar.
        period: decoded tokens between trims; 0: none while decoding, a run then has room for the longest sequence.
        zero_column0: the official code's treatment of rows without a similar key.
        ratio: instead of a budget: the fraction of the session's tokens that is kept, max(1, int(length ratio)) at each decision.
        page: tokens a page of the pool.
    """
    budget, ratio = either(budget, ratio, 4096)
    check(
        window >= 1 and (budget is None or budget > window), f"budget={budget} must be larger than window={window}, and window at least 1"
    )
    check(kernel >= 1 and kernel % 2 == 1, f"kernel={kernel} must be odd: an even width would shift the scores; use {kernel + 1}")
    check(0 <= mix <= 1, f"mix={mix} must lie between 0 and 1")
    check(period >= 0, f"period={period} must be at least 1 step, or 0 for none")
    arguments = dict(budget=budget, window=window, kernel=kernel, mix=mix, threshold=threshold)
    arguments |= dict(period=period, zero_column0=zero_column0, ratio=ratio, page=page)

    def retention(spec: LayerSpec) -> Retention:
        most, at = amount(budget, ratio, spec)
        rule = lambda c: score(c, kernel, mix, threshold, zero_column0)  # noqa: E731
        return Retention(most, max(period, 1), window, rule, restart=True, budget_at=at, endless=period == 0)

    return composed("rkv", arguments, raw(page), retention, refuses=LOCAL_SETS)
