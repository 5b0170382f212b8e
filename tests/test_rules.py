"""The rules that keep the source in shape, checked on its syntax trees: imports, names of methods, jit, sizes, globals, environment."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {  # what a part of sejax may import from sejax, besides itself, types and config
    "types": set(),
    "config": set(),
    "kernels": set(),
    "cache": {"kernels"},
    "methods": {"cache", "kernels"},
    "models": {"cache", "kernels"},
    "step": {"cache", "kernels", "methods", "models"},
    "functional": {"cache", "kernels", "methods", "models", "step"},
    "serve": {"cache", "kernels", "methods", "models", "step", "functional", ""},
    "": {"cache", "kernels", "methods", "models", "functional", "serve"},
}
JIT_PLACES = {"sejax/serve/programs.py", "sejax/functional.py"}
HOST_ONLY = {"sejax/serve/schedule.py", "sejax/serve/request.py", "sejax/cache/chain.py", "sejax/config.py"}
MAX_FILE, MAX_FUNCTION = 400, 80


def sources() -> list[Path]:
    return sorted(path for folder in ("sejax", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))


def method_names() -> set[str]:
    """Modules of sejax/methods that define a function of their own name."""
    files = (ROOT / "sejax/methods").glob("*.py")
    return {f.stem for f in files if re.search(rf"^def {f.stem}\b", f.read_text(), re.M)}


def check(path: str, text: str, methods: set[str]) -> list[str]:
    """Every broken rule of one file, as "path:line: sentence". `path` is relative to the repository, with slashes."""
    tree = ast.parse(text)
    found = [f"{path}: has {len(text.splitlines())} lines; split it (at most {MAX_FILE})"] if len(text.splitlines()) > MAX_FILE else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{path}:{node.lineno}: global {', '.join(node.names)}; pass it or put it in an object")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _length(node) > MAX_FUNCTION:
            found.append(f"{path}:{node.lineno}: {node.name} has {_length(node)} lines (at most {MAX_FUNCTION})")
    if path.startswith("sejax/"):
        inner = {*_imports(path, tree), *_uses(path, tree), *_names(path, tree, methods)}
        found += [f"{path}:{line}: {what}" for line, what in sorted(inner)]
    return found


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _imported(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions. `from a import b` counts as a.b."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def _layer(path: str) -> str:
    part = path.removeprefix("sejax/").split("/")[0].removesuffix(".py")
    return "" if part.startswith("__") else part


def _imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    own = _layer(path)
    assert own in LAYERS, f"{path}: a new part of sejax; say in LAYERS what it may import"
    for line, name in _imported(path, tree):
        parts = name.split(".")
        if parts[0] == "torch":
            yield line, "imports torch; sejax is free of it"
        if parts[0] in ("jax", "jaxlib", "flax") and path in HOST_ONLY:
            yield line, f"imports {parts[0]}; this file is host policy only"
        if parts[0] == "sejax":
            target = parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""
            if target not in LAYERS[own] | {own, "types", "config"}:
                yield line, f"{own or 'sejax'} must not import {name}"


def _uses(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        dotted = f"{node.value.id}.{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
        if dotted in ("jax.jit", "nnx.jit", "jax.pmap") and path not in JIT_PLACES:
            yield node.lineno, f"{dotted}; only {' and '.join(sorted(JIT_PLACES))} compile"
        if dotted in ("os.environ", "os.getenv", "os.putenv") and path != "sejax/config.py":
            yield node.lineno, f"{dotted}; only sejax/config.py reads the environment"
    for line, name in _imported(path, tree):
        if name in ("jax.jit", "jax.pmap", "flax.nnx.jit") and path not in JIT_PLACES:
            yield line, f"imports {name}; only {' and '.join(sorted(JIT_PLACES))} compile"
        if name in ("os.environ", "os.getenv") and path != "sejax/config.py":
            yield line, f"imports {name}; only sejax/config.py reads the environment"


def _names(path: str, tree: ast.AST, methods: set[str]) -> Iterator[tuple[int, str]]:
    """A method's name as a string, alone or as the head of a "name:key=value"; docstrings may talk of methods."""
    own = Path(path).stem if path.startswith("sejax/methods/") else None
    bodies = [n.body for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    texts = {id(s.value) for body in bodies for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words = re.findall(r"(?:^|[\s,;'\"(])(\w+):\w+=", node.value) + [node.value.strip()]
            for word in sorted({*words} & (methods - {own})):
                yield node.lineno, f"names the method {word!r}; ask what you need of the record instead"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path):
    broken = check(path.relative_to(ROOT).as_posix(), path.read_text(), method_names())
    assert not broken, "\n".join(broken)


def test_there_is_something_to_check():
    assert len(sources()) > 10 and all((ROOT / place).exists() for place in JIT_PLACES | HOST_ONLY - {"sejax/cache/chain.py"})


LONG = "def f():\n" + "    x = 1\n" * 80


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("sejax/kernels/a.py", "from sejax.cache import pool", "kernels must not import sejax.cache.pool"),
        ("sejax/kernels/a.py", "from ..cache.pool import x", "kernels must not import sejax.cache.pool.x"),
        ("sejax/methods/a.py", "def f():\n    import sejax.models.llama", "methods must not import"),
        ("sejax/models/a.py", "from sejax import methods", "models must not import sejax.methods"),
        ("sejax/models/a.py", "import sejax", "models must not import sejax"),
        ("sejax/models/a.py", "from . import x\nfrom .. import serve", "a.py:2: models must not import sejax.serve"),
        ("sejax/cache/a.py", "from sejax.serve.request import Prompt", "cache must not import"),
        ("sejax/functional.py", "from sejax.serve import engine", "functional must not import"),
        ("sejax/cache/a.py", "import torch.nn", "torch"),
        ("sejax/serve/schedule.py", "import jax.numpy as jnp", "host policy"),
        ("sejax/cache/chain.py", "from jax import Array", "host policy"),
        ("sejax/serve/a.py", "import jax\n\n@jax.jit\ndef f(): ...", "jax.jit; only"),
        ("sejax/serve/a.py", "f = functools.partial(jax.jit, static_argnums=0)", "jax.jit; only"),
        ("sejax/serve/a.py", "from jax import jit", "imports jax.jit"),
        ("sejax/serve/a.py", "import os\nx = os.environ['A']", "environment"),
        ("sejax/serve/a.py", "from os import getenv", "environment"),
        ("sejax/serve/a.py", "if method.name == 'snapkv': ...", "names the method 'snapkv'"),
        ("sejax/serve/a.py", "match m:\n    case 'snapkv': ...", "names the method 'snapkv'"),
        ("sejax/serve/a.py", "help = 'as in snapkv:budget=3'", "names the method 'snapkv'"),
        ("sejax/serve/a.py", "help = f'snapkv:budget={x}'", "names the method 'snapkv'"),
        ("sejax/methods/quest.py", "x = 'snapkv'", "names the method 'snapkv'"),
        ("sejax/serve/a.py", "def f():\n    global x\n    x = 1", "global x"),
        ("tests/a.py", "global x", "global x"),
        ("bench/a.py", LONG, "f has 81 lines"),
        ("sejax/cache/a.py", "\n" * 401, "has 401 lines"),
    ],
)
def test_broken_rules_are_found(path, text, sentence):
    assert any(sentence in line for line in check(path, text, {"snapkv", "quest"}))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sejax/methods/snapkv.py", "from sejax.cache.compose import compose\nx = 'snapkv'"),
        ("sejax/models/pull.py", "from sejax.config import settings\nimport sejax.types"),
        ("sejax/serve/programs.py", "from sejax.models.model import Model\nimport jax\nf = jax.jit(g)"),
        ("sejax/config.py", "import os\nx = os.environ"),
        ("sejax/serve/a.py", "def f():\n    'Like snapkv:budget=1.'\n    x = 'the snapkv paper'"),
        ("tests/a.py", "from sejax.serve import engine\nimport os\nx = os.environ, 'snapkv', jax.jit"),
        ("sejax/__init__.py", "from sejax.serve.engine import Engine\nfrom sejax.functional import init"),
    ],
)
def test_good_files_pass(path, text):
    assert check(path, text, {"snapkv", "quest"}) == []
