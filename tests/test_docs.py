"""The documentation says what is there: files it names exist, the example of a method works, commands it shows parse."""

import re
import shlex
from pathlib import Path

import jax.numpy as jnp
import pytest

from sejax import functional
from sejax.serve import cli
from tests.methods.extra import extra_methods
from tests.models.tiny import tiny_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page):
    text = page.read_text()
    named = re.findall(r"`((?:sejax|tests|bench|docs)/[\w/.\-]*\w/?)`", text)
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [n for n in named if not (ROOT / n).exists()] + [n for n in linked if not (page.parent / n).exists()]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_parse(page):
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(), re.S)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = re.match(r"\s*(?:\.venv/bin/)?sejax ([^#&|]*)", line)
        if words:
            cli.parser().parse_args(shlex.split(words[1]))


def test_the_example_of_a_method_works(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/add-a-method.md").read_text(), re.S)
    (tmp_path / "lastseen.py").write_text(code[1])
    with extra_methods(tmp_path) as methods:
        assert methods.describe("lastseen")["family"] == "eviction"
        model, tokens = tiny_model(), jnp.arange(40, dtype=jnp.int32)
        logits = {}
        for method in (methods.full(), methods.method("lastseen:budget=24,window=4")):
            cache = functional.init(model, method, 1, 64)
            logits[method.name], cache = functional.prefill(model, method, cache, tokens)
        assert jnp.allclose(logits["lastseen"], logits["full"], atol=1e-4)  # the first prompt sees all of itself
        assert all((kept >= 0).sum(-1).tolist() == [24] * len(kept) for kept in functional.kept(cache, 0))


@pytest.mark.slow
def test_the_readmes_program_runs(capsys):
    program = next(b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "import sejax" in b)
    exec(compile(program, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
