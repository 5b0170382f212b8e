"""The table of block sizes: which card takes which row, every shape has one, and what a row asks of shared memory is there."""

from __future__ import annotations

import itertools

import jax
import pytest

from sejax.kernels import launch, triton_attend, tuned
from sejax.kernels.shapes import Listing, listing
from tests.kernels.test_triton_attend import compiled

KILOBYTES = {"SMALL": (tuned.SMALL, 89, 99), "H200": (tuned.H200, 90, 227)}


@pytest.mark.parametrize(
    "device, blocks",
    [
        (("NVIDIA H200", "9.0"), tuned.H200),
        (("NVIDIA H200", ""), tuned.H200),  # an abstract one says no more
        (("NVIDIA H100 80GB HBM3", "9.0"), tuned.H200),
        (("NVIDIA L4", "8.9"), tuned.SMALL),
        (("a card of next year", "13.0"), tuned.SMALL),
        (("", ""), tuned.H200),
    ],
)
def test_a_card_takes_its_own_rows_or_those_of_its_capability_or_small_ones(device, blocks, monkeypatch):
    monkeypatch.setattr(tuned, "device", lambda: device)
    assert tuned.blocks() is blocks


def test_the_device_is_the_one_that_a_program_is_traced_for():
    assert launch.on_gpu() or launch.device() == ("", "")
    card = jax.sharding.AbstractDevice("NVIDIA L4", 58, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=card)):
        assert launch.device() == ("NVIDIA L4", "")
        assert tuned.attend(128, 2, 4, 8) == tuned.SMALL.attend[0][1]


@pytest.mark.parametrize("name", KILOBYTES)
def test_every_shape_has_a_row(name, monkeypatch):
    monkeypatch.setattr(tuned, "blocks", lambda: KILOBYTES[name][0])
    huge = 10**9
    for size, itemsize, queries, pairs in itertools.product((64, 128, 256, huge), (1, 2, 4), (1, 16, 17, huge), (1, 265, huge)):
        assert queries > 16 or tuned.attend(size, itemsize, queries, pairs).tile == 16
    for size, itemsize, new in itertools.product((64, 256, huge), (2, 4), (1, 64, 65, huge)):
        assert tuned.mass(size, itemsize, new).block >= 16
    for rows, outs, gated in itertools.product((1, 2, 16, 17, 64, huge), (1, 6144, huge), (False, True)):
        assert tuned.product(rows, outs, gated).sums == (rows == 1)
    assert tuned.scores(64, 2).block >= tuned.scores(huge, 4).block >= 16


def test_one_query_of_a_long_row_is_not_cut_like_many_short_rows():
    assert tuned.attend(128, 2, 4, 8).stages > tuned.attend(128, 2, 4, 800).stages


@pytest.mark.slow
@pytest.mark.parametrize("size, dtype", [(64, "float32"), (128, "bfloat16"), (128, "float32"), (256, "bfloat16"), (256, "float32")])
@pytest.mark.parametrize("queries", [4, 64, 256])
@pytest.mark.parametrize("name", KILOBYTES)
def test_attention_fits_shared_memory(name, queries, size, dtype, monkeypatch):
    """Of the Triton twin, which is cut alike."""
    pytest.importorskip("triton")
    blocks, capability, most = KILOBYTES[name]
    monkeypatch.setattr(tuned, "blocks", lambda: blocks)
    shape = Listing(rows=2, group=4, new=queries // 4, size=size, dtype=dtype, entries=max(5, queries // 4))
    seen = compiled(monkeypatch, capability)
    q, view, _ = listing(shape, 0)
    triton_attend.attend(q, view)
    assert [x[0] for x in seen] == ["split", "merge"]
    assert all(shared <= most * 1024 for *_, shared in seen), seen
