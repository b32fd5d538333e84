"""Layers for the tests of CUDA kernels: random tensors, memory full of NaN, and what is right."""

import torch

from hf_vq.bench.cpu_linear import random_tensors
from hf_vq.formats import VQScheme
from hf_vq.ops import reference
from hf_vq.ops.codes import rotation_of, stored_arguments


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


def check(y, x, tensors, bias, scheme):
    """The error is at most twice that of the same product of rounded numbers in PyTorch."""
    columns, dtype, rotation = x.shape[-1], x.dtype, rotation_of(tensors)
    _, codebook, *_ = stored_arguments(tensors)
    ones = torch.ones_like(tensors["scale"])
    rows = reference.decode_rotated(tensors["codes"], codebook, ones, scheme, columns).double()
    grouped = rows.unflatten(-1, (ones.shape[-1], -1))
    weight = (grouped * tensors["scale"].double()[..., None]).flatten(-2)
    exact = reference.rotate(x.double(), rotation, scheme, False) @ weight.T
    exact += 0 if bias is None else bias.double()
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(dtype)
    same = torch.nn.functional.linear(rounded, weight.to(dtype), bias)
    eps = torch.finfo(dtype).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps
    assert (y.double() - exact).abs().max() <= 4 * (same.double() - exact).abs().max() + eps
