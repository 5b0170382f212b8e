"""Keep everything; a few observer layers choose the prompt tokens that the layers above them read."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sejax.cache.compose import Layer
from sejax.cache.method import Parts, check
from sejax.cache.retention import over_heads
from sejax.cache.ring import of_slot
from sejax.cache.storage import raw
from sejax.kernels.tokens import token_logits
from sejax.types import Array, AttentionView, Hooks, LayerMethod, LayerSpec, Method, Qkv, Rows, State


def scores(logits: Array, selector: str) -> Array:
    """One score a token from logits f32[R,H,G,C] (-inf: no candidate), the largest over all query heads -> f32[R,C]."""
    if selector == "softmax":
        some = jnp.any(logits > -jnp.inf, axis=-1, keepdims=True)
        logits = jnp.where(logits > -jnp.inf, jax.nn.softmax(jnp.where(some, logits, 0.0), axis=-1), -jnp.inf)
    return over_heads(logits.max(axis=2), "max")[:, 0]


def choose(score: Array, count: Array, most: int) -> Array:
    """The `count` best tokens, ties to the lowest index: f32[R,C], i32[R] -> ascending i32[R,most], C where there is none."""
    width = score.shape[-1]
    value, at = lax.top_k(score, min(most, width))
    real = (value > -jnp.inf) & (jnp.arange(at.shape[-1]) < count[:, None])
    return jnp.sort(jnp.where(real, at, width).astype(jnp.int32), axis=-1)


def place(layer: int, observers: tuple[int, ...], wait: int) -> str:
    """What a layer does: "observe", "follow" the nearest observer below, or read everything ("dense")."""
    if layer in observers:
        return "observe"
    below = [o for o in observers if o < layer]
    return "follow" if below and layer > max(below) + wait else "dense"


def omnikv(
    observers: tuple[int, ...],
    budget: int | None = None,
    ratio: float | None = None,
    wait: int = 1,
    selector: Literal["last", "softmax"] = "last",
    page: int = 16,
) -> Method:
    """Read, in most layers, only the prompt tokens that an observer layer below them found important.

    In an observer: s_j = max over all query heads of q . k_j / sqrt(D), j in the prompt; the best tokens, one set for all heads,
    are what the layers up to the next observer read, beside every token decoded since the prompt.

    Family: selection
    Paper: Hao et al. 2025, OmniKV, ICLR 2025 (antgroup/OmniKV).
    Differs: only the selector "last" and its softmax form. All tokens stay on the device. The prompt is everything up to the last
        prompt's end: tokens decoded before it become candidates.
    Keeps: every token. Following layers read `budget` prompt tokens (or the fraction `ratio` of the prompt) and all decoded ones.

    Args:
        observers: layers that observe; those before the first read everything. There is no default: it belongs to the model.
        budget: prompt tokens that following layers read; give this or ratio.
        ratio: fraction of the prompt they read, rounded down (default .067 where budget is not given).
        wait: layers after each observer that still read everything.
        selector: "last": the newest query's logits; "softmax": its attention weights.
        page: tokens a page of the pool.
    """
    check(len(observers) > 0, "observers=() is empty; name the layers that observe, as in observers=(2,8,18)")
    check(min(observers) >= 0, f"observers={observers} must be layers, counted from 0")
    check(budget is None or ratio is None, f"budget={budget} and ratio={ratio} are both given; give one of them")
    ratio = 0.067 if budget is None and ratio is None else ratio
    check(ratio is None or 0 < ratio <= 1, f"ratio={ratio} must lie in (0, 1]: the fraction of the prompt that is read")
    check(budget is None or budget >= 1, f"budget={budget} must be at least 1 token")
    check(wait >= 0, f"wait={wait} must be >= 0 layers")
    check(selector in ("last", "softmax"), f'selector={selector!r} must be "last" or "softmax"')
    arguments = dict(observers=tuple(observers), budget=budget, ratio=ratio, wait=wait, selector=selector, page=page)

    def layer(spec: LayerSpec, aux: Any = None) -> LayerMethod:
        check(max(observers) < spec.layers, f"observers={observers} names a layer that a model of {spec.layers} layers has not")
        return _Prompted(Layer(spec, raw(page), None, None), place(spec.index, observers, wait), budget, ratio, selector).method()

    parts = Parts(raw(page), traits=frozenset({"selection", "token selection"}))
    return Method("omnikv", tuple(arguments.items()), layer, "chunk", growing=True, parts=parts)


@dataclasses.dataclass(frozen=True)
class _Prompted:
    """A layer that keeps everything and knows how long its prompt is: row leaf "prompt" i32[S]. The carry of a decode step is
    the set that the last observer chose: i32[R,K] positions, ascending, out of range where there is none."""

    layer: Layer
    place: str
    budget: int | None
    ratio: float | None
    selector: str

    def method(self) -> LayerMethod:
        base = self.layer.keeping()
        reads = {"observe": self.observe, "follow": self.follow, "dense": self.layer.read_all}[self.place]
        decode = Hooks(self.init, self.layer.write, reads)
        prefill = Hooks(self.init, self.layer.write, self.layer.read_all)
        return base._replace(prefill=prefill, decode=decode, seal=self.seal, truncate=self.truncate)

    def init(self, slots: int, pages: int) -> State:
        state = self.layer.init(slots, pages)
        return State(state.pages, state.rows | {"prompt": jnp.zeros(slots, jnp.int32)})

    def seal(self, state: State, rows: Rows) -> State:
        end = jnp.where(rows.count > 0, rows.start + rows.count, of_slot(state.rows["prompt"], rows))
        return State(state.pages, state.rows | {"prompt": state.rows["prompt"].at[rows.slot].set(end, mode="drop")})

    def truncate(self, state: State, rows: Rows) -> State:
        shorten = self.layer.keeping().truncate
        assert shorten
        kept = shorten(state, rows)
        prompt = jnp.minimum(of_slot(state.rows["prompt"], rows), rows.start)
        return State(kept.pages, kept.rows | {"prompt": kept.rows["prompt"].at[rows.slot].set(prompt, mode="drop")})

    def counts(self, room: int) -> np.ndarray:
        """Tokens to select for each prompt length 0..room: i32[room+1], computed in double precision."""
        length = np.arange(room + 1)
        wanted = np.full(room + 1, self.budget) if self.ratio is None else (length * self.ratio).astype(np.int64)
        return np.minimum(wanted, length).astype(np.int32)

    def observe(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        prompt, page = of_slot(state.rows["prompt"], rows), self.layer.storage.page
        counts = self.counts(rows.table.shape[1] * page)
        logits = token_logits(qkv.q[:, 0], state.pages["kv"]["k"], rows.table, prompt)
        chosen = choose(scores(logits, self.selector), jnp.asarray(counts)[prompt], max(1, int(counts.max())))
        return self.layer.read_all(state, qkv, carry, rows)[0], chosen

    def follow(self, state: State, qkv: Qkv, carry: Any, rows: Rows) -> tuple[tuple[AttentionView, ...], Any]:
        """Two views: the chosen prompt tokens, each an entry of its own, and all tokens since the prompt."""
        page, pages = self.layer.storage.page, rows.table.shape[1]
        prompt, n = of_slot(state.rows["prompt"], rows), of_slot(state.rows["n"], rows)[:, 0]
        entry = jnp.take_along_axis(rows.table, jnp.clip(carry // page, 0, pages - 1), axis=1)
        found = jnp.sum(carry < pages * page, axis=1).astype(jnp.int32)
        view = self.layer.storage.view
        chosen = view(state.pages["kv"], ids=entry * page + carry % page, length=found, run=1)
        skipped = prompt // page  # whole pages before the first decoded token are not even listed
        at = jnp.minimum(jnp.arange(pages, dtype=jnp.int32) + skipped[:, None], pages - 1)
        ids = jnp.take_along_axis(rows.table, at, axis=1)
        since = view(state.pages["kv"], ids=ids, length=n - skipped * page, first=prompt - skipped * page)
        return (chosen, since), carry
