"""Which methods go together, and what the others are told."""

import pytest

from sejax import methods
from sejax.cache.method import combine
from sejax.types import Method

EVICTS = ("snapkv", "pyramidkv", "expected_attention", "keydiff", "rkv", "h2o", "tova", "streamingllm")


@pytest.mark.parametrize("name", EVICTS[:5])
def test_a_retention_goes_with_pages(name):
    for both in (methods.method(f"{name} + quest:budget=512"), combine(methods.method("quest", budget=512), methods.method(name))):
        assert isinstance(both, Method) and both.order == "layer" and not both.growing
        assert dict(both.arguments)["quest.budget"] == 512


def test_combined_methods_are_equal_by_their_arguments():
    first, second = (methods.method("snapkv:budget=100+quest") for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != methods.method("snapkv:budget=101+quest")


def test_what_keeps_and_reads_everything_adds_nothing():
    quest = methods.method("quest")
    assert combine(methods.method("full"), quest) == quest == combine(quest, methods.method("full"))


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        ("h2o + quest", "h2o with quest: tokens that are not read receive no attention to be ranked by; use"),
        ("quest + tova", "quest with tova: tokens that are not read"),
        ("streamingllm + quest", "streamingllm with quest: all that is kept is read; use it alone"),
        ("snapkv + omnikv:observers=(2,)", "snapkv with omnikv: kept sets differ by layer and head.*; use"),
        ("omnikv:observers=(2,) + rkv", "omnikv with rkv: kept sets differ"),
        ("kvzip + omnikv:observers=(2,)", "kvzip with omnikv: kept sets differ by layer and head.*; use"),
        ("snapkv + h2o", "snapkv with h2o: both decide which tokens stay; use one of them"),
        ("quest + omnikv:observers=(2,)", "both decide which tokens are read; use one of them"),
        ("quest + quest", "both decide which tokens are read"),
    ],
)
def test_refusals(pair, sentence):
    with pytest.raises(ValueError, match=sentence):
        methods.method(pair)


def test_hyper_parameters_go_into_the_text():
    with pytest.raises(ValueError, match="names two methods"):
        methods.method("snapkv + quest", budget=3)
