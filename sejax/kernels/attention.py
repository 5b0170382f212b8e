"""Attention over an AttentionView in plain jnp: the oracle of every kernel and the path on CPUs.

It walks the listed tokens block by block up to the longest row's run-time length, with an online softmax in fp32
(Milakov and Gimelshein 2018, arXiv 1805.02867; partial results merge by log-sum-exp as in FlashDecoding).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from sejax.kernels import dispatch
from sejax.types import Array, AttentionView, Seen

BLOCK = 256  # listed tokens a block: K, V and logits of a block stay in a core's cache


def gather(pool: Array, ids: Array, run: int) -> Array:
    """Rows that `ids` list: pool [N,H,P,...], ids i32[R,M] or [R,H,M] -> [R,H,M*run,...]."""
    n, heads, page = pool.shape[:3]
    sub = page // run
    piece = ids % sub if sub > 1 else None
    entry = ids // sub if sub > 1 else ids
    if ids.ndim == 2:
        entry = jnp.clip(entry, 0, n - 1)
        if piece is None:
            rows = jnp.moveaxis(pool[entry], 2, 1)  # [R,H,M,P,...]
        else:
            at = piece[..., None] * run + jnp.arange(run)
            rows = jnp.moveaxis(pool[entry[..., None], :, at], 3, 1)  # [R,M,run,H,...] -> [R,H,M,run,...]
    else:
        entry = jnp.clip(entry, 0, n * heads - 1)
        at_page, head = entry // heads, entry % heads  # two index arrays: reshaping the pool would copy it
        if piece is None:
            rows = pool[at_page, head]
        else:
            at = piece[..., None] * run + jnp.arange(run)
            rows = pool[at_page[..., None], head[..., None], at]
    return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])


def _per_head(x: Array) -> Array:
    """i32[R] or i32[R,H] -> broadcastable against [R,H,G,T,C]."""
    return x[:, None, None, None, None] if x.ndim == 1 else x[:, :, None, None, None]


def _by_head(q: Array) -> Array:
    """[R,T,H,G,D] -> [R,H,G,T,D], laid out so before the block loop: inside, every block would copy it anew."""
    return jnp.moveaxis(q, 1, 3)


def _logits(q: Array, view: AttentionView, ids: Array, base: Array | int) -> Array:
    """Masked logits f32[R,H,G,T,C] of one block of entries whose first listed token is number `base`; q [R,H,G,T,D]."""
    k = gather(view.k, ids, view.run)
    scale = view.scale if view.scale is not None else q.shape[-1] ** -0.5
    logits = jnp.einsum("rhgtd,rhcd->rhgtc", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * scale
    if view.softcap is not None:
        logits = view.softcap * jnp.tanh(logits / view.softcap)
    block = k.shape[2]
    at = base + jnp.arange(block, dtype=jnp.int32)
    if view.bias is not None:
        bias = lax.dynamic_slice_in_dim(view.bias, base, block, axis=2)
        logits += bias[:, :, None, None, :]
    seen = at < _per_head(view.length)
    if view.first is not None:
        seen &= at >= _per_head(view.first)
    if view.own is not None:
        query = jnp.arange(q.shape[3], dtype=jnp.int32)[:, None]
        seen &= at <= _per_head(view.length) - view.own[:, None, None, None, None] + query
    if view.pos is not None and view.q_pos is not None:
        pos = gather(view.pos, ids, view.run)[:, :, None, None, :]
        q_pos = view.q_pos[:, None, None, :, None]
        seen &= pos <= q_pos
        if view.window is not None:
            seen &= pos > q_pos - view.window
    return jnp.where(seen, logits, -jnp.inf)


def _blocks(view: AttentionView) -> tuple[AttentionView, int, Array]:
    """The view with entries padded to whole blocks, entries a block, and how many blocks the longest row needs."""
    listed = view.ids.shape[-1]
    size = min(listed, max(1, BLOCK // view.run))
    extra = -listed % size
    if extra:
        pad = [(0, 0)] * (view.ids.ndim - 1) + [(0, extra)]
        view = view.replace(ids=jnp.pad(view.ids, pad))
        if view.bias is not None:
            view = view.replace(bias=jnp.pad(view.bias, [(0, 0), (0, 0), (0, extra * view.run)]))
    longest = jnp.minimum(jnp.max(view.length), listed * view.run)
    return view, size, -(-longest // (size * view.run))


@dispatch.attend
def attend(q: Array, view: AttentionView) -> tuple[Array, Array]:
    """Softmax attention of q [R,T,H,G,D] over what `view` lists.

    Returns out [R,T,H,G,Dv] in q's dtype and lse f32[R,T,H,G]; a query that sees nothing has out 0 and lse -inf.
    """
    q = _by_head(view.q if view.q is not None else q)
    view, size, count = _blocks(view)

    def step(i: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(view.ids, i * size, size, axis=-1)
        logits = _logits(q, view, ids, i * size * view.run)
        v = gather(view.v, ids, view.run)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight = jnp.exp(logits - safe[..., None])
        fade = jnp.where(top == -jnp.inf, 0.0, jnp.exp(top - safe))
        # Memory nobody wrote may hold NaN, and 0 * NaN is NaN: what is masked must not be multiplied.
        at = i * size * view.run + jnp.arange(v.shape[2], dtype=jnp.int32)
        real = at < _per_head(view.length)[:, :, 0, 0, :]
        v = jnp.where(real[..., None], v, 0).astype(q.dtype)
        part = jnp.einsum("rhgtc,rhcd->rhgtd", weight.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * fade + jnp.sum(weight, axis=-1), acc * fade[..., None] + part

    start = (
        jnp.full(q.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros((*q.shape[:-1], view.v.shape[-1]), jnp.float32),
    )
    top, total, acc = step(0, start) if view.ids.shape[-1] == size else lax.fori_loop(0, count, step, start)
    out = jnp.where(total[..., None] > 0, acc / jnp.where(total == 0, 1.0, total)[..., None], 0.0)
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total == 0, 1.0, total)), -jnp.inf)
    return jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(lse, 3, 1)


@dispatch.mass
def mass(q: Array, view: AttentionView, lse: Array, real: Array) -> Array:
    """Probability each listed token receives, relative to `lse`, summed over the queries that are `real`.

    q [R,T,H,G,D], lse f32[R,T,H,G], real bool[R,T] -> f32[R,H,G,C], C = M * run; tokens no query sees get 0.
    """
    q = _by_head(view.q if view.q is not None else q)
    listed = view.ids.shape[-1] * view.run
    view, size, count = _blocks(view)
    lse = jnp.moveaxis(lse, 1, 3)
    lse = jnp.where(real[:, None, None, :] & (lse > -jnp.inf), lse, jnp.inf)[..., None]  # exp(x - inf) = 0
    width = size * view.run

    def step(i: Array | int, out: Array) -> Array:
        ids = lax.dynamic_slice_in_dim(view.ids, i * size, size, axis=-1)
        weight = jnp.exp(_logits(q, view, ids, i * width) - lse)
        return lax.dynamic_update_slice_in_dim(out, jnp.sum(weight, axis=3), i * width, axis=3)

    out = jnp.zeros((*q.shape[:3], view.ids.shape[-1] * view.run), jnp.float32)
    out = step(0, out) if out.shape[-1] == width else lax.fori_loop(0, count, step, out)
    return out[..., :listed]


def merge(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Exact softmax over disjoint sets of tokens from their (out [...,D], lse f32[...]) pairs."""
    if len(parts) == 1:
        return parts[0]
    lse = jax.nn.logsumexp(jnp.stack([part for _, part in parts]), axis=0)
    safe = jnp.where(lse == -jnp.inf, 0.0, lse)
    out = sum(jnp.exp(part - safe)[..., None] * value.astype(jnp.float32) for value, part in parts)
    return jnp.asarray(out).astype(parts[0][0].dtype), lse


def attention(q: Array, views: tuple[AttentionView, ...], count: Array) -> Seen:
    """Attention over all views at once, merged by lse; with the mass of each view that asks for it.

    q [R,T,H,G,D]; count i32[R]: real queries of each row (only they contribute to mass).
    """
    out, lse = merge([attend(q, view) for view in views])
    real = jnp.arange(q.shape[1]) < count[:, None]
    return Seen(out, lse, tuple(mass(q, view, lse, real) if view.mass else None for view in views))
