"""Suites of times on a GPU."""
