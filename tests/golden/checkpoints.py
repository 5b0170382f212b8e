"""Small random checkpoints, one list for the script that made parity.npz and for the test that reads it. numpy only."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

VOCAB, LENGTH, SHOWN = 97, 288, 12  # tokens of the input; every SHOWN-th position's logits are kept


def _config(kind: str, heads: int, kv_heads: int, head_dim: int, tied: bool, **more: Any) -> dict[str, Any]:
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": heads * head_dim,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _qwen2(*args: Any, **more: Any) -> dict[str, Any]:
    config = _config("qwen2", *args, **more)
    del config["head_dim"]  # published Qwen2 configs have none
    return config | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "llama_g1": _config("llama", 3, 3, 20, tied=False, rope_theta=10000.0),
    "llama3_g4": _config("llama", 4, 1, 16, tied=True, rope_theta=500.0, rope_scaling={"rope_type": "llama3", **LLAMA3}),
    "llama3_new_keys": _config("llama", 6, 2, 24, tied=False, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}),
    "llama_linear_bias": _config(
        "llama", 6, 2, 12, tied=True, attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "qwen2_g3": _qwen2(3, 1, 20, tied=True, rope_theta=1000000.0),
    "qwen2_yarn_g4": _qwen2(4, 1, 24, tied=False, rope_theta=1000.0, rope_scaling={"type": "yarn", **YARN}),
    "qwen3_g4": _config("qwen3", 4, 1, 24, tied=False, hidden_size=40, rope_theta=1000000.0),
    "qwen3_g1_yarn": _config("qwen3", 2, 2, 20, tied=True, rope_parameters={"rope_type": "yarn", "rope_theta": 1000.0, **YARN}),
}


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint in Hugging Face's names, float32; each tensor's values depend on its name and shape only."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim") or e // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    kind, qkv_bias = config["model_type"], config.get("attention_bias") or config["model_type"] == "qwen2"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    for i in range(config["num_hidden_layers"]):
        at, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes |= {at + "q_proj": (q, e), at + "k_proj": (kv, e), at + "v_proj": (kv, e), at + "o_proj": (e, q)}
        shapes |= {mlp + "gate_proj": (f, e), mlp + "up_proj": (f, e), mlp + "down_proj": (e, f)}
        shapes |= {f"model.layers.{i}.{n}.weight": (e,) for n in ("input_layernorm", "post_attention_layernorm")}
        if kind == "qwen3":
            shapes |= {at + "q_norm.weight": (size,), at + "k_norm.weight": (size,)}
    out = {}
    for name, shape in shapes.items():
        if name.endswith("_proj"):
            biased = config.get("mlp_bias") if ".mlp." in name else qkv_bias and not (kind == "qwen2" and "o_proj" in name)
            out[f"{name}.weight"] = _random(f"{name}.weight", shape, 1.2 / shape[1] ** 0.5)
            if biased:
                out[f"{name}.bias"] = _random(f"{name}.bias", shape[:1], 0.3)
        elif "norm" in name:
            out[name] = 1 + _random(name, shape, 0.2)
        else:
            out[name] = _random(name, shape, 2 / shape[1] ** 0.5)
    return {name: value * (2 if "q_proj.weight" in name or "k_proj.weight" in name else 1) for name, value in out.items()}


def tokens() -> np.ndarray:
    """i32[LENGTH], the input of every case."""
    return np.random.default_rng(7).integers(0, VOCAB, LENGTH).astype(np.int32)


def _random(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(f"{name}{shape}".encode()))
    return (std * rng.standard_normal(shape)).astype(np.float32)


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    config = _config("llama", 2, 2, 128, tied=True, max_position_embeddings=131072)
    return config | {"rope_parameters": {"rope_theta": theta, **scaling}}


_LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": _rope(500000.0, rope_type="llama3", **_LONG),
    "linear": _rope(10000.0, rope_type="linear", factor=8.0),
    "yarn": _rope(1000000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    "yarn_16": _rope(10000.0, rope_type="yarn", factor=16.0, original_max_position_embeddings=4096),
    "yarn_mscale": _rope(
        10000.0, rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0, beta_fast=16
    ),
    "yarn_smooth": _rope(150000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
}
