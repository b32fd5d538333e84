"""Layers for the tests of CUDA kernels: random tensors, and memory that is full of NaN."""

import torch

from hf_vq.bench.cpu_linear import random_tensors
from hf_vq.formats import VQScheme


def stored(spec, out_features, in_features):
    """A scheme, and the tensors of a layer on the GPU: random codes, scales and codebooks."""
    scheme = VQScheme.parse(spec)
    tensors = random_tensors(scheme, out_features, in_features)
    return scheme, {key: tensor.cuda() for key, tensor in tensors.items()}


def poison():
    """Fill the memory that the allocator gives next with NaN."""
    for size in (1 << 12, 1 << 18, 1 << 24):
        for _ in range(3):
            torch.full((size,), float("nan"), device="cuda")
