"""The benches run: on a model of nothing, so that a change of the engine's interface is noticed here."""

import itertools
import json
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import bench.engine
from bench import quality
from bench.demo import Run, Turn, all_turns, summary
from bench.forced import Answer
from bench.needles import Case
from bench.plot import Panel, chart, spread
from tests.models.tiny import tiny_model


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.engine, "RESULTS", tmp_path)
    return tmp_path / "cpu.jsonl"


def test_a_case_runs_and_is_recorded(results):
    line = bench.engine.overhead(tiny_model(layers=1), "full", length=20, steps=12, rounds=1)
    assert line["bare_ms"] > 0 and json.loads(results.read_text()) == line


def test_compilations_are_counted():
    with bench.engine.counted() as counts:
        jax.jit(lambda x: x + 41)(jnp.zeros(3))
    assert all(counts.values())


def test_demo_tables_fit_a_terminal():
    turns = [Turn(3900, 0, 20.0, 10.0, 3932, 512.0), Turn(3950, 3931, 0.3, None, 3951, 531.0)]
    runs = [Run("full", turns, 2e8, 3 * 10**8, 20.0), Run("snapkv:budget=512,slack=256", turns, 1e8, 10**8, 30.0)]
    console = Console(width=100, record=True)
    console.print(all_turns(runs))
    console.print(summary(runs))
    text = console.export_text()
    assert "0.50x" in text and "snapkv:budget=512,slack=256" in text


def test_a_chart_names_every_line_and_none_hides_another():
    panel = Panel("a < b", "budget", {name: [(1, 0.5), (2, 1)] for name in ("one", "two")}, {1: "1", 2: "2"}, {0: "0", 1: "1"})
    root = ElementTree.fromstring(chart([panel, panel]))
    lines = [e.attrib["points"] for e in root.iter() if e.tag.endswith("polyline")]
    assert lines[:2] == ["56.0,182.0 432.0,34.0", "56.0,179.5 432.0,36.5"] and len(lines) == 4
    texts = [(e.text, float(e.attrib["y"])) for e in root.iter() if e.tag.endswith("text")]
    assert texts.count(("a < b", 20.0)) == 2 and texts[-2:] == [("one", 38.0), ("two", 55.0)]


@pytest.mark.parametrize("count", [1, 2, 15, 30])
def test_names_of_lines_keep_apart(count):
    found = list(spread({str(i): 330.0 - i % 3 for i in range(count)}).values())
    assert all(b - a >= 17 for a, b in itertools.pairwise(found)) and found[0] >= 34 and (count > 15 or found[-1] <= 330)


def test_quality_adds_only_what_is_missing(tmp_path, monkeypatch):
    asked, model, page = [], tiny_model(layers=1), tmp_path / "page.md"
    page.write_text("before <!-- quality --> <!-- /quality --> after")

    def text_of(_, seed):
        asked.append(seed)
        return Case("needle", seed, list(range(seed, 40 + seed)), list(range(9)), range(4, 9), range(6, 8))

    def answers(_, methods, context, tail, dense):
        assert len(dense) == 1
        return [Answer(np.full(9, -1.0 - context[0]), np.arange(9) + (i > 0), []) for i in range(len(methods))]

    monkeypatch.setattr(quality.forced, "answers", answers)
    for name, value in dict(text_of=text_of, LENGTH=40, PARTS=(2, 4), ALPHAS=(0.2,), PAGE=page, RESULTS=tmp_path).items():
        monkeypatch.setattr(quality, name, value)
    monkeypatch.setattr(quality.sejax, "load", lambda *_, **__: model)
    quality.main(["full", "tova", "texts=1"])
    first = quality.read(tmp_path / "quality.jsonl")
    assert [(row["method"], row["at"], len(row["found"])) for row in first] == [("full", 1, 1), ("tova", 0.5, 1), ("tova", 0.25, 1)]
    quality.main(["full", "tova", "flashprefill", "texts=2"])
    rows = quality.read(tmp_path / "quality.jsonl")
    assert asked == [0, 1, 0] and rows[0]["logp"] == [-1.0, -2.0] and rows[2]["found"] == [False, False]
    quality.main(["full", "tova", "flashprefill", "texts=2"])
    assert quality.read(tmp_path / "quality.jsonl") == rows and asked == [0, 1, 0]
    shown = page.read_text()
    assert (
        shown.startswith("before")
        and "| `tova` | 100%, +0.00 | 0%, +0.00 |" in shown
        and "2 texts of 40 tokens" in shown
        and "| `flashprefill` |" in shown
        and "| 1/2 | 1/4 |" in shown
    )
    assert "tova" in (tmp_path / "page.svg").read_text()
