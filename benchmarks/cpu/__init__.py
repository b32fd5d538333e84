"""Suites of times on a CPU."""
