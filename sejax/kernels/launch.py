"""The one door to Pallas: every kernel is started here, so that the day its Triton lowering goes, one file changes.

On a machine without an NVIDIA GPU (or an abstract one, for lowering tests) the same kernel runs interpreted.
Kernel bodies see whole arrays, never blocks: they index every axis by arrays and mask what they must not touch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sejax.types import Array

try:
    from jax.experimental.pallas import triton as plgpu

    PALLAS = True
except ImportError:  # its end is announced: attention then runs on triton_attend, every other kernel is its reference
    PALLAS = False
warnings.filterwarnings("ignore", message=".*Pallas Triton backend.*")

FAR = -1e30
"""Start of a running maximum: finite, so that no -inf - -inf arises."""


def on_gpu() -> bool:
    """Whether programs traced now are for an NVIDIA GPU."""
    return plgpu.is_gpu_device() if PALLAS else jax.default_backend() == "gpu"


def device() -> tuple[str, str]:
    """Kind and compute capability of the card that programs traced now are for, what is not known empty; both on a CPU."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.device_kind, ""
    card = jax.devices()[0]
    return (card.device_kind, str(card.compute_capability)) if card.platform == "gpu" else ("", "")


@functools.lru_cache(maxsize=2048)
def bound(kernel: Callable[..., None], **static: Any) -> Callable[..., None]:
    """A kernel with its static arguments: the same object for the same ones, so that layers share what JAX traced and lowered of it."""
    return functools.partial(kernel, **static)


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outs: Sequence[jax.ShapeDtypeStruct],
    args: Sequence[Array],
    *,
    name: str,
    warps: int = 4,
    stages: int = 2,
    aliases: dict[int, int] | None = None,
) -> list[Array]:
    """Run `kernel(*arg_refs, *out_refs)` over a static grid. `aliases` maps an argument to the output that reuses it."""
    return _made(kernel, grid, tuple(outs), name, warps, stages, tuple((aliases or {}).items()), not on_gpu())(*args)


@functools.lru_cache(maxsize=2048)
def _made(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
    name: str,
    warps: int,
    stages: int,
    aliases: tuple[tuple[int, int], ...],
    interpret: bool,
) -> Callable[..., list[Array]]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(outs),
        input_output_aliases=dict(aliases),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )


def load(ref: Any, *index: Any, mask: Array | None = None, other: Any = None) -> Array:
    """Masked read of `ref[index]`, all indices arrays or scalars."""
    return plgpu.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, *index: Any, value: Array, mask: Array | None = None) -> None:
    """Masked write of `ref[index]`."""
    plgpu.store(ref.at[index], value, mask=mask)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """a @ b (or a @ b.T) in fp32: 16-bit operands are exact, fp32 ones take three TF32 products on a GPU."""
    precise = a.dtype == jnp.float32 and on_gpu()
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if trans_b else 0,)), ((), ())),
        precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if precise else None,
        preferred_element_type=jnp.float32,
    )


def pow2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
