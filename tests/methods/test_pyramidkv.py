"""PyramidKV: the vectors. Scores are SnapKV's, tested there."""

import numpy as np
import pytest

from sejax import methods
from sejax.methods import pyramidkv as factory
from sejax.methods.pyramidkv import kept
from tests.methods.handmade import Sequence, spec_of, vectors

CASES = vectors("pyramidkv")


def capacities(spec: str, layers: int, slack: int) -> list[int]:
    method = methods.method(spec)
    return [method.layer(spec_of(1, 1, 2, i, layers), None).run(100000) - slack for i in range(layers)]


def test_official_budgets():
    case = CASES["official_budgets_total_including_window"]
    for row, expected, total in zip(
        case["inputs"]["rows"].tolist(), case["expected"]["kept_per_layer"], case["expected"]["sum"], strict=True
    ):
        length, budget, window, layers, beta = map(int, row)
        counts = [int(kept(length, budget, window, layers, layer, beta)) for layer in range(layers)]
        assert counts == [int(n) for n in expected] and sum(counts) == total


def test_fixed_budgets_are_the_official_ones_of_a_long_prompt():
    case = CASES["official_budgets_total_including_window"]
    for row, expected in list(zip(case["inputs"]["rows"].tolist(), case["expected"]["kept_per_layer"], strict=True))[:2]:
        _, budget, window, layers, beta = map(int, row)
        counts = capacities(f"pyramidkv:budget={budget},window={window},beta={beta},slack=1", layers, 1)
        assert counts == [int(n) for n in expected]
        mean = np.mean(counts)
        assert budget <= mean < 1.05 * budget


def kvpress_budgets(length, ratio, window, layers, beta):
    """kvpress's real-valued rule (METHODS 4.4), given as `budgets`."""
    kept_total = length * (1 - ratio)
    past = window + kept_total - window
    least = past / beta
    most = 2 * past - least
    if most >= length - window:
        most, least = length - window, 2 * past - (length - window)
    if not length >= most >= least >= window:
        return [round(kept_total)] * layers
    return [round(most - layer * (most - least) / (layers - 1)) for layer in range(layers)]


def test_lists_of_budgets():
    """kvpress's and Sparse-vLLM's schedules are lists for `budgets`; kvpress counts below the window do not apply (not kept there)."""
    case = CASES["kvpress_budgets_total"]
    for row, expected in zip(case["inputs"]["rows"].tolist(), case["expected"]["kept_per_layer"], strict=True):
        length, ratio, window, layers, beta = row
        counts = kvpress_budgets(int(length), ratio, int(window), int(layers), int(beta))
        assert counts == [int(n) for n in expected]
        shown = ",".join(map(str, counts))
        window = min(int(window), min(counts))
        assert capacities(f"pyramidkv:budgets=({shown}),window={window},slack=1", int(layers), 1) == counts
    case = CASES["sparse_vllm_ratio_schedule"]
    params, budgets = case["params"], case["expected"]["budget"].astype(int).tolist()
    ratios = np.linspace(params["start_ratio"], params["least_ratio"], 32)
    assert [int(params["num_sink"] + int(params["decode_keep"] * r / ratios[0]) + params["num_recent"]) for r in ratios] == budgets
    assert capacities(f"pyramidkv:budgets=({','.join(map(str, budgets))}),slack=1", 32, 1) == budgets


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_selection_three_layers(layer):
    case = CASES["selection_three_layers_same_scores"]
    inputs = case["inputs"]
    spec = "pyramidkv:budget=6,window=2,beta=2,kernel=1,slack=2,page=2"
    sequence = Sequence(spec, 1, 2, 2, 16, index=layer, layers=3)
    sequence.prompt(inputs["q"], inputs["k"], inputs["k"])
    assert sequence.kept == [[int(p) for p in case["expected"]["kept"][layer]]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(budget=8), "budget=8 must be larger than window=8"),
        (dict(beta=0), "beta=0"),
        (dict(budgets=(4, 100)), r"budgets=\(4, 100\) must each be at least window=8"),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        factory(**arguments)


def test_budgets_must_name_every_layer():
    with pytest.raises(ValueError, match="must name 3 layers"):
        factory(budgets=(100, 100)).layer(spec_of(1, 1, 2, 0, 3), None)
