"""NoMAD-Attention's scores, as the paper has them: look up instead of multiply (section 3).

T_s[c] = <pi_s(q), b_s,c>                        float tables of a query (section 3.1)
U_s[c] = round((T_s[c] - min_s) / step)          in 8 bits, min_s = min_c T_s[c] (section 3.2)
<q, k> ~ step sum_s U_s[code_s] + sum_s min_s

Equation 1 prints step = (max_s - min_s) / 2^8 and a floor. Taken literally every sub-quantizer has
a step of its own, so that their numbers cannot be added, the maximum falls into bucket 256, which 8
bits do not hold, and a floor shrinks every score. Here the step is one for all sub-quantizers of a
query, the largest range over 255, and rounding is to the nearest; FAISS's fast scan does the same.

The error of a score is at most S step / 2, and about step sqrt(S / 12) for S sub-quantizers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def score_tables(query: Tensor, codebook: Tensor) -> Tensor:
    """Float tables [..., heads, queries, S, entries] of queries [..., heads, queries, head_dim].

    Args:
        codebook: of the keys, [heads, S, entries, x].
    """
    parts = query.float().unflatten(-1, (codebook.shape[1], codebook.shape[3]))
    return torch.einsum("...hqsx,hscx->...hqsc", parts, codebook.float())


def quantized_tables(tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tables in 8 bits (equation 1; see the module).

    Args:
        tables: float32 [..., S, entries].

    Returns:
        U uint8 [..., S, entries], step [..., 1, 1], sum of the minima [..., 1, 1].
    """
    low = tables.amin(-1, keepdim=True)
    above = tables - low
    step = above.amax((-2, -1), keepdim=True) / 255
    levels = (above / step.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(0, 255)
    return levels.to(torch.uint8), step, low.sum(-2, keepdim=True)


def look_up(tables: Tensor, codes: Tensor) -> Tensor:
    """sum_s tables[s][code_s]: scores [..., heads, queries, tokens].

    Args:
        tables: [..., heads, queries, S, entries]; uint8 tables are summed as integers.
        codes: of the keys, [..., heads, tokens, S].
    """
    tables = tables.to(torch.int32) if tables.dtype == torch.uint8 else tables
    shape = torch.broadcast_shapes(tables.shape[:-3], codes.shape[:-2])
    index = codes.long().transpose(-1, -2)[..., None, :, :]  # [..., heads, 1, S, tokens]
    index = index.expand(*shape, tables.shape[-3], *index.shape[-2:])
    return tables.expand(*shape, *tables.shape[-3:]).gather(-1, index).sum(-2)
