"""Which kernel serves an op: the card's where the program is for an NVIDIA GPU and the shapes are covered, else the reference.

The reference wears a decorator, `@dispatch.attend` and so on; it stays reachable as `op.reference`. Where this jax has no Triton
lowering for Pallas, or a pool is too large for it, attention goes through jax_triton; the other kernels are then their references.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from sejax.kernels import gpu_attend, gpu_heads, gpu_linear, gpu_mass, gpu_pages, gpu_prefill, gpu_rows, triton_attend
from sejax.kernels.launch import PALLAS, on_gpu
from sejax.types import Array, AttentionView

TILES = 96  # tiles of 128 queries that fill the card without splitting keys: from there cuDNN on copied keys wins
ROWS = 1024  # beyond, one program a token and head is many small ones, and XLA's loop is as fast
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def _tiled(q: Array, view: AttentionView) -> bool:
    """16- or 32-bit queries, known pools, heads that fit a tile."""
    sizes = max(q.shape[-1], view.v.shape[-1]) <= 256
    pools = all(pool.dtype.name in FLOATS for pool in (view.k, view.v))
    return sizes and pools and q.dtype.name in FLOATS[:3] and q.size > 0 and view.ids.size > 0


def _covers(q: Array, view: AttentionView) -> bool:
    """What fits a tile, of pools under 2^31 elements: Pallas's offsets are 32-bit."""
    return PALLAS and _tiled(q, view) and max(view.k.size, view.v.size) < 2**31


def _attends(q: Array, view: AttentionView) -> bool:
    """What Pallas covers; where jax_triton is installed, all that fits a tile."""
    if _covers(q, view) or not _tiled(q, view):
        return _covers(q, view)
    lacks = triton_attend.lacks()
    if lacks and not PALLAS:
        warnings.warn(f"this jax has no Triton lowering for Pallas, and {lacks}; until then attention is slow", stacklevel=3)
    return not lacks


def _attend(q: Array, view: AttentionView) -> tuple[Array, Array]:
    if not _covers(q, view):
        return triton_attend.attend(q, view)
    q = q if view.q is None else view.q
    rows, new, heads, group, _ = q.shape
    fills = new >= 128 and rows * heads * group * new >= TILES * 128
    return (gpu_prefill if fills and gpu_prefill.fits(q, view) else gpu_attend).attend(q, view)


def _put(leaf: Array, table: Array, row: Array, values: Array) -> Array:
    return gpu_rows.put((leaf,), table, row, (values,))[0]


def _puts(leaf: Array, table: Array, row: Array, values: Array) -> bool:
    return gpu_rows.puts((leaf,), table, row, (values,))


def _scored(q: Array, low: Array, high: Array, ids: Array, count: Array) -> bool:
    return ids.ndim == 2 and q.shape[2] <= 16 and q.shape[3] <= 256 and low.size < 2**31 and ids.size > 0 and q.dtype.name in FLOATS[:3]


def _turns(qkv: Array, cos: Array, sin: Array, norms: Any, *_: Any) -> bool:
    same = norms is None or all(norm.dtype == qkv.dtype for norm in norms)
    return same and 0 < len(qkv) <= ROWS and qkv.dtype.name in FLOATS[:3]


def _on_card(
    fast: Callable[..., Any], covers: Callable[..., bool], ready: bool = PALLAS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(reference: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reference)
        def op(*args: Any, **named: Any) -> Any:
            return (fast if ready and on_gpu() and covers(*args, **named) else reference)(*args, **named)

        op.reference = reference  # type: ignore[attr-defined]
        return op

    return wrap


attend = _on_card(_attend, _attends, ready=True)
mass = _on_card(gpu_mass.mass, lambda q, view, lse, real: _covers(q, view))
page_scores = _on_card(gpu_pages.page_scores, _scored)
select = _on_card(gpu_pages.select, gpu_pages.selects)
listed = _on_card(gpu_pages.listed, gpu_pages.lists)
append_bounds = _on_card(gpu_rows.append_bounds, gpu_rows.bounded)
claim = _on_card(gpu_rows.claim, gpu_rows.claims)
put = _on_card(_put, _puts)
puts = _on_card(gpu_rows.put, gpu_rows.puts)
product = _on_card(gpu_linear.product, gpu_linear.multiplies)
rms_norm = _on_card(gpu_linear.rms_norm, gpu_linear.normalises)
turned = _on_card(gpu_heads.turned, _turns)
