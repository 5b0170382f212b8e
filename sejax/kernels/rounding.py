"""Rounding that keeps a bound a bound."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from sejax.types import Array


def outward(x: Array, dtype: Any, up: bool) -> Array:
    """x f32 rounded to what `dtype` can hold, up or down, still f32; types of 16 and more bits take it as it is.

    Beyond the largest finite value (448 for float8_e4m3fn) it is cut: keys after RoPE stay far below.
    """
    info = jnp.finfo(dtype)
    if info.bits > 8:
        return x
    exponent = jnp.maximum((lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255) - 127, info.minexp)
    step = lax.bitcast_convert_type((exponent - info.nmant + 127) << 23, jnp.float32)
    most = float(info.max)
    return jnp.minimum(jnp.maximum((jnp.ceil if up else jnp.floor)(x / step) * step, -most), most)
