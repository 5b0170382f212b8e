"""The benches' way through the layers, one at a time for all methods, answers as the functional API does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import forced
from sejax import functional, methods
from tests.models.tiny import tiny_model

SPECS = (
    "full",
    "h2o:budget=12,period=0",
    "kvzip:ratio=0.4,sinks=2,chunk=16,tail=3,instruction_ids=(5,6,-1,7,-1,8),rule=kvpress",
    "quest:budget=8,page=4,dense_layers=1",
    "omnikv:observers=(0,),budget=9,wait=0",
    "flashprefill:alpha=0.5,block=4,tile=8,sinks=1,window=1,last=1,shortest=8,page=4",
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


def test_seals_share_programs_but_where_they_use_their_layer():
    forced.clear()
    model, ids = tiny_model(), list(range(40))
    alone = {"official": 1, "kvpress": len(model.params["layers"])}
    for rule, count in alone.items():
        method = methods.method(f"kvzip:ratio=0.4,sinks=2,instruction_ids=(5,6,-1,7,-1,8),rule={rule}")
        forced.answers(model, [method], ids, ids[:4])
        assert len({id(record) for record in forced.SEALS[method, 40]}) == count
