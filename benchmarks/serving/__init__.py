"""Continuous batching over pages of codes, against floats."""
