"""Finding methods by name, reading hyper-parameters from text, and what a docstring tells."""

import textwrap

import pytest

from sejax import methods
from sejax.types import Method
from tests.methods.extra import extra_methods

PICK = '''
"""A method made up for this test."""

from __future__ import annotations

from typing import Literal

from sejax.types import Method


def pick(
    budget: int | None = None, ratio: float = 0.5, window: int = 32, pooling: Literal["avg", "max"] = "avg",
    dense_layers: tuple[int, ...] = (), shared: bool = False, label: str = "x",
) -> Method:
    """Keeps what it picks.

    score = sum(q k).

    Family: retention
    Paper: Somebody, 2024,
        arXiv 0000.00000
    Differs: nothing.
    Keeps: `budget` tokens.
    Args:
        budget: tokens per kv head and layer,
            in total
        ratio (float): of the prompt, if no budget
    """
    return Method("pick", tuple(sorted(locals().items())), layer=None)
'''
OTHER = """
from sejax.types import Method

def needy(budget: int) -> Method:
    'Needs one.'
    return Method('needy', (), layer=None)
"""


@pytest.fixture
def package(tmp_path):
    """Three modules beside the real ones: two methods and a helper whose same-named function is no method."""
    (tmp_path / "pick.py").write_text(textwrap.dedent(PICK))
    (tmp_path / "needy.py").write_text(OTHER)
    (tmp_path / "helper.py").write_text("def helper() -> int:\n    return 1\n")
    with extra_methods(tmp_path) as methods:
        yield methods


def arguments(m: Method) -> dict:
    return dict(m.arguments)


def test_found_by_name(package):
    assert {"pick", "needy"} <= set(package.names()) and "helper" not in package.names()
    assert package.pick(budget=3) == package.method("pick", budget=3) == package.method("pick:budget=3") != package.method("pick")
    assert hash(package.method("pick:budget=3")) == hash(package.pick(budget=3))
    import sejax.methods.pick  # noqa: F401  the module must not hide the factory

    assert package.pick(budget=3) == package.method(package.pick(budget=3))
    with pytest.raises(AttributeError):
        package.nothing  # noqa: B018


def test_values_are_read_by_declared_type(package):
    m = package.method("pick: budget=1024, ratio=1 ,window=8,pooling=max,dense_layers=(0,1),shared=true,label=a b")
    assert arguments(m) == {
        "budget": 1024, "ratio": 1.0, "window": 8, "pooling": "max", "dense_layers": (0, 1), "shared": True, "label": "a b",
    }  # fmt: skip
    assert arguments(package.method("pick:budget=none,dense-layers=(3,)")) | {"budget": None, "dense_layers": (3,)} == arguments(
        package.method("pick:dense_layers=3")
    )
    assert arguments(package.method("pick", dense_layers=[1, 2], ratio=0.25))["dense_layers"] == (1, 2)


@pytest.mark.parametrize(
    "spec, keywords, sentence",
    [
        ("pik", {}, r"no method 'pik'\. Did you mean 'pick'\? Methods: .*needy.*pick"),
        ("pick:budgte=1", {}, r"no hyper-parameter 'budgte'\. Did you mean 'budget'\? It has: budget, ratio"),
        ("pick", {"windw": 1}, r"Did you mean 'window'"),
        ("pick:budget=many", {}, r"budget must be a whole number or none, not 'many'"),
        ("pick:budget=1.5", {}, r"budget must be a whole number"),
        ("pick", {"budget": True}, r"budget must be a whole number or none, not True"),
        ("pick:pooling=mean", {}, r"pooling must be 'avg' or 'max', not 'mean'"),
        ("pick:shared=maybe", {}, r"shared must be true or false"),
        ("pick:dense_layers=(a)", {}, r"dense_layers must be a tuple"),
        ("pick:budget", {}, r"'budget' should read key=value"),
        ("pick:budget=1,,", {}, r"should read key=value"),
        ("pick:budget=1", {"budget": 2}, r"budget is given twice"),
        ("needy", {}, r"needs budget, as in needy:budget=value"),
        ("", {}, r"no method ''"),
    ],
)
def test_mistakes_get_a_sentence(package, spec, keywords, sentence):
    with pytest.raises(ValueError, match=sentence):
        package.method(spec, **keywords)


def test_finished_methods_take_no_arguments(package):
    with pytest.raises(ValueError, match="finished method"):
        package.method(package.pick(), budget=1)


def test_describe(package):
    told = package.describe("pick")
    assert told["summary"] == "Keeps what it picks." and told["text"] == "score = sum(q k)."
    assert (told["family"], told["paper"]) == ("retention", "Somebody, 2024, arXiv 0000.00000")
    assert (told["differs"], told["keeps"]) == ("nothing.", "`budget` tokens.")
    assert told["args"] == {"budget": "tokens per kv head and layer, in total", "ratio": "of the prompt, if no budget"}
    assert told["defaults"]["window"] == 32 and next(iter(told["defaults"])) == "budget"
    with pytest.raises(ValueError, match="Did you mean 'pick'"):
        package.describe("pickk")


@pytest.mark.parametrize("name", methods.names())
def test_every_docstring_is_complete(name):
    """Summary, formula, every section, and every hyper-parameter in the order of the signature."""
    told = methods.describe(name)
    assert all(told[section] for section in ("summary", "text", "family", "paper", "differs", "keeps"))
    assert "=" in told["text"], "a formula"
    assert list(told["args"]) == list(told["defaults"]) and all(told["args"].values())
