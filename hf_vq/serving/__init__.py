"""Continuous batching of Transformers with pages of codes."""
