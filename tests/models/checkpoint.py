"""Writes the golden random checkpoints as a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from sejax.models import families
from tests.golden import checkpoints


def directory(path: pathlib.Path, case: str, dtype: Any = np.float32, drop: str = "", **changes: Any) -> pathlib.Path:
    """config.json (with `changes`) and model.safetensors, without tensors whose name holds `drop`."""
    path.mkdir(parents=True, exist_ok=True)
    config = checkpoints.CASES[case]
    (path / "config.json").write_text(json.dumps(config | changes))
    kept = {k: v.astype(dtype) for k, v in checkpoints.tensors(config).items() if not (drop and drop in k)}
    save_file(kept, path / "model.safetensors")
    return path


def gguf_file(path: pathlib.Path, case: str, drop: str = "", quantise: Any = None, extra: Any = None, fields: Any = None) -> pathlib.Path:
    """The same checkpoint as llama.cpp's converter lays it out: names, and q and k rows for a rotation of neighbours."""
    config = checkpoints.CASES[case]
    family = families.by("name", config["model_type"], case)
    writer = gguf.GGUFWriter(path, family.gguf)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for add, *args in fields or ():
        getattr(writer, add)(*args)
    tensors = checkpoints.tensors(config)
    for name, value in tensors.items():
        target = _rename(family, name)
        if drop and drop in target:
            continue
        if family.interleaved and ("q_proj" in name or "k_proj" in name):
            value = _interleave(value, heads if "q_proj" in name else kv_heads)
        if quantise is not None and value.ndim == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(target, gguf.quants.quantize(value, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(target, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rename(family: Any, name: str) -> str:
    for hf, target in family.top.values():
        if hf == name:
            return target
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{dict(family.parts.values())[stem]}.{kind}"


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """(first halves, second halves) of each head to neighbouring pairs."""
    size = len(rows) // heads
    order = [h * size + j * (size // 2) + i for h in range(heads) for i in range(size // 2) for j in range(2)]
    return np.ascontiguousarray(rows[order])
