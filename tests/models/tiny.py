"""Small random models for tests."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from sejax.models import Config, Model
from sejax.models.family import layer_shapes, packed, top_shapes
from sejax.models.rope import Rope

STD = {"q": 0.45, "k": 0.45, "v": 0.3, "o": 0.3, "gate": 0.3, "up": 0.3, "down": 0.2, "embed": 1.0, "lm_head": 0.5}


def tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random tensor: norms near 1, biases small, matrices large enough that attention is peaked and differs by head."""
    if name.endswith("norm"):
        return (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    if name.endswith("bias"):
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)
    return (STD[name] * rng.standard_normal(shape) * (32 / shape[-1]) ** 0.5).astype(np.float32)


def random_params(config: Config, seed: int = 0) -> dict[str, Any]:
    """float32 numpy parameters as a checkpoint stores them, the same for the same seed everywhere."""
    rng = np.random.default_rng(seed)
    top = {name: tensor(rng, name, shape) for name, shape in top_shapes(config).items()}
    layers = tuple({n: tensor(rng, n, s) for n, s in layer_shapes(config).items()} for _ in range(config.layers))
    return top | {"layers": layers}


def tiny_model(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, vocab=101, seed=0, family="llama", dtype="float32", **kw) -> Model:
    """A random model without a tokenizer; further Config fields by name."""
    traits = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}[family]
    config = Config(
        **{
            "family": family,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": 2 * hidden,
            "rope": Rope(head_dim),
            "tie_embeddings": True,
            **traits,
            **kw,
        }
    )
    params = random_params(config, seed)
    params["layers"] = tuple(packed(layer) for layer in params["layers"])
    cast = lambda t: {k: tuple(map(cast, v)) if k == "layers" else jnp.asarray(v, dtype) for k, v in t.items()}  # noqa: E731
    return Model(cast(params), config)
