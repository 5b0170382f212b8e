"""The layer loop's pieces, one for all families: differences are data in Config and in the layer's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.heads import split, turned
from ..kernels.linear import product, rms_norm
from ..types import Array, LayerSpec, Qkv
from .config import Config

Attend = Callable[[Qkv], tuple[Array, Any]]

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def specs(config: Config, dtype: Any, max_len: int = 0) -> tuple[LayerSpec, ...]:
    """One LayerSpec a layer; dtype is that of stored keys and values, max_len the tokens a sequence may have."""
    c = config
    sizes = (c.layers, c.kv_heads, c.group, c.head_dim, jnp.dtype(dtype), c.rope)
    return tuple(LayerSpec(i, *sizes, hidden=c.hidden_size, max_len=max_len) for i in range(c.layers))


def embed(params: dict[str, Any], config: Config, tokens: Array) -> Array:
    """tokens i32[R,T] -> [R,T,E]; ids out of range are clamped."""
    return params["embed"].at[tokens].get(mode="clip")


def layer(p: dict[str, Array], config: Config, spec: LayerSpec, x: Array, positions: Array, attend: Attend) -> tuple[Array, Any]:
    """One transformer layer: norm, project, RoPE, attend, output, FFN.

    x [R,T,E]; positions i32[R,T]; attend(Qkv) -> (out [R,T,H,G,D], aux). Returns (x, aux).
    """
    shape, eps = x.shape, config.norm_eps
    x = x.reshape(-1, shape[-1])
    qkv = product(x, p["qkv"], p.get("qkv_bias"), p["attn_norm"], eps)
    out, aux = attend(_heads(p, config, spec, qkv, positions))
    x = product(out.reshape(len(x), -1), p["o"], p.get("o_bias"), residual=x)
    h = product(x, p["gate_up"], p.get("gate_up_bias"), p["mlp_norm"], eps, gate=_ACTIVATIONS[config.activation])
    return product(h, p["down"], p.get("down_bias"), residual=x).reshape(shape), aux


def head(params: dict[str, Any], config: Config, x: Array) -> Array:
    """Final norm and vocabulary projection: x [..., E] -> f32[..., V]."""
    weight = params["embed"] if config.tie_embeddings else params["lm_head"]
    flat = x.reshape(-1, x.shape[-1])
    return product(flat, weight, norm=params["norm"], eps=config.norm_eps, dtype=jnp.float32).reshape(*x.shape[:-1], -1)


def _heads(p: dict[str, Array], c: Config, spec: LayerSpec, qkv: Array, positions: Array) -> Qkv:
    """The layer's packed projection [R*T,...] as heads; what nobody reads of the unrotated ones is not computed."""
    norms = (p["q_norm"], p["k_norm"]) if c.qk_norm else None
    cos, sin = (angle.reshape(len(qkv), -1) for angle in c.rope.angles(positions))
    q, k, v = turned(qkv, cos, sin, norms, c.norm_eps, spec.heads, spec.group)
    q_raw, k_raw, _ = split(qkv, spec.heads, spec.group, spec.head_dim)
    if norms is not None:
        q_raw, k_raw = (rms_norm(x, w, c.norm_eps) for x, w in zip((q_raw, k_raw), norms, strict=True))
    return Qkv(*(x.reshape(*positions.shape, *x.shape[1:]) for x in (q, k, v, q_raw, k_raw)))
