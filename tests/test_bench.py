"""The benches run: on a model of nothing, so that a change of the engine's interface is noticed here."""

import bench.engine
import pytest
from bench.demo import Run, Turn, all_turns, summary
from rich.console import Console

from tests.models.tiny import tiny_model


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.engine, "RESULTS", tmp_path)
    return tmp_path / "cpu.jsonl"


def test_engine_cases(results):
    model, snapkv = tiny_model(layers=1), "snapkv:budget=24,window=4,slack=8"
    assert bench.engine.overhead(model, "full", length=20, steps=12, rounds=1)["bare_ms"] > 0
    assert bench.engine.concurrency(model, "full", streams=2, length=8, tokens=4, rounds=1)["ratio"] > 0
    assert bench.engine.compiles(model, snapkv, turns=3, chunks=(32,))["value"] == 0
    assert bench.engine.ttft(model, snapkv, history=100, new=5, rounds=1, max_len=256)["cold_s"] > 0
    assert len(results.read_text().splitlines()) == 4


def test_demo_tables_fit_a_terminal():
    turns = [Turn(3900, 0, 20.0, 10.0, 3932, 512.0), Turn(3950, 3931, 0.3, None, 3951, 531.0)]
    runs = [Run("full", turns, 2e8, 3 * 10**8, 20.0), Run("snapkv:budget=512,slack=256", turns, 1e8, 10**8, 30.0)]
    console = Console(width=100, record=True)
    console.print(all_turns(runs))
    console.print(summary(runs))
    text = console.export_text()
    assert "0.50x" in text and "snapkv:budget=512,slack=256" in text
