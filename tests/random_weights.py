"""Stored tensors of layers with random codes."""

from hf_vq.bench.cpu_linear import random_tensors

__all__ = ["random_tensors"]
