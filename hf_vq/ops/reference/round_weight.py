"""The specification of `round_weight`: codes of rotated rows, errors passed on inside of blocks.

block 0          block 1          block 2
>>>>>>>>>>>>>>>>|>>>>>>>>>>>>>>>>|>>>>>>>>>>>>>>>>|      > errors passed on
step 0, 1, 2 ..  step 0, 1, 2 ..  step 0, 1, 2 ..
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from .encode_weight import Assigner

_PANEL = 32  # columns between two matrix products that pass errors on


def round_weight(
    rows: Tensor, scale: Tensor, codebook: Tensor, scheme: VQScheme, feedback: Tensor
) -> Tensor:
    """Codes [n, vectors, z]; see `ops.round_weight`."""
    assigner, width = Assigner(codebook, scheme), scheme.vector_size
    count, size = feedback.shape[:2]
    left = rows.unflatten(1, (count, size)).permute(1, 2, 0).contiguous()  # [blocks, size, n]
    each = count // scale.shape[1]  # blocks of a group
    unit = scale.float().T.repeat_interleave(each, 0)[:, None]  # [blocks, 1, n]
    divisor, n = unit.clamp_min(1e-30), len(rows)
    errors, codes = torch.empty_like(left), []
    step = max(_PANEL // width, 1) * width
    for panel in range(0, size, step):
        end = min(panel + step, size)
        for first in range(panel, end, width):
            block, later = slice(first, first + width), slice(first + width, end)
            vectors = (left[:, block] / divisor).transpose(1, 2).reshape(-1, width)
            codes.append(assigner.codes(vectors))
            found = assigner.entries(codes[-1]).reshape(count, n, width).transpose(1, 2)
            errors[:, block] = left[:, block] - found * unit
            left[:, later] += feedback[:, later, block] @ errors[:, block]
        done, rest = slice(panel, end), slice(end, None)
        left[:, rest] += feedback[:, rest, done] @ errors[:, done]
    steps = torch.stack(codes, 1).unflatten(0, (count, n))  # [blocks, n, vectors of a block, z]
    return steps.permute(1, 0, 2, 3).flatten(1, 2)
