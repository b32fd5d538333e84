"""Fixtures of continuous batching."""

from tests.fixtures.continuous_batching import no_collection  # noqa: F401
