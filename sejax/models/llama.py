"""Llama 2, 3 and 3.1, SmolLM2 and every checkpoint with their layers."""

from .family import Family

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf="llama",
    interleaved=True,
    traits=lambda c: {
        "qkv_bias": bool(c.get("attention_bias")),
        "o_bias": bool(c.get("attention_bias")),
        "mlp_bias": bool(c.get("mlp_bias")),
    },
)
