"""Qwen3 dense: RMS norm on each head of q and k before RoPE; head size independent of the hidden size."""

from .family import Family, refuse_sliding


def _traits(c):
    refuse_sliding(c)
    bias = bool(c.get("attention_bias"))
    return {"qk_norm": True, "head_dim": c.get("head_dim") or 128, "qkv_bias": bias, "o_bias": bias}


FAMILY = Family(name="qwen3", architecture="Qwen3ForCausalLM", gguf="qwen3", traits=_traits)
