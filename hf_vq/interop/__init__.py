"""Checkpoints of other projects: loaded by Transformers, converted to our format."""
