"""The benches run: on a model of nothing, so that a change of the engine's interface is noticed here."""

import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import bench.engine
from bench.demo import Run, Turn, all_turns, summary
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
