"""Qwen2 and Qwen2.5: biases on q, k and v."""

from .family import Family, refuse_sliding


def _traits(c):
    refuse_sliding(c)
    return {"qkv_bias": True}


FAMILY = Family(name="qwen2", architecture="Qwen2ForCausalLM", gguf="qwen2", traits=_traits)
