"""The layer loop's pieces, one for all families: differences are data in Config and in the layer's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..types import Array, LayerSpec, Qkv
from .config import Config

Attend = Callable[[Qkv], tuple[Array, Any]]

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def specs(config: Config, dtype: Any) -> tuple[LayerSpec, ...]:
    """One LayerSpec a layer; dtype is that of stored keys and values."""
    c = config
    return tuple(LayerSpec(i, c.layers, c.kv_heads, c.group, c.head_dim, jnp.dtype(dtype), c.rope) for i in range(c.layers))


def embed(params: dict[str, Any], config: Config, tokens: Array) -> Array:
    """tokens i32[R,T] -> [R,T,E]; ids out of range are clamped."""
    return params["embed"].at[tokens].get(mode="clip")


def layer(p: dict[str, Array], config: Config, spec: LayerSpec, x: Array, positions: Array, attend: Attend) -> tuple[Array, Any]:
    """One transformer layer: norm, project, RoPE, attend, output, FFN.

    x [R,T,E]; positions i32[R,T]; attend(Qkv) -> (out [R,T,H,G,D], aux). Returns (x, aux).
    """
    qkv = _project(p, config, spec, rms_norm(x, p["attn_norm"], config.norm_eps), positions)
    out, aux = attend(qkv)
    x = x + linear(out.reshape(*x.shape[:2], -1), p["o"], p.get("o_bias"))
    h = rms_norm(x, p["mlp_norm"], config.norm_eps)
    gate = _ACTIVATIONS[config.activation](linear(h, p["gate"], p.get("gate_bias")))
    return x + linear(gate * linear(h, p["up"], p.get("up_bias")), p["down"], p.get("down_bias")), aux


def head(params: dict[str, Any], config: Config, x: Array) -> Array:
    """Final norm and vocabulary projection: x [..., E] -> f32[..., V]."""
    weight = params["embed"] if config.tie_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], config.norm_eps), weight, dtype=jnp.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis; the statistics in fp32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight


def linear(x: Array, weight: Array, bias: Array | None = None, dtype: Any = None) -> Array:
    """x [..., in] times weight [out, in], transposed: [..., out] in `dtype` (default x's)."""
    flat = x.reshape(math.prod(x.shape[:-1]), -1)
    y = _product(flat, weight, dtype or x.dtype).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _product(x: Array, w: Array, dtype: Any) -> Array:
    """[n, in], [out, in] -> [n, out], in the form that the CPU runs fastest for this n (SmolLM2's weights, 2 cores, ms a step):

    fp32, plain / halves: n 1 21/18, 2 57/27, 8 70/37, 16 76/46, 32 101/88, 64 170/198. bf16, plain / doubled: n 1 680/33.
    """
    # float32 means float32: a GPU's default would round the operands to TF32
    options = {"preferred_element_type": dtype, "precision": lax.Precision.HIGHEST if x.dtype == jnp.float32 else None}
    (rows, size), out = x.shape, len(w)
    cpu = jax.default_backend() == "cpu"
    if cpu and x.dtype == jnp.float32 and rows <= 32 and out % 2 == 0:
        # as a batch of two, weights first, they are streamed; the plain form copies them into packed blocks first
        halves = (w.reshape(2, out // 2, size), jnp.broadcast_to(x, (2, rows, size)))
        return lax.dot_general(*halves, (((2,), (2,)), ((0,), (0,))), **options).reshape(out, rows).T
    if cpu and x.dtype == jnp.bfloat16 and rows == 1:
        return _product(jnp.concatenate([x, x]), w, dtype)[:1]
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), **options)


def _project(p: dict[str, Array], c: Config, spec: LayerSpec, h: Array, positions: Array) -> Qkv:
    shape = (*h.shape[:2], spec.heads, spec.group, spec.head_dim)
    q = linear(h, p["q"], p.get("q_bias")).reshape(shape)
    k = linear(h, p["k"], p.get("k_bias")).reshape(*shape[:3], shape[4])
    v = linear(h, p["v"], p.get("v_bias")).reshape(k.shape)
    if c.qk_norm:
        q, k = rms_norm(q, p["q_norm"], c.norm_eps), rms_norm(k, p["k_norm"], c.norm_eps)
    return Qkv(spec.rope(q, positions), spec.rope(k, positions), v, q, k)
