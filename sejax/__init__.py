"""sejax: a sparse-first LLM inference engine in JAX. The public names; see docs/ and each function's docstring."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sejax.cache.method import combine as combine
    from sejax.functional import Cache as Cache
    from sejax.functional import Session as Session
    from sejax.functional import clear as clear
    from sejax.functional import decode as decode
    from sejax.functional import init as init
    from sejax.functional import kept as kept
    from sejax.functional import prefill as prefill
    from sejax.functional import put as put
    from sejax.functional import take as take
    from sejax.methods import method as method
    from sejax.models import Model as Model
    from sejax.models import load as load
    from sejax.models import logits as logits
    from sejax.serve.engine import Engine as Engine
    from sejax.serve.engine import Result as Result
    from sejax.serve.request import InvalidRequest as InvalidRequest
    from sejax.serve.request import Prompt as Prompt
    from sejax.serve.request import Sampling as Sampling
    from sejax.types import Method as Method

_HOME = {
    "sejax.cache.method": ("combine",),
    "sejax.functional": ("Cache", "Session", "clear", "decode", "init", "kept", "prefill", "put", "take"),
    "sejax.methods": ("method",),
    "sejax.models": ("Model", "load", "logits"),
    "sejax.serve.engine": ("Engine", "Result"),
    "sejax.serve.request": ("InvalidRequest", "Prompt", "Sampling"),
    "sejax.types": ("Method",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = [*sorted(_WHERE), "methods"]


def __getattr__(name: str) -> Any:
    """Names load their module when they are first used: `sejax --help` does not wait for jax."""
    if name == "methods":
        return importlib.import_module("sejax.methods")
    if name not in _WHERE:
        raise AttributeError(f"module 'sejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
