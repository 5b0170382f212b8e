"""One layer of a method driven by hand-made q, k, v: the vectors' way through the real hooks, seal and trim."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sejax import methods
from sejax.kernels.attention import attend, attention, mass
from sejax.models.rope import Rope
from sejax.types import AttentionView, LayerMethod, LayerSpec, Qkv, Rows

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
VECTORS = Path(__file__).parent.parent / "vectors"


def numbers(x: Any) -> Any:
    """JSON to numpy where it is rectangular; "inf" and "-inf" are numbers."""
    if isinstance(x, dict):
        return {k: numbers(v) for k, v in x.items()}
    if isinstance(x, str):
        return float(x) if x in ("inf", "-inf") else x
    if isinstance(x, list):
        parts = [numbers(v) for v in x]
        shapes = {np.shape(p) for p in parts if not isinstance(p, (list, dict, str))}
        regular = len(shapes) == 1 and all(not isinstance(p, (list, dict, str)) and p is not None for p in parts)
        return np.asarray(parts) if regular else parts
    return x


@functools.cache
def vectors(name: str) -> dict[str, dict]:
    """Cases of a vector file by name: params, inputs, expected (arrays as numpy)."""
    cases = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return {c["name"]: {k: numbers(c[k]) for k in ("params", "inputs", "expected")} for c in cases}


def spec_of(heads: int, group: int, dim: int, index: int = 0, layers: int = 1, max_len: int = 0) -> LayerSpec:
    return LayerSpec(index, layers, heads, group, dim, jnp.dtype("float32"), Rope(dim), max_len=max_len)


def window_mass(q: np.ndarray, k: np.ndarray, window: int) -> jax.Array:
    """Attention each key of k [H,T,D] gets from the last `window` queries of q [Hq,T,D]: the engine's kernels -> f32[1,H,G,T]."""
    heads, length, dim = k.shape
    pool = jnp.asarray(k, jnp.float32)[None]  # one page
    pos = jnp.broadcast_to(jnp.arange(length), (1, heads, length))
    q_pos = jnp.arange(length - window, length)[None]
    view = AttentionView(pool, pool, jnp.zeros((1, 1), jnp.int32), jnp.full(1, length), pos=pos, q_pos=q_pos, run=length)
    q = jnp.asarray(q, jnp.float32).reshape(1, heads, -1, q.shape[1], dim)
    q = jnp.moveaxis(q, 3, 1)[:, length - window :]
    return mass(q, view, attend(q, view)[1], jnp.ones((1, window), bool))


