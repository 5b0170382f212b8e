"""Settings come from a mapping, with defaults; empty means unset."""

import dataclasses
from pathlib import Path

import pytest

from sejax.config import Settings, settings


def test_defaults_and_overrides():
    assert Settings.read({"SEJAX_CACHE_DIR": ""}) == Settings(Path.home() / ".cache/sejax", Path.home() / ".cache/sejax/xla")
    assert Settings.read({"SEJAX_CACHE_DIR": "/c"}) == Settings(Path("/c"), Path("/c/xla"))
    assert Settings.read({"JAX_COMPILATION_CACHE_DIR": "~/p"}).compile_cache == Path.home() / "p"


def test_read_once_and_frozen():
    assert settings() is settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().cache_dir = Path("/")  # type: ignore[misc]
