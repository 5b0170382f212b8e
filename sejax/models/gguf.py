"""GGUF files: configuration, tokenizer and dequantised tensors."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from . import families, gguf_file, gguf_tokenizer
from .config import Config, parse
from .rope import Rope
from .tokenizer import Tokenizer


class File:
    """A GGUF file as a source of weights (see weights.Source)."""

    kind = 1

    def __init__(self, path: pathlib.Path):
        self.where = str(path)
        self._reader = gguf_file.Reader(path)
        self.fields, self._tensors = self._reader.fields, self._reader.tensors
        if self.fields.get("split.count", 1) > 1:
            raise ValueError(f"{path}: one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
        self.family = families.by("gguf", self.fields.get("general.architecture", "none"), self.where)
        self.tokenizer: Tokenizer | None = gguf_tokenizer.build(self.fields, self.where)
        self.config = self._config()
        # llama.cpp rotates neighbouring pairs: these tensors have each head's rows interleaved
        heads = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}
        self._heads = heads if self.family.interleaved else {}

    def file(self, name: str) -> str | None:
        return self.where if name in self._tensors else None

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32; rows of q and k in half-split order."""
        value = self._reader.read(name)
        heads = self._heads.get(name.split(".")[-2])
        return value if heads is None else _half_split(value, heads)

    def _config(self) -> Config:
        """The metadata in the terms of config.json, which has one parser."""
        f, arch = self.fields, self.family.gguf

        def get(key: str, default: Any = None) -> Any:
            return f.get(f"{arch}.{key}", default)

        def need(key: str) -> Any:
            if (value := get(key)) is None:
                raise ValueError(f"{self.where}: metadata {arch}.{key!r} is missing")
            if isinstance(value, list):
                raise ValueError(f"{self.where}: {arch}.{key} differs from layer to layer, which is not supported")
            return value

        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{self.where}: tensor 'token_embd.weight' is missing")
        heads, hidden, ids = need("attention.head_count"), need("embedding_length"), "tokenizer.ggml.{}_token_id"
        head_dim = get("attention.key_length") or hidden // heads
        if (turned := get("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"{self.where}: {arch}.rope.dimension_count {turned} is not the head size {head_dim}: not supported")
        config = parse(
            {
                "architectures": [self.family.architecture],
                "vocab_size": self._tensors["token_embd.weight"].shape[0],
                "hidden_size": hidden,
                "num_hidden_layers": need("block_count"),
                "num_attention_heads": heads,
                "num_key_value_heads": need("attention.head_count_kv") if get("attention.head_count_kv") is not None else heads,
                "head_dim": head_dim,
                "intermediate_size": need("feed_forward_length"),
                "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
                "max_position_embeddings": need("context_length"),
                "rope_theta": get("rope.freq_base"),
                "rope_scaling": {
                    "rope_type": {"none": "default"}.get(kind := get("rope.scaling.type", "none"), kind),
                    "factor": get("rope.scaling.factor"),
                    "original_max_position_embeddings": get("rope.scaling.original_context_length"),
                    "beta_fast": get("rope.scaling.yarn_beta_fast"),
                    "beta_slow": get("rope.scaling.yarn_beta_slow"),
                },
                "tie_word_embeddings": "output.weight" not in self._tensors,
                "attention_bias": "blk.0.attn_q.bias" in self._tensors,
                "bos_token_id": f.get(ids.format("bos")),
                "eos_token_id": f.get(ids.format("eos")),
            },
            self.where,
        )
        if "rope_freqs.weight" in self._tensors:  # Llama 3's scaling, as a divisor for each pair
            divisors = self._reader.read("rope_freqs.weight").astype(float).tolist()
            if len(divisors) != head_dim // 2:
                raise ValueError(f"{self.where}: tensor 'rope_freqs.weight' has {len(divisors)} values, not {head_dim // 2}")
            rope = Rope(head_dim, config.rope.theta, "factors", (("factors", tuple(divisors)),))
            config = dataclasses.replace(config, rope=rope)
        return config


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair 0 first, pair 0 second, pair 1 first, ...) of each head to (all firsts, all seconds)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
