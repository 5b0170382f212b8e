"""Rotary position embedding, half-split form, with the scalings of long-context checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..kernels.heads import rotated
from ..types import Array

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotation, hashable and callable: rope(x, positions).

    dim: head size; theta: base; scaling: the type's parameters, by name; type: default, linear, llama3, yarn, or factors
    (a divisor for each pair, as GGUF's tensor rope_freqs stores Llama 3's scaling).
    Papers: Su et al. 2021 (arXiv 2104.09864); YaRN: Peng et al. 2023 (arXiv 2309.00071); llama3: Llama team 2024 (arXiv 2407.21783).
    """

    dim: int
    theta: float = 10000.0
    type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    def __call__(self, x: Array, positions: Array) -> Array:
        """Rotate x [*positions.shape, ..., D] by positions (integers, any leading axes of x). Computed in fp32."""
        return rotated(x, *self.angles(positions))

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin of each pair's angle: integers [...] -> f32[...,D/2], twice."""
        frequencies, factor = _table(self)
        angles = positions.astype(jnp.float32)[..., None] * frequencies
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def parse(parameters: Mapping[str, Any] | None, theta: float, dim: int, max_position: int, where: str) -> Rope:
    """Rope from config.json's `rope_parameters` or `rope_scaling` (old key `type`); ValueError names what is wrong and the file."""
    given = dict(parameters or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"{where}: rope parameters that differ between layer types are not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _NEEDS:
        raise ValueError(f"{where}: rope type {kind!r} is not supported; supported are {', '.join(_NEEDS)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor {given['partial_rotary_factor']} is not supported; only 1.0 is")
    if kind in ("yarn", "llama3") and not given.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = max_position
    if kind == "yarn" and not given.get("factor"):
        given["factor"] = max_position / given["original_max_position_embeddings"]
    for key in _NEEDS[kind]:
        if given.get(key) is None:
            raise ValueError(f"{where}: rope type {kind!r} needs {key!r}, which is missing")
    keys = _NEEDS[kind] + (_OPTIONAL if kind == "yarn" else ())
    scaling = tuple((k, given[k]) for k in keys if given.get(k) is not None)
    return Rope(dim, float(given.get("rope_theta") or theta), kind, scaling)


@functools.lru_cache(maxsize=64)
def _table(rope: Rope) -> tuple[np.ndarray, float]:
    """(radians a token f32[D/2], factor on cos and sin)."""
    s = dict(rope.scaling)
    plain = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    factor = 1.0
    if rope.type == "linear":
        plain = plain / s["factor"]
    elif rope.type == "factors":
        plain = plain / np.asarray(s["factors"], np.float64)
    elif rope.type == "llama3":
        plain = _llama3(plain, s)
    elif rope.type == "yarn":
        plain, factor = _yarn(plain, rope, s)
    return plain.astype(np.float32), factor


def _llama3(plain: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended linearly in turns per context."""
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = s["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (keep + (1 - keep) / s["factor"])


def _yarn(plain: np.ndarray, rope: Rope, s: dict[str, Any]) -> tuple[np.ndarray, float]:
    def index(turns: float) -> float:  # of the pair that turns so often in the original context
        return rope.dim * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    low, high = index(s.get("beta_fast") or 32), index(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    stretch = np.clip((np.arange(rope.dim // 2) - low) / (max(high - low, 0) or 0.001), 0, 1)
    if (factor := s.get("attention_factor")) is None:
        paired = s.get("mscale") and s.get("mscale_all_dim")
        factor = magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"]) if paired else magnitude(1.0)
    return plain * (1 - stretch + stretch / s["factor"]), float(factor)
