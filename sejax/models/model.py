"""A model as a pytree, and its plain forward pass: the yardstick of every method."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ..types import Array, Qkv
from . import decoder
from .config import Config
from .tokenizer import Tokenizer

QUERY_BLOCK = 512


@struct.dataclass
class Model:
    """A pytree: the parameters are data; config and tokenizer are static.

    params: {"embed" [V,E], "norm" [E], "lm_head" [V,E] (absent when tied), "layers": a tuple of dicts}; matrices are [out, in].
    tokenizer is None for a model made without one.
    """

    params: dict[str, Any]
    config: Config = struct.field(pytree_node=False)
    tokenizer: Tokenizer | None = struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> Any:
        """Of weights and activations."""
        return self.params["embed"].dtype

    def fingerprint(self) -> str:
        """Hex digest of weights, config and tokenizer: exact integer checksums taken on the device, so nothing large moves."""
        digest = hashlib.blake2b(f"{self.config}{self.tokenizer and self.tokenizer.fingerprint}".encode(), digest_size=16)
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode())
            digest.update(np.asarray(_checksum(leaf)).tobytes())
        return digest.hexdigest()


def logits(model: Model, tokens: Array) -> Array:
    """Dense causal forward pass without a cache: i32[B,T] -> f32[B,T,V]. Pure."""
    tokens = jnp.asarray(tokens)
    params, config = model.params, model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(params, config, tokens)
    for p, spec in zip(params["layers"], decoder.specs(config, model.dtype), strict=True):
        x, _ = decoder.layer(p, config, spec, x, positions, causal)
    return decoder.head(params, config, x)


def causal(qkv: Qkv) -> tuple[Array, None]:
    """Causal attention in blocks of queries, so that scores need O(T * block) memory."""
    rows, length = qkv.k.shape[:2]
    block = min(length, QUERY_BLOCK)
    blocks = -(-length // block)
    q = jnp.pad(qkv.q, ((0, 0), (0, blocks * block - length)) + ((0, 0),) * 3)
    q = jnp.moveaxis(q.reshape(rows, blocks, block, *q.shape[2:]), 1, 0)

    def attend(args: tuple[Array, Array]) -> Array:
        index, part = args
        s = jnp.einsum("rthgd,rshd->rhgts", part, qkv.k, preferred_element_type=jnp.float32) * part.shape[-1] ** -0.5
        seen = jnp.arange(length) <= (index * block + jnp.arange(block))[:, None]
        weights = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1).astype(qkv.v.dtype)
        return jnp.einsum("rhgts,rshd->rthgd", weights, qkv.v)

    out = lax.map(attend, (jnp.arange(blocks), q))
    return jnp.moveaxis(out, 0, 1).reshape(rows, blocks * block, *qkv.q.shape[2:])[:, :length], None


def _checksum(x: Array) -> Array:
    """u32 sums of the bit patterns along the first axis, each row weighted by an odd number: exact in any order."""
    width = x.dtype.itemsize * 8
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32).reshape(x.shape[0], -1)
    weights = jnp.arange(x.shape[0], dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.sum(bits * weights[:, None], 0, dtype=jnp.uint32)
