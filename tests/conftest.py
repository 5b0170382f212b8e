"""For all tests: what a file compiled is let go at its end, because a process can map only so much code (vm.max_map_count)."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled() -> Iterator[None]:
    yield
    jax.clear_caches()
