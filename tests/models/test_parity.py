"""Logits of small random checkpoints of every family against `transformers`; rope tables against closed forms."""

import pathlib

import jax
import numpy as np
import pytest

from sejax.models import load, logits
from sejax.models.rope import Rope, _table, parse
from tests.golden import checkpoints
from tests.models import checkpoint

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "parity.npz")


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_logits(case, tmp_path):
    model = load(checkpoint.directory(tmp_path, case), progress=False)
    got = jax.jit(logits)(model, checkpoints.tokens()[None])[0, :: checkpoints.SHOWN]
    np.testing.assert_allclose(got, GOLDEN[case], atol=2e-4, rtol=0)


def test_scaling_matters(tmp_path):
    """The golden input is long enough: without its scaling the same checkpoint answers differently."""
    for case in ("llama3_g4", "llama_linear_bias", "qwen2_yarn_g4"):
        model = load(checkpoint.directory(tmp_path / case, case, rope_scaling=None), progress=False)
        got = jax.jit(logits)(model, checkpoints.tokens()[None])[0, :: checkpoints.SHOWN]
        assert np.abs(got - GOLDEN[case]).max() > 0.1, case


@pytest.mark.parametrize("case", checkpoints.ROPES)
def test_rope_table(case):
    config = checkpoints.ROPES[case]
    table, factor = _table(parse(config["rope_parameters"], 1.0, config["head_dim"], config["max_position_embeddings"], case))
    np.testing.assert_allclose(table, GOLDEN[f"rope_{case}"][:-1], rtol=1e-6)
    np.testing.assert_allclose(factor, GOLDEN[f"rope_{case}"][-1], rtol=1e-6)


def test_llama3_closed_form():
    config = checkpoints.ROPES["llama3"]
    scaled, _ = _table(parse(config["rope_parameters"], 1.0, 128, 131072, ""))
    ratio = scaled / _table(Rope(128, 500000.0))[0]
    np.testing.assert_allclose(ratio[[0, 20, 30, 35, 40, 63]], [1, 1, 0.643743, 0.125, 0.125, 0.125], atol=1e-6)


def test_yarn_magnitude():
    given = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    assert _table(parse(given, 1e4, 128, 65536, ""))[1] == pytest.approx(1.2772588722239782, abs=1e-12)
    assert _table(parse({**given, "mscale": 1.0, "mscale_all_dim": 1.0}, 1e4, 128, 65536, ""))[1] == 1.0


def test_rotation():
    """Half-split pairs turn by position * frequency, whatever axes lie between; dtype is kept."""
    rope, rng = Rope(6, 100.0), np.random.default_rng(0)
    x, positions = rng.standard_normal((2, 3, 4, 5, 6)).astype(np.float32), rng.integers(0, 99, (2, 3))
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * positions[..., None, None, None] * 100.0 ** -(np.arange(3) / 3))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(rope(x, positions), expected, atol=1e-5)
    np.testing.assert_allclose(rope(x[:, :, :, 0], positions), expected[:, :, :, 0], atol=1e-5)
    every = np.broadcast_to(positions[..., None], (2, 3, 4))
    np.testing.assert_allclose(rope(x, every), expected, atol=1e-5)
    assert rope(x.astype(jax.numpy.bfloat16), positions).dtype == jax.numpy.bfloat16
    assert hash(rope) == hash(Rope(6, 100.0))
