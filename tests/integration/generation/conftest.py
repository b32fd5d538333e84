"""Fixtures of generation."""

from tests.fixtures.native_steps import steps  # noqa: F401
from tests.fixtures.static_generation import counters  # noqa: F401
