"""Fixtures of generation."""

from tests.fixtures.static_generation import counters  # noqa: F401
