"""Reading Hugging Face directories: layouts, dtypes, and a sentence that names what is wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sejax.models.loading as loading
from sejax.models import load
from sejax.models import logits as eager
from tests.golden import checkpoints
from tests.models import checkpoint

logits = jax.jit(eager)
TOKENS = checkpoints.tokens()[None, :40]


def _same(a, b):
    np.testing.assert_array_equal(logits(a, TOKENS), logits(b, TOKENS))


def _shard(path):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, path / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded(tmp_path):
    single, sharded = (checkpoint.directory(tmp_path / n, "llama_g1") for n in "ab")
    _shard(sharded)
    _same(load(single), load(sharded))
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index.json: names b.safetensors, which the directory lacks"):
        load(sharded)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_stored_dtypes(tmp_path, dtype):
    model = load(checkpoint.directory(tmp_path, "qwen2_g3", dtype))
    expected = checkpoints.tensors(checkpoints.CASES["qwen2_g3"])["model.layers.0.mlp.up_proj.weight"].astype(dtype)
    assert model.dtype == jnp.float32
    np.testing.assert_array_equal(model.params["layers"][0]["gate_up"][len(expected) :], expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compute_dtypes(tmp_path, dtype):
    path = checkpoint.directory(tmp_path, "qwen3_g4")
    low, full = load(path, dtype=dtype), load(path)
    assert low.dtype == dtype
    got = logits(low, TOKENS)
    assert got.dtype == jnp.float32
    error = np.abs(got - logits(full, TOKENS)).mean()
    assert 1e-5 < error < 0.1  # the logits' deviation is 2


def test_tied_config_wins(tmp_path):
    path = checkpoint.directory(tmp_path, "llama3_g4")
    plain = load(path)
    tensors = load_file(path / "model.safetensors")
    more = {"lm_head.weight": np.ones((97, 64), np.float32), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    save_file(tensors | more, path / "model.safetensors")
    _same(plain, load(path))
    assert "lm_head" not in load(path).params


def test_generation_config_and_eos(tmp_path):
    path = checkpoint.directory(tmp_path, "llama_g1", eos_token_id=[2, 3])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    config = load(path).config
    assert config.eos_ids == (2, 3, 5) and config.bos_id == 1 and hash(config)


BAD = [
    ({"architectures": ["MambaForCausalLM"]}, "config.json: architecture 'MambaForCausalLM' is not supported; supported are Llama"),
    ({"architectures": None}, "config.json: .architectures. is missing"),
    ({"rope_scaling": {"rope_type": "foo"}}, "config.json: rope type 'foo' is not supported; supported are default, linear, llama3, yarn"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope parameters that differ between layer types"),
    ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"num_key_value_heads": 2}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    ({"head_dim": 21}, "head_dim 21 is odd"),
    ({"hidden_act": "swoosh"}, "hidden_act 'swoosh' is not supported"),
    ({"hidden_size": None}, "config.json: 'hidden_size' is missing"),
    ({"quantization_config": {"bits": 4}}, "quantised checkpoints"),
    ({"intermediate_size": 71}, r"model.safetensors: tensor 'model.layers.0.mlp.gate_proj.weight' has shape \[72, 60\]"),
    ({"num_hidden_layers": 3}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_config(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        load(checkpoint.directory(tmp_path, "llama_g1", **changes))
    assert str(tmp_path) in str(error.value)


def test_sliding_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json: sliding-window layers"):
        load(checkpoint.directory(tmp_path, "qwen2_g3", use_sliding_window=True))


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="tensor 'lm_head.weight' is missing"):
        load(checkpoint.directory(tmp_path / "a", "llama_g1", drop="lm_head"))
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'model.embed_tokens.weight' is stored as I32"):
        load(checkpoint.directory(tmp_path / "b", "llama_g1", np.int32))
    cut = checkpoint.directory(tmp_path / "c", "llama_g1") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
        load(cut.parent)
    (cut.parent / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        load(cut.parent)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        load(tmp_path / "d")
    empty = checkpoint.directory(tmp_path / "e", "llama_g1")
    (empty / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*.safetensors file"):
        load(empty)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model.bin: not a model"):
        load(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="dtype 'int8' is not supported; choose one of float32"):
        load(empty, dtype="int8")
    for absent in ("no such model", "absent/file.gguf"):
        with pytest.raises(ValueError, match="is not a directory, a .gguf file, a demo model's name or a Hugging Face repo id"):
            load(absent)


def test_repository(tmp_path, monkeypatch):
    """owner/name is downloaded; a failure is a sentence."""
    path, asked = checkpoint.directory(tmp_path, "llama_g1"), []

    def download(repo, allow_patterns):
        asked.append((repo, tuple(allow_patterns)))
        if repo == "owner/absent":
            raise OSError("404: not found\nmore")
        return str(path)

    monkeypatch.setattr(loading.huggingface_hub, "snapshot_download", download)
    _same(load("owner/model-1.5"), load(path))
    assert asked == [("owner/model-1.5", ("*.json", "*.safetensors", "*.jinja"))]
    with pytest.raises(ValueError, match="model 'owner/absent' could not be downloaded from Hugging Face: 404: not found$"):
        load("owner/absent")
