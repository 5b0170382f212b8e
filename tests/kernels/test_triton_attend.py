"""The Triton attention: when it is chosen, what it says without its packages, interpreted and compiled where triton is, on the card."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sejax.kernels import attention, dispatch, gpu_attend, triton_attend
from sejax.kernels.shapes import CARD, DECODE, SMALL, listing
from tests.kernels.test_gpu_kernels import apart, reference

ROOT = Path(__file__).parents[2]
TYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "float8_e4m3fn": "fp8e4nv"}
WITHOUT = "import sys; sys.modules['jax.experimental.pallas.triton'] = None; "


def process(code: list[str], **environment: str) -> str:
    """Output of a Python process in the repository's root."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, **environment, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, *code], cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_says_what_is_missing(monkeypatch):
    q, view, _ = listing(SMALL["one_row"], 0)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ImportError, match=r"jax_triton: pip install 'sejax\[cuda\]'"):
        triton_attend.attend(q, view)


def test_serves_pools_too_large_for_pallas(monkeypatch):
    q, view, _ = listing(SMALL["one_row"], 0)
    large = jax.ShapeDtypeStruct((2**20, *view.k.shape[1:]), jnp.float32)
    assert large.size == 2**30
    monkeypatch.setattr(dispatch, "on_gpu", lambda: True)
    monkeypatch.setattr(triton_attend, "attend", lambda q, view: "triton")
    monkeypatch.setattr(gpu_attend, "attend", lambda q, view: "pallas")
    monkeypatch.setattr(triton_attend, "lacks", lambda: "")
    assert attention.attend(q, view.replace(k=large, v=large)) == "pallas"
    large = jax.ShapeDtypeStruct((2**21, *view.k.shape[1:]), jnp.float32)
    assert attention.attend(q, view.replace(k=large, v=large)) == "triton"
    monkeypatch.setattr(triton_attend, "lacks", lambda: "it lacks all")
    assert not dispatch._attends(q, view.replace(k=large, v=large))


def test_serves_a_jax_whose_pallas_has_no_triton(monkeypatch):
    q, view, _ = listing(SMALL["one_row"], 0)
    monkeypatch.setattr(dispatch, "PALLAS", False)
    monkeypatch.setattr(dispatch, "on_gpu", lambda: True)
    monkeypatch.setattr(triton_attend, "attend", lambda q, view: "triton")
    monkeypatch.setattr(triton_attend, "lacks", lambda: "")
    assert attention.attend(q, view) == "triton"
    monkeypatch.setattr(triton_attend, "lacks", lambda: "it lacks all")
    with pytest.warns(UserWarning, match="it lacks all"):
        out, _ = attention.attend(q, view)
    assert out.shape == q.shape


def test_sejax_runs_without_pallas_for_triton():
    code = (
        "import sejax; from sejax.kernels import attention, launch; from sejax.kernels.shapes import SMALL, listing; "
        "q, view, _ = listing(SMALL['one_row'], 0); print(launch.PALLAS, attention.attend(q, view)[0].shape == q.shape)"
    )
    assert process(["-c", WITHOUT + code]).split() == ["False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_interpreted(name):
    pytest.importorskip("triton")
    script = str(ROOT / "tests/kernels/interpret_triton.py")
    assert process([script, name], TRITON_INTERPRET="1", JAX_PLATFORMS="cpu").split() == [name, "equal"]


def compiled(monkeypatch, capability: int = 90) -> list[tuple[str, bool, int]]:
    """What triton_attend starts from now on is compiled instead: kernel, whether it has matrix products, bytes of shared memory."""
    triton = pytest.importorskip("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    seen = []

    def start(kernel, grid, outs, args, *, warps, stages, **constants):
        function = getattr(importlib.import_module("sejax.kernels.triton_kernels"), kernel)
        arrays = [*args, *outs]
        signature = {name: "*" + TYPES[x.dtype.name] for name, x in zip(function.arg_names, arrays)}
        assert sorted([*signature, *constants]) == sorted(function.arg_names)
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
        source = triton.compiler.ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
        made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
        seen.append((kernel, "mma" in made.asm["ptx"], made.metadata.shared))
        return [jnp.zeros(x.shape, x.dtype) for x in outs]

    monkeypatch.setattr(triton_attend, "start", start)
    return seen


@pytest.mark.parametrize("name", [*SMALL, *CARD])
def test_compiles_for_an_h200(name, monkeypatch):
    seen = compiled(monkeypatch)
    shape = SMALL[name] if name in SMALL else CARD[name]._replace(rows=2, entries=4)
    q, view, _ = listing(shape, 0)
    triton_attend.attend(q, view)
    assert [x[:2] for x in seen] == [("split", True), ("merge", False)]
    assert all(shared <= 227 * 1024 for *_, shared in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CARD)
def test_card(name):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    q, view, count = listing(CARD[name], seed)
    close = 2e-5 if CARD[name].dtype == "float32" else 1e-2
    real = jnp.arange(CARD[name].new) < count[:, None]
    out, lse = jax.jit(triton_attend.attend)(q, view)
    want, want_lse = reference(attention.attend, q, view)
    assert out.shape == q.shape and out.dtype == q.dtype and np.all(np.isfinite(np.asarray(out, np.float32)))
    out, want = (jnp.where(real[:, :, None, None, None], x.astype(jnp.float32), 0) for x in (out, want))
    lse, want_lse = (jnp.where(real[:, :, None, None], x, 0) for x in (lse, want_lse))
    assert apart(out, want) < close
    assert apart(lse, want_lse) < close


@pytest.mark.gpu
def test_card_repeats_bit_equal():
    q, view, _ = listing(DECODE["b16_t2k_by_head"]._replace(entries=64), 0)
    run = jax.jit(triton_attend.attend)
    first = run(q, view)
    for _ in range(20):
        again = run(q, view)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_card_pool_past_32_bits():
    """A pool of 2^31 + 2^24 elements: rows that live in its first and last pages."""
    pages, heads, page, size = 2**16 + 2**9, 8, 32, 128
    k, v = (jax.random.normal(key, (pages, heads, page, size), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    q = jax.random.normal(jax.random.key(1), (2, 1, heads, 4, size), jnp.bfloat16)
    ids = np.stack([np.arange(8), pages - 1 - np.arange(8)]).astype(np.int32)
    view = attention.AttentionView(k=k, v=v, ids=jnp.asarray(ids), length=jnp.asarray([256, 250]), run=page)
    assert k.size > 2**31
    out, lse = jax.jit(attention.attend)(q, view)
    few = view.replace(k=k[ids.ravel()], v=v[ids.ravel()], ids=jnp.arange(16, dtype=jnp.int32).reshape(2, 8))
    want, want_lse = reference(attention.attend, q, few)
    assert apart(out, want) < 1e-2 and apart(lse, want_lse) < 1e-2


@pytest.mark.gpu
def test_card_without_pallas():
    code = (
        "import jax; from sejax.kernels import attention; from sejax.kernels.shapes import CARD, listing; "
        "q, view, _ = listing(CARD['plain'], 0); print('@triton_kernel_call' in jax.jit(attention.attend).lower(q, view).as_text()); "
        "out, _ = jax.jit(attention.attend)(q, view); want, _ = attention.attend.reference(q, view); "
        "print(float(abs(out.astype('float32') - want.astype('float32')).max()) < 0.05)"
    )
    assert process(["-c", WITHOUT + code], XLA_PYTHON_CLIENT_PREALLOCATE="false").split() == ["True", "True"]
