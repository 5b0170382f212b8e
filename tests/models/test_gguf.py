"""GGUF files written with the `gguf` package: the same logits as the Hugging Face layout."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

from sejax.models import load
from sejax.models import logits as eager
from sejax.models.gguf import _half_split
from sejax.models.rope import _table
from tests.golden import checkpoints
from tests.models import checkpoint

logits = jax.jit(eager)
TOKENS = checkpoints.tokens()[None, :100]


def _close(a, b, atol=1e-4):
    np.testing.assert_allclose(logits(a, TOKENS), logits(b, TOKENS), atol=atol, rtol=0)


def test_row_order():
    rows = np.arange(8.0)
    np.testing.assert_array_equal(_half_split(rows, 1), [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(_half_split(np.arange(16.0), 2)[8:], 8 + _half_split(rows, 1))


@pytest.mark.parametrize("case", ["llama_g1", "qwen2_g3", "qwen3_g4"])
def test_equals_directory(tmp_path, case):
    file = load(checkpoint.gguf_file(tmp_path / "m.gguf", case, extra={"unknown.weight": np.ones(3, np.float32)}))
    expected = load(checkpoint.directory(tmp_path / "hf", case))
    _close(file, expected)
    plain = dataclasses.replace(expected.config, bos_id=None, eos_ids=())
    assert dataclasses.replace(file.config, norm_eps=plain.norm_eps) == plain  # stored as a 32-bit float


def test_scalings(tmp_path):
    linear = [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR), ("add_rope_scaling_factor", 4.0)]
    fields = [*linear, ("add_rope_dimension_count", 20)]
    changed = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    _close(
        load(checkpoint.gguf_file(tmp_path / "a.gguf", "llama_g1", fields=fields)),
        load(checkpoint.directory(tmp_path / "a", "llama_g1", **changed)),
    )
    yarn = [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 64),
    ]
    _close(
        load(checkpoint.gguf_file(tmp_path / "b.gguf", "qwen2_yarn_g4", fields=yarn)),
        load(checkpoint.directory(tmp_path / "b", "qwen2_yarn_g4")),
    )
    with pytest.raises(ValueError, match="rope type 'longrope' is not supported"):
        fields = [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)]
        load(checkpoint.gguf_file(tmp_path / "c.gguf", "llama_g1", fields=fields))
    with pytest.raises(ValueError, match="rope.dimension_count 10 is not the head size 20"):
        load(checkpoint.gguf_file(tmp_path / "d.gguf", "llama_g1", fields=[("add_rope_dimension_count", 10)]))


def test_rope_factors(tmp_path):
    """llama.cpp stores Llama 3's scaling as a tensor of divisors; here with a tied head, so output.weight is absent."""
    expected = load(checkpoint.directory(tmp_path / "hf", "llama3_g4"))
    plain = dataclasses.replace(expected.config.rope, type="default", scaling=())
    divisors = (_table(plain)[0] / _table(expected.config.rope)[0]).astype(np.float32)
    file = load(checkpoint.gguf_file(tmp_path / "m.gguf", "llama3_g4", extra={"rope_freqs.weight": divisors}))
    assert file.config.tie_embeddings and file.config.rope.type == "factors"
    _close(file, expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_quantised(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    file = load(checkpoint.gguf_file(tmp_path / "m.gguf", "llama3_g4", quantise=kind))
    stored = checkpoints.tensors(checkpoints.CASES["llama3_g4"])["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    np.testing.assert_array_equal(file.params["layers"][1]["gate_up"][len(expected) :], expected)


def test_refusals(tmp_path):
    good = checkpoint.gguf_file(tmp_path / "good.gguf", "llama_g1")
    with pytest.raises(ValueError, match="m.gguf: tensor 'blk.1.ffn_up.weight' is missing"):
        load(checkpoint.gguf_file(tmp_path / "m.gguf", "llama_g1", drop="blk.1.ffn_up"))
    with pytest.raises(ValueError, match="e.gguf: tensor 'token_embd.weight' is missing"):
        load(checkpoint.gguf_file(tmp_path / "e.gguf", "llama_g1", drop="token_embd"))
    with pytest.raises(ValueError, match="tokenizer model 'bert' is not supported"):
        fields = [("add_tokenizer_model", "bert"), ("add_token_list", ["a"])]
        load(checkpoint.gguf_file(tmp_path / "t.gguf", "llama_g1", fields=fields))
    with pytest.raises(ValueError, match="pre-tokenizer 'tekken' is not supported; supported are"):
        fields = [("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", "tekken"), ("add_token_list", ["a"])]
        load(checkpoint.gguf_file(tmp_path / "p.gguf", "llama_g1", fields=fields))
    other = tmp_path / "other.gguf"
    gguf.GGUFWriter(other, "mamba").write_header_to_file()
    writer = gguf.GGUFWriter(other, "mamba")
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(ValueError, match="other.gguf: architecture 'mamba' is not supported; supported are llama, qwen2, qwen3"):
        load(other)
    for size, message in ((0, "damaged"), (3, "damaged"), (200, "damaged"), (good.stat().st_size - 4096, "the file ends inside")):
        (tmp_path / "cut.gguf").write_bytes(good.read_bytes()[:size])
        with pytest.raises(ValueError, match=f"cut.gguf: .*{message}"):
            load(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"PK" + good.read_bytes())
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(tmp_path / "cut.gguf")
