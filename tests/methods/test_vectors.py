"""Every case of every vector file is named by a test that reads the file, or a sentence here says why it is not."""

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.methods.handmade import VECTORS

HERE = Path(__file__).parent
NOT_OURS = {
    ("omnikv", "uniform_window_selector"): "omnikv selects by the last query alone; old queries would be rotated for another position",
    ("omnikv", "exp_window_selector"): "as the uniform window: no such selector",
}


def strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and tuples; a pytest.param is a tuple."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from strings(part)


def named(file: Path) -> set[str]:
    """Strings in a test file, and the values its tests are parametrized by."""
    written = {n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    module = importlib.import_module(f"tests.methods.{file.stem}")
    marks = [mark for test in vars(module).values() if callable(test) for mark in getattr(test, "pytestmark", [])]
    return written | {name for mark in marks if mark.name == "parametrize" for name in strings(mark.args[1])}


@pytest.mark.parametrize("vector", sorted(VECTORS.glob("*.json")), ids=lambda p: p.stem)
def test_every_case_is_named(vector):
    cases = {case["name"] for case in json.loads(vector.read_text())["cases"]}
    files = [file for file in sorted(HERE.glob("test_*.py")) if f'vectors("{vector.stem}")' in file.read_text()]
    excused = {case for method, case in NOT_OURS if method == vector.stem}
    assert excused <= cases, f"no such case: {sorted(excused - cases)}"
    assert cases - set().union(*map(named, files)) == excused
