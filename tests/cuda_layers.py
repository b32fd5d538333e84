"""Layers for the tests of CUDA kernels: random tensors, memory full of NaN, and what is right."""

import torch

from hf_vq.formats import VQScheme
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.ops.reference import codes as reference
from tests.random_weights import random_tensors


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
    ones = torch.ones_like(tensors["scale"])
    rows = reference.decode_rotated(
        tensors["codes"], tensors["codebook"], ones, scheme, columns
    ).double()
    grouped = rows.unflatten(-1, (ones.shape[-1], -1))
    weight = (grouped * tensors["scale"].double()[..., None]).flatten(-2)
    exact = reference.rotate(x.double(), rotation, scheme, False) @ weight.T
    exact += 0 if bias is None else bias.double()
    rounded = reference.rotate(x.float(), rotation, scheme, False).to(dtype)
    same = torch.nn.functional.linear(rounded, weight.to(dtype), bias)
    eps = torch.finfo(dtype).eps * exact.norm()
    assert (y.double() - exact).norm() <= 2 * (same.double() - exact).norm() + eps
    assert (y.double() - exact).abs().max() <= 4 * (same.double() - exact).abs().max() + eps


def natural(rounded):
    """Tokens that a kernel rounded, in the order of columns: int8 [tokens, whole chunks of 128],
    their scales [tokens, 1] and their sums [tokens]."""
    tokens, chunks = rounded.tokens, -(-rounded.columns // 128)
    padded = -(-tokens // 8) * 8
    numbers = rounded.memory[: padded * chunks * 128].view(torch.int8)
    # Column 32 t + 16 h + 8 q + 2 i + odd of a chunk, as the kernels' headers draw them.
    if rounded.swizzled:
        pieces = numbers.view(chunks, padded, 8, 16)[:, :tokens]
        place = (
            torch.arange(8, device="cuda")[None] ^ torch.arange(tokens, device="cuda")[:, None] % 8
        )
        pieces = torch.stack([pieces[:, m, place[m]] for m in range(tokens)], 1)
        split = pieces.view(chunks, tokens, 2, 2, 2, 4, 4)  # h, q, odd, t, i
        ordered = split.permute(1, 0, 5, 2, 3, 6, 4)
    elif tokens == 1:
        split = numbers[: chunks * 128].view(chunks, 2, 4, 2, 2, 4)  # h, t, q, odd, i
        ordered = split.permute(0, 2, 1, 3, 5, 4)
    else:
        split = numbers.view(-1, chunks, 2, 8, 4, 2, 2, 4)  # token / 8, chunk, h, g, t, q, odd, i
        ordered = split.permute(0, 3, 1, 4, 2, 5, 7, 6).reshape(padded, -1)[:tokens]
    token = rounded.memory[rounded.token_at :].view(torch.float32).view(tokens, 2)
    return ordered.reshape(tokens, -1), token[:, :1], token.view(torch.int32)[:, 1]
