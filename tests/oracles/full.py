"""Every token is held and read."""

from tests.oracles.transformer import Layer as Oracle  # noqa: F401
