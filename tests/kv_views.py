"""Views of KV caches by the names of their arguments, and rows that are appended to one side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_vq.ops import KVCacheView, KVSide, kv_append
from hf_vq.ops.kv import ARGUMENTS, unflatten

_USUAL: dict[str, Any] = {name: 0 if hint is int else None for name, hint in ARGUMENTS.items()}
_USUAL |= {"key_layout": "rows", "value_layout": "rows"}


def view_of(**arguments: Any) -> KVCacheView:
    """The view with these arguments (`key_codes`, `window`); others are 0, None or `rows`."""
    unknown = arguments.keys() - ARGUMENTS.keys()
    assert not unknown, f"a view has no {sorted(unknown)}"
    return unflatten(*(_USUAL | arguments).values())


def append_kv(
    x: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    at: int,
    scheme: str,
    layout: str,
    slot_mapping: Tensor | None = None,
) -> None:
    """Encode x - mean [B, H, n, D] by `kv_append` to tokens `at`, `at` + 1, ... of one side, or to
    slots of pages."""
    view = one_side(x, mean, codebook, codes, scale, at, scheme, layout)
    kv_append(x, x[:, :, :0], view, slot_mapping)


def one_side(
    x: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    at: int,
    scheme: str,
    layout: str,
) -> KVCacheView:
    """The view that `append_kv` writes to, whose values are nothing."""
    kinds = (torch.uint8, torch.float16, torch.float16, x.dtype, x.dtype, x.dtype, x.dtype)
    shapes = ((0, 0, 0, 0),) * 3 + ((1, x.shape[1], 0, x.shape[3]),) * 4
    no_codes, no_scale, no_book, *floats = (
        x.new_empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)
    )
    key = KVSide(codes, scale, codebook, mean, *floats[:2], at, scheme, layout)
    value = KVSide(no_codes, no_scale, no_book, None, *floats[2:], 0, scheme, "rows")
    tokens = x.shape[2]
    return KVCacheView(key, value, None, None, None, None, tokens, 0, 0, tokens)
