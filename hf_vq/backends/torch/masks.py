"""Masks of attention over a coded cache: what one hides, and the rule of the window.

All layers ask the same of a mask, so what is found out about it is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_COMPARED = 16 << 20  # numbers of a mask at a time

Result = TypeVar("Result")
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remembered(tensor: Tensor, make: Callable[..., Result], *given: object) -> Result:
    """`make(tensor, *given)`, and the same again while nobody writes to the tensor: all layers ask
    the same of one mask, and the GPU is not waited for again."""
    if tensor.is_inference():  # nobody counts how often it is written
        return make(tensor, *given)
    known = _known.setdefault(tensor, {})
    key = (make, tensor._version, *given)
    if key not in known:
        if not known or next(iter(known))[1] != tensor._version:
            known.clear()
        known[key] = make(tensor, *given)
    result: Result = known[key]
    return result


def left_padding(mask: Tensor, queries: int, length: int) -> list[int] | None:
    """Of each row, how many tokens a mask hides from all queries, if it is causal otherwise; else
    None. Waits for the GPU.

    Args:
        mask: bool [B, 1, Q, length]; of other masks it is None.
    """
    if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != queries:
        return None
    mask = mask[:, 0, :, :length]
    start = mask[:, -1].byte().argmax(-1)
    i = torch.arange(length - queries, length, device=mask.device)[:, None]
    j = torch.arange(length, device=mask.device)
    seen = j >= start[:, None, None]
    step = max(_COMPARED // (len(mask) * length), 1)
    equal = [
        (mask[:, at : at + step] == (seen & (j <= i[at : at + step]))).all()
        for at in range(0, queries, step)
    ]
    *starts, is_causal = torch.cat([start, torch.stack(equal).all()[None]]).tolist()
    return starts if is_causal else None


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, whose tensors exist once it has run."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=8)  # the next prompt asks the same too
def band_rule(
    queries: int, window: int, floats: int, codes: int, sinks: int, sink: int, last: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Which query reads which sinks, floats and codes of the band: bool [1, 1, Q, n].

    Positions count from a; the first query is at `floats`.

    Args:
        codes: b.
        sinks: how many.
        sink: position of the first of them that is not in front of a.
        last: position behind it and those after it.
    """
    with torch.inference_mode(False):
        i = torch.arange(floats, floats + queries, device=device)[:, None]
        j = torch.arange(floats, device=device)
        near, other = j > i - window, (j < sink) | (j >= last)
        columns = [near.new_ones(queries, sinks), (near | (j >= codes)) & other]
        return torch.cat([*columns, (~near & other)[:, :codes]], 1)[None, None]
