"""The card's few-row products, norms, heads and row claims against their references: interpreted, lowered, and (gpu) on the card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import gpu_heads, gpu_linear, gpu_rows, heads, linear, rows, tuned
from sejax.models.decoder import _ACTIVATIONS
from tests.kernels.test_gpu_kernels import abstract, lowered


def given(count: int, outs: int, depth: int, gated: bool, dtype=jnp.float32, seed: int = 0):
    """x, w, bias, norm, residual."""
    rng = np.random.default_rng(seed)
    wide = outs * (2 if gated else 1)
    sizes = ((count, depth), (wide, depth), (wide,), (depth,), (count, outs))
    x, w, *rest = (jnp.asarray(rng.normal(size=s), dtype) for s in sizes)
    return x, w * depth**-0.5, *rest


def agree(got: jax.Array, want: jax.Array, atol: float) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=atol, rtol=atol)


def check_product(count: int, outs: int, depth: int, gate, tune=None, dtype=jnp.float32, seed: int = 0, atol: float = 1e-5) -> None:
    x, w, bias, norm, residual = given(count, outs, depth, gate is not None, dtype, seed)
    call = functools.partial(gpu_linear.product, tune=tune)
    for named in ({}, {"norm": norm}, {"residual": residual, "bias": bias}, {"norm": norm, "bias": bias}):
        wide = {name: array.astype(jnp.float32) for name, array in named.items()}  # the reference's own rounding is not to count
        want = linear.product.reference(x.astype(jnp.float32), w.astype(jnp.float32), gate=gate, eps=1e-5, **wide)
        agree(call(x, w, gate=gate, eps=1e-5, **named), want.astype(dtype), atol)


@pytest.mark.parametrize("count, sums", [(1, True), (2, False), (19, False)])
@pytest.mark.parametrize("outs, depth", [(32, 128), (40, 100)])
@pytest.mark.parametrize("gate", [None, jax.nn.silu])
def test_product(count, sums, outs, depth, gate):
    check_product(count, outs, depth, gate, tuned.Product(16, 64, sums=sums))


@pytest.mark.parametrize("gate", _ACTIVATIONS.values())
def test_every_gate(gate):
    check_product(2, 16, 64, gate, tuned.Product(16, 64))


@pytest.mark.parametrize("size", [64, 100])
def test_rms_norm(size):
    x, weight = given(3, 1, size, False)[0], given(3, 1, size, False)[3]
    agree(gpu_linear.rms_norm(x, weight, 1e-5), linear.rms_norm.reference(x, weight, 1e-5), 1e-6)


def check_heads(count: int, kv: int, group: int, size: int, normed: bool, dtype=jnp.float32, seed: int = 0, atol: float = 1e-6) -> None:
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.normal(size=(count, (kv * group + 2 * kv) * size)), dtype)
    cos, sin = (jnp.asarray(f(rng.normal(size=(count, size // 2))), jnp.float32) for f in (np.cos, np.sin))
    norms = tuple(jnp.asarray(rng.normal(size=size), dtype) for _ in "qk") if normed else None
    args = (qkv, cos, sin, norms, 1e-5, kv, group)
    for a, b in zip(gpu_heads.turned(*args), heads.turned.reference(*args), strict=True):
        agree(a, b, atol)


@pytest.mark.parametrize("kv, group, size", [(2, 1, 64), (1, 8, 96), (3, 3, 80), (2, 4, 128), (1, 2, 256)])
def test_heads(kv, group, size):
    for normed in (False, True):
        check_heads(3, kv, group, size, normed)


def claiming(batch: int, slots: int, kv: int, seed: int):
    """n, dropped, slot (the last row: padding), count."""
    rng = np.random.default_rng(seed)
    n, dropped = (jnp.asarray(rng.integers(0, 9, (slots, kv)), jnp.int32) for _ in "nd")
    slot = jnp.asarray([*rng.permutation(slots)[: batch - 1], slots], jnp.int32)
    return n, dropped, slot, jnp.asarray([*rng.integers(0, 4, batch - 1), 0], jnp.int32)


def check_claim(batch: int, slots: int, kv: int, new: int, seed: int) -> None:
    args = (*claiming(batch, slots, kv, seed), new, 9)
    for a, b in zip(gpu_rows.claim(*args), rows.claim.reference(*args), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kv, new", [(1, 1), (3, 3), (8, 5)])
def test_claim(kv, new):
    check_claim(4, 6, kv, new, seed=kv)


@pytest.mark.parametrize("count", [1, 16, 64])
@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_product_lowers_for_cuda(count, name):
    x, w, bias, norm, residual = abstract(given(count, 256, 512, True, jnp.bfloat16))
    gate = _ACTIVATIONS[name]
    assert gpu_linear.multiplies(x, w, gate=gate) == (name != "gelu")  # the exact one needs erf, which Pallas lacks
    if name == "gelu":
        return
    run = functools.partial(gpu_linear.product, gate=gate, eps=1e-5)
    kernels = lowered(lambda *a: run(a[0], a[1], bias=a[2], norm=a[3], residual=a[4]), x, w, bias, norm, residual).count("xla.gpu.triton")
    assert kernels == 2  # the norm and the product


def test_heads_and_claim_lower_for_cuda():
    half = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    norms = (jax.ShapeDtypeStruct((128,), jnp.bfloat16),) * 2
    qkv = jax.ShapeDtypeStruct((4, 48 * 128), jnp.bfloat16)
    assert "xla.gpu.triton" in lowered(lambda *a: gpu_heads.turned(*a, 1e-6, 8, 4), qkv, half, half, norms)
    assert "xla.gpu.triton" in lowered(lambda *a: gpu_rows.claim(*a, 1, 99), *abstract(claiming(4, 6, 8, 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 16, 64])
def test_card(count):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    for outs, depth, gate in ((6144, 4096, None), (4096, 4096, None), (1536, 576, jax.nn.silu), (960, 576, None), (576, 1536, jax.nn.gelu)):
        check_product(count, outs, depth, gate, None, jnp.bfloat16, seed, atol=3e-2)
    check_heads(count, 8, 4, 128, True, jnp.bfloat16, seed, atol=2e-2)
    check_heads(count, 3, 3, 64, False, jnp.bfloat16, seed, atol=2e-2)
    check_claim(count + 1, 99, 8, 1, seed)
