"""Run as a process of its own, TRITON_INTERPRET=1: the Triton attention on numpy arrays against the reference, for shapes named.

Triton decides at import whether its functions are compiled or interpreted, and its launcher expects tensors of another library:
here an array's address and type stand for them.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime import interpreter

from sejax.kernels import attention, triton_attend, triton_kernels
from sejax.kernels.shapes import SMALL, Listing, listing
from sejax.kernels.tuned import Attend

NAMES = {"float32": "fp32", "int32": "i32", "float8_e4m3fn": "fp8e4nv"}  # not bfloat16: the interpreter cannot multiply it
whole = interpreter._patch_lang_tensor


def patch(tensor: Any, scope: Any) -> None:
    """The interpreter's own, but numpy >= 2.5 takes no array of one element for a loop's bound."""
    whole(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))


def start(kernel: str, grid: tuple[int, ...], outs: Any, args: Any, *, warps: int, stages: int, **constants: Any) -> list[jax.Array]:
    """Stands in for `triton_attend.start`; outputs begin as NaN."""
    host = [np.array(x) for x in args] + [np.full(x.shape, np.nan, x.dtype) for x in outs]
    given = [SimpleNamespace(data_ptr=lambda x=x: x.ctypes.data, dtype=NAMES[x.dtype.name]) for x in host]
    getattr(triton_kernels, kernel)[grid](*given, **constants)
    return [jnp.asarray(x) for x in host[len(args) :]]


def check(shape: Listing) -> None:
    q, view, count = listing(shape._replace(dtype="float32"), 0)
    out, lse = triton_attend.attend(q, view, Attend(block=16, programs=5))
    view = view.replace(k=view.k.astype(jnp.float32), v=view.v.astype(jnp.float32))
    want, want_lse = getattr(attention.attend, "reference", attention.attend)(q, view)
    real = np.asarray(jnp.arange(shape.new) < count[:, None])
    for got, other in ((out, want), (lse, want_lse)):
        np.testing.assert_allclose(np.asarray(got)[real], np.asarray(other)[real], rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    interpreter._patch_lang_tensor = patch
    interpreter.GridExecutor._init_args_hst = lambda self, args, named: (list(args), named)
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    triton_attend.start = start
    for name in sys.argv[1:]:
        check(SMALL[name])
        print(name, "equal", flush=True)
