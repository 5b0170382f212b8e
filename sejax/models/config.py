"""A model's sizes and settings, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from . import families, rope

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class Config:
    """Static and hashable. Sizes in elements; max_position in tokens; eos_ids: every id that ends an answer."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: rope.Rope
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    max_position: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def digest(self) -> str:
        """Hex digest of the architecture, whatever file it was read from: the key of what was calibrated for a model."""
        sizes = (self.vocab_size, self.hidden_size, self.layers, self.heads, self.kv_heads, self.head_dim, self.intermediate_size)
        return hashlib.blake2b(f"{self.family} {sizes} {self.rope.theta:g}".encode(), digest_size=8).hexdigest()


def parse(given: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None) -> Config:
    """Config from the contents of config.json (and generation_config.json); `where` is the file named in errors."""

    def need(key: str) -> Any:
        if not given.get(key):
            raise ValueError(f"{where}: {key!r} is missing")
        return given[key]

    family = families.by("architecture", need("architectures")[0], where)
    heads, hidden, longest = need("num_attention_heads"), need("hidden_size"), int(given.get("max_position_embeddings") or 2048)
    kv_heads = int(given.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if given.get("quantization_config"):
        raise ValueError(f"{where}: quantised checkpoints (quantization_config) are not supported; use the original or a GGUF file")
    try:
        traits = family.traits(given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    head_dim = traits.pop("head_dim", None) or int(given.get("head_dim") or hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs pairs")
    activation = given.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{where}: hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    scaling = given.get("rope_parameters") or given.get("rope_scaling")
    ends = [*_ids(given.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id"))]
    return Config(
        family=family.name,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=need("intermediate_size"),
        rope=rope.parse(scaling, float(given.get("rope_theta") or 10000.0), head_dim, longest, where),
        norm_eps=float(given.get("rms_norm_eps") or 1e-6),
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        activation=activation,
        max_position=longest,
        bos_id=next(iter(_ids(given.get("bos_token_id"))), None),
        eos_ids=tuple(dict.fromkeys(ends)),
        **traits,
    )


def read(directory: pathlib.Path) -> Config:
    """Config of a Hugging Face directory."""
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{directory}: no config.json; a model directory holds config.json, *.safetensors and tokenizer.json")
    extra = directory / "generation_config.json"
    return parse(read_json(path), str(path), read_json(extra) if extra.exists() else None)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Contents of a JSON file; ValueError names it when it is malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(v) for v in value]
