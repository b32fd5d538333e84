"""What is compared against: the usual element-wise formats, simulated in float32.

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
