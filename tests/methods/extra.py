"""Methods that exist for one test: a folder of modules beside the real ones."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import sejax.methods as methods


def _forget() -> None:
    for cached in (methods._modules, methods.names):
        cached.cache_clear()


@contextlib.contextmanager
def extra_methods(folder: Path) -> Iterator[ModuleType]:
    """`sejax.methods` with the modules of `folder`, until the block ends."""
    before = list(methods.__path__)
    methods.__path__ = [*before, str(folder)]
    _forget()
    try:
        yield methods
    finally:
        methods.__path__ = before
        _forget()
        for file in folder.glob("*.py"):
            methods.__dict__.pop(file.stem, None)
            methods.sys.modules.pop(f"sejax.methods.{file.stem}", None)
