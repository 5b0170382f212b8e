"""What sets one model family apart: names in files, and the few config fields that differ. The layer loop knows no family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .config import Config

TOP = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
}
_PARTS = {
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
    "attn_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    architecture: the entry of `architectures` in config.json. gguf: `general.architecture` of a GGUF file.
    traits: config.json -> the Config fields in which the family differs from plain Llama.
    interleaved: its GGUF files store the rows of q and k for a rotation of neighbouring pairs.
    top, parts: our tensor name -> (Hugging Face name, GGUF name); parts without the layer's prefix and ".weight".
    """

    name: str
    architecture: str
    gguf: str
    traits: Callable[[Mapping[str, Any]], dict[str, Any]]
    interleaved: bool = False
    top: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=lambda: TOP)
    parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=lambda: _PARTS)

    def tensor(self, name: str, layer: int | None, source: int) -> str:
        """The name of our tensor in a file; source 0: Hugging Face, 1: GGUF."""
        if layer is None:
            return self.top[name][source]
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        prefix = (f"model.layers.{layer}.", f"blk.{layer}.")[source]
        return f"{prefix}{self.parts[stem][source]}.{'bias' if bias else 'weight'}"


def refuse_sliding(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint some of whose layers see a window only."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("sliding-window layers (use_sliding_window, layer_types) are not supported yet")


def top_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors outside the layers."""
    shapes = {"embed": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    return shapes if c.tie_embeddings else shapes | {"lm_head": (c.vocab_size, c.hidden_size)}


def layer_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors as checkpoints store them; matrices are [out, in]."""
    e, f, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (e,),
        "q": (q, e),
        "k": (kv, e),
        "v": (kv, e),
        "o": (e, q),
        "mlp_norm": (e,),
        "gate": (f, e),
        "up": (f, e),
        "down": (e, f),
    }
    biased = ("q", "k", "v") * c.qkv_bias + ("o",) * c.o_bias + ("gate", "up", "down") * c.mlp_bias
    shapes |= {f"{name}_bias": shapes[name][:1] for name in biased}
    return shapes | ({"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)} if c.qk_norm else {})


PACKED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Matrices (and their biases) that a layer multiplies as one: fewer, larger products read their weights faster."""


def packed(layer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One layer's tensors by layer_shapes' names -> the same with the matrices of PACKED joined along their outputs."""
    layer = dict(layer)
    for ending in ("", "_bias"):
        for name, parts in PACKED.items():
            if parts[0] + ending in layer:
                layer[name + ending] = np.concatenate([layer.pop(part + ending) for part in parts])
    return layer
