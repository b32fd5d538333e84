"""Baselines: the usual element-wise formats, simulated in float32.

Only the rounding is simulated; scales and zero points are fp16 where the format stores them so.
"""

from __future__ import annotations

import torch
from torch import Tensor

# QLoRA, appendix E (to seven digits).
_NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105),
    *(0.0, 0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0),
)


def round_to_nearest(weight: Tensor, bits: int = 4, group: int = 128) -> Tensor:
    """Asymmetric integers, a float32 minimum and step per group (QServe and GPTQ's baseline)."""
    w = weight.float().reshape(-1, group)
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-30)  # of a constant group
    rounded: Tensor = ((w - low) / step).round() * step + low
    return rounded.reshape(weight.shape)


def searched_integers(weight: Tensor, bits: int, group: int) -> Tensor:
    """Asymmetric integers, an fp16 minimum and step per group of a row, with the range of least
    squared error among seven clippings; the last group of a row may be shorter."""
    found = torch.empty_like(weight, dtype=torch.float32)
    for first in range(0, weight.shape[1], group):
        rows = weight[:, first : first + group].float()
        low, step = (x[:, None] for x in _clipped_range(rows, bits))
        codes = ((rows - low) / step).round().clamp(0, 2**bits - 1)
        found[:, first : first + group] = codes * step + low
    return found


def nf4(weight: Tensor, group: int = 64) -> Tensor:
    """NormalFloat 4 with one absolute maximum per group (QLoRA; bitsandbytes' default)."""
    levels = torch.tensor(_NF4, device=weight.device)
    w = weight.float().reshape(-1, group)
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-30)
    middles = (levels[1:] + levels[:-1]) / 2
    nearest = levels[torch.bucketize(w / scale, middles)]
    return (nearest * scale).reshape(weight.shape)


def asymmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """KV: asymmetric integers over `group` channels of one token, fp16 minimum and step.

    With group = head_dim this is QServe's KV4 (section 5.1, without SmoothAttention).
    """
    y = x.reshape(-1, group)
    low, high = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-8).half().float().clamp(min=6e-8)
    low = low.half().float()
    codes = ((y - low) / step).round().clamp(0, 2**bits - 1)
    rounded: Tensor = codes * step + low
    return rounded.reshape(x.shape)


def per_channel(x: Tensor, bits: int, tokens: int = 32) -> Tensor:
    """KV: asymmetric integers over `tokens` tokens of one channel (KIVI's keys); x [..., T, D]."""
    count = x.shape[-2]
    tail = -count % tokens
    if tail:  # the last tokens again: they cannot widen their group's range
        x = torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], tail, x.shape[-1])], -2)
    return asymmetric(x.transpose(-1, -2).contiguous(), bits, tokens).transpose(-1, -2)[
        ..., :count, :
    ]


def gptq(weight: Tensor, moments: Tensor, bits: int, group: int = 128) -> Tensor:
    """GPTQ (arXiv 2210.17323): asymmetric integers, column by column with error feedback.

    A group's minimum and step, fp16, are chosen when its first column is reached, with the range
    of least squared error among seven clippings. Damping is 1 % of the mean of H's diagonal.

    Args:
        weight: [out, in].
        moments: H [in, in], the mean of x x^T.
    """
    damped = moments.double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    left, rounded = weight.float().clone(), torch.empty_like(weight, dtype=torch.float32)
    for first in range(0, left.shape[1], group):
        part = slice(first, min(first + group, left.shape[1]))
        low, step = _clipped_range(left[:, part], bits)
        errors = torch.empty_like(left[:, part])
        for column in range(part.start, part.stop):
            codes = ((left[:, column] - low) / step).round().clamp(0, 2**bits - 1)
            rounded[:, column] = codes * step + low
            error = (left[:, column] - rounded[:, column]) / upper[column, column]
            later = slice(column + 1, part.stop)
            left[:, later] -= torch.outer(error, upper[column, later])
            errors[:, column - first] = error
        left[:, part.stop :] -= errors @ upper[part, part.stop :]
    return rounded


def awq(weight: Tensor, moments: Tensor, bits: int, group: int = 128) -> Tensor:
    """AWQ (arXiv 2306.00978): integers of W s, divided by s again, with s_i = rms(x_i)^a.

    The exponent a of 0, .05 .. 1 costs least in output error, by H. The paper has the mean of
    |x_i|, one a for all layers with the same input, and folds s into what makes x: so this is at
    least as good as its own.

    Args:
        weight: [out, in].
        moments: H [in, in], the mean of x x^T.
    """
    strength, best = moments.diagonal().clamp(min=1e-20).sqrt().float(), torch.inf
    found = weight.float()
    for step in range(21):
        s = strength ** (step / 20)
        s = s / (s.amax() * s.amin()).sqrt()
        rounded = searched_integers(weight.float() * s, bits, group) / s
        error = rounded - weight.float()
        cost = float((error @ moments.float()).mul_(error).sum(dtype=torch.float64))
        if cost < best:
            found, best = rounded, cost
    return found


def _clipped_range(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Minimum and step [n] of integers for `rows` [n, group], as fp16 keeps them."""
    best = torch.full((len(rows),), torch.inf, device=rows.device)
    found_low, found_step = torch.zeros(2, len(rows), device=rows.device)
    for factor in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
        low, high = rows.amin(1) * factor, rows.amax(1) * factor
        step = ((high - low) / (2**bits - 1)).half().float().clamp(min=6e-8)
        low = low.half().float()
        codes = ((rows - low[:, None]) / step[:, None]).round().clamp(0, 2**bits - 1)
        error = (codes * step[:, None] + low[:, None] - rows).square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        found_low = torch.where(better, low, found_low)
        found_step = torch.where(better, step, found_step)
    return found_low, found_step
