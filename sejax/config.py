"""What the surroundings decide: the only module that reads environment variables. Read once, frozen, no other imports of sejax."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Settings:
    """cache_dir: downloaded models (in `models/`). compile_cache: XLA programs kept between processes.

    SEJAX_CACHE_DIR sets the first (default ~/.cache/sejax), JAX_COMPILATION_CACHE_DIR the second (default `xla` inside it).
    Hub tokens and proxies are read by the libraries that use them, not here.
    """

    cache_dir: Path
    compile_cache: Path

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Settings from a mapping of variables; an empty value counts as unset."""
        cache = Path(environment.get("SEJAX_CACHE_DIR") or "~/.cache/sejax").expanduser()
        programs = environment.get("JAX_COMPILATION_CACHE_DIR")
        return cls(cache, Path(programs).expanduser() if programs else cache / "xla")


@functools.cache
def settings() -> Settings:
    """The settings of this process; later changes of the environment have no effect."""
    return Settings.read(os.environ)