class Sequence:
    """One sequence in one layer, slot 1 of 2. Arrays are the vectors': q [Hq,T,D], k, v [H,T,D] (after RoPE)."""

    def __init__(self, spec: str, heads: int, group: int, dim: int, longest: int, index: int = 0, layers: int = 1) -> None:
        self.method = methods.method(spec)
        self.spec = spec_of(heads, group, dim, index, layers, longest)
        self.layer: LayerMethod = self.method.layer(self.spec, None)
        width = self.layer.pages(self.layer.run(longest))
        self.table = jnp.arange(2 * width, dtype=jnp.int32).reshape(2, width)[::-1]
        self.state, self.length, self.longest = self.layer.decode.init(2, 2 * width), 0, longest
        self.carry: Any = None

    def _rows(self, start: int, count: int) -> Rows:
        one = jnp.ones(1, jnp.int32)
        return Rows(one, one * start, one * count, self.table[1:], jnp.zeros((1, max(count, 1)), jnp.int32))

    def _qkv(self, q, k, v, q_raw=None) -> Qkv:
        heads, group, dim = self.spec.heads, self.spec.group, self.spec.head_dim
        fold = lambda x: jnp.moveaxis(jnp.asarray(x, jnp.float32).reshape(1, heads, group, -1, dim), 3, 1)  # noqa: E731
        swap = lambda x: jnp.swapaxes(jnp.asarray(x, jnp.float32)[None], 1, 2)  # noqa: E731
        q_raw = q if q_raw is None else q_raw
        return Qkv(fold(q), swap(k), swap(v), fold(q_raw), swap(k))

    def prompt(self, q, k, v, q_raw=None) -> np.ndarray:
        """A turn in one chunk, then the seal -> attention [Hq,T,D]."""
        count = k.shape[1]
        run = jax.jit(functools.partial(_prompt, self.layer, self.method.order == "layer", count), compiler_options=QUICK)
        out, self.state, self.carry = run(self.state, self._qkv(q, k, v, q_raw), self.carry, self._rows(self.length, count))
        self.length += count
        return self._unfold(out)

    def token(self, q, k, v, q_raw=None) -> np.ndarray:
        """One decoded token, q [Hq,D], k, v [H,D], then the trim if it is due -> attention [Hq,D]."""
        wide = lambda x: None if x is None else np.asarray(x)[:, None]  # noqa: E731
        qkv = self._qkv(wide(q), wide(k), wide(v), wide(q_raw))
        if not hasattr(self, "step"):
            self.step = jax.jit(functools.partial(_token, self.layer), compiler_options=QUICK)
        out, self.state, self.carry = self.step(self.state, qkv, self.carry, self._rows(self.length, 1))
        self.length += 1
        return self._unfold(out)[:, 0]

    def _unfold(self, out) -> np.ndarray:
        return np.asarray(jnp.moveaxis(out[0], 0, 2).reshape(self.spec.heads * self.spec.group, -1, self.spec.head_dim))

    def leaf(self, name: str) -> list[list]:
        """A page leaf [N,H,P], head by head, of the rows held, ascending by position."""
        pos, leaf = (np.asarray(self.state.pages[n][self.table[1]]).swapaxes(0, 1).reshape(self.spec.heads, -1) for n in ("pos", name))
        count = np.asarray(self.state.rows["n"][1])
        return [[leaf[h, i] for i in np.argsort(pos[h, : count[h]])] for h in range(self.spec.heads)]

    @property
    def kept(self) -> list[list[int]]:
        held = np.asarray(self.layer.held(self.state, self._rows(self.length, 0))[0])
        return [sorted(p for p in head if p >= 0) for head in held.tolist()]


def _prompt(layer: LayerMethod, staged: bool, count: int, state, qkv, carry, rows):
    if not staged:
        state = layer.prefill.write(state, qkv, rows)
        views, carry = layer.prefill.before_attention(state, qkv, carry, rows)
        seen = _attend(layer, qkv.q, views, rows)
        state, carry = layer.prefill.after_attention(state, qkv, seen, carry, rows)
        return seen.out, layer.seal(state, rows) if layer.seal else state, carry
    width = layer.pages(layer.stage_run(count))
    on_stage = rows._replace(slot=jnp.zeros(1, jnp.int32), table=jnp.arange(width, dtype=jnp.int32)[None])
    stage = layer.prefill.write(layer.prefill.init(1, width), qkv, on_stage)
    views, carry = layer.prefill.before_attention(stage, qkv, carry, on_stage)
    seen = _attend(layer, qkv.q, (*layer.history(state, qkv, rows), *views), rows)
    stage, carry = layer.prefill.after_attention(stage, qkv, seen, carry, on_stage)
    return seen.out, layer.seal(stage, state, on_stage, rows, rows), carry


def _attend(layer: LayerMethod, q, views, rows):
    return layer.prefill.attend(q, views, rows) if layer.prefill.attend else attention(q, views, rows.count)


def _token(layer: LayerMethod, state, qkv, carry, rows):
    state = layer.decode.write(state, qkv, rows)
    views, carry = layer.decode.before_attention(state, qkv, carry, rows)
    seen = attention(qkv.q, views, rows.count)
    state, carry = layer.decode.after_attention(state, qkv, seen, carry, rows)
    if layer.decode.after_step:
        state = layer.decode.after_step(state, rows)
    return seen.out, state, carry
