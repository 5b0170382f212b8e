"""The benches' way through the layers, one at a time for all methods, answers as the functional API does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import forced
from bench.plot import Panel, chart
from sejax import functional, methods
from tests.models.tiny import tiny_model

SPECS = (
    "full",
    "h2o:budget=12,period=0",
    "kvzip:ratio=0.4,sinks=2,chunk=16,tail=3,instruction_ids=(5,6,-1,7,-1,8),rule=kvpress",
    "quest:budget=8,page=4,dense_layers=1",
    "omnikv:observers=(0,),budget=9,wait=0",
)


@pytest.fixture(scope="module")
def answers():
    model, ids = tiny_model(), np.random.default_rng(0).integers(0, 101, 52).tolist()
    context, tail = ids[:40], ids[40:]
    return model, context, tail, dict(zip(SPECS, forced.answers(model, [methods.method(s) for s in SPECS], context, tail), strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_as_the_functional_api(answers, spec):
    model, context, tail, found = answers
    method = methods.method(spec)
    cache = functional.init(model, method, 1, 64)
    logits, cache = functional.prefill(model, method, cache, jnp.asarray(context))
    kept = [[[p for p in head if p >= 0] for head in layer.tolist()] for layer in functional.kept(cache, 0)]
    assert [[head.tolist() for head in layer] for layer in found[spec].kept] == kept
    for i, token in enumerate(tail):
        if i:
            assert found[spec].best[i] == int(jnp.argmax(logits))
            assert abs(found[spec].logp[i] - float(jax.nn.log_softmax(logits)[token])) < 1e-4
        rows, cache = functional.decode(model, method, cache, jnp.asarray([token]), jnp.asarray([0]))
        logits = rows[0]


def test_a_sparse_prompt_is_refused(answers):
    with pytest.raises(ValueError, match="not dense"):
        forced.answers(answers[0], [methods.method("flashprefill:alpha=0.5")], answers[1], answers[2])


def test_a_chart_is_well_formed():
    from xml.etree import ElementTree

    panel = Panel("a < b", "budget", {"one": [(1, 0.5), (2, 1)], "two": [(1, 0), (2, 0.25)]}, {1: "1", 2: "2"}, {0: "0", 1: "1"})
    root = ElementTree.fromstring(chart([panel, panel]))
    lines = [e.attrib["points"] for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 4 and lines[0] == "56.0,147.0 432.0,34.0" and lines[1].startswith("56.0,260.0")
