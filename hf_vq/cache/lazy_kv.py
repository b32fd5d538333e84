"""What `VQCacheLayer.update` returns: a tensor of the right shape that is still made of codes.

The one rule: attention reads the codes when it is computed by the `vq` function or by PyTorch's
`scaled_dot_product_attention` (Transformers' `sdpa`), which the handle intercepts; it stays lazy
through the `repeat_kv` in front of it. Every other operation on a handle decodes it first, which is
right for any modelling code but slow, and is counted in `VQCache.fallbacks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import VQCacheError
from ..ops.attention import CachedKV, attention

_HEADS, _UNSQUEEZED, _EXPANDED = "heads", "unsqueezed", "expanded"  # stages of repeat_kv


class Owner(Protocol):
    """The cache layer that made a handle."""

    version: int

    def count_fallback(self) -> None:
        """Record that a handle was decoded, or raise if that is forbidden."""


class Update:
    """What one `update()` made visible; shared by the handle of the keys and that of the values."""

    def __init__(self, cached: CachedKV, owner: Owner) -> None:
        self.cached, self.owner, self.version = cached, owner, owner.version
        self._dense: dict[str, Tensor] = {}

    def check(self) -> None:
        """Raise VQCacheError if the tokens behind the handle were cropped since."""
        if self.version != self.owner.version:
            raise VQCacheError(
                "these keys or values were returned by an update() before a later crop() or "
                "reset(); they are gone. Use what the latest update() returned."
            )

    def dense(self, side: str) -> Tensor:
        """Decoded keys ("k") or values ("v") [B, H, length, D]; exact for the first fresh query."""
        if side not in self._dense:
            self.check()
            self.owner.count_fallback()
            first_query = self.cached.length - self.cached.fresh
            self._dense[side] = self.cached.dense(side, first_query)
        return self._dense[side]


class VQHandle(torch.Tensor):
    """Keys or values [B, H, tokens, D] that decode themselves when an operation touches them."""

    update: Update
    side: str
    form: str
    repeats: int
    sizes: torch.Size

    @staticmethod
    def __new__(cls, update: Update, side: str, form: str = _HEADS, repeats: int = 1) -> VQHandle:
        """A view of one side of an update; `repeats` and `form` follow `repeat_kv`."""
        cached = update.cached
        tail = cached.tail_k if side == "k" else cached.tail_v
        batch, heads, length, dim = tail.shape
        length += cached.tail_start
        sizes = torch.Size((batch, heads * repeats, length, dim))
        if form != _HEADS:
            sizes = torch.Size((batch, heads, 1 if form == _UNSQUEEZED else repeats, length, dim))
        handle: VQHandle = torch.Tensor._make_wrapper_subclass(
            cls, sizes, dtype=tail.dtype, device=tail.device
        )
        vars(handle).update(update=update, side=side, form=form, repeats=repeats, sizes=sizes)
        return handle

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As of any tensor; PyTorch's own goes through `__torch_function__`, at every question."""
        return self.sizes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VQHandle({list(self.shape)}, {self.dtype}, {self.side})"

    def decode(self) -> Tensor:
        """The dense tensor that this handle stands for."""
        rows = self.update.dense(self.side)
        if self.form == _UNSQUEEZED:
            return rows[:, :, None]
        if self.form == _EXPANDED:
            return rows[:, :, None].expand(self.shape)
        return rows if self.repeats == 1 else rows.repeat_interleave(self.repeats, 1)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if lazy := _LAZY.get(func):
            result = lazy(*args, **(kwargs or {}))
            if result is not None:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, VQHandle) else value


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor | None:
    """Attention on the codes behind two handles; None where only decoded tensors will do.

    Args:
        query: [B, Hq, Q, D], Q the tokens of the newest update.
        key: handle of the keys.
        value: handle of the values of the same update.

    Returns:
        [B, Hq, Q, Dv].
    """
    if type(key) is not VQHandle or type(value) is not VQHandle:
        return None
    update = key.update
    cached = update.cached
    same = update is value.update and key.side == "k" and value.side == "v"
    heads = key.form == value.form == _HEADS and query.shape[1] % cached.tail_k.shape[1] == 0
    differentiable = torch.is_grad_enabled() and query.requires_grad
    if not (same and heads and query.shape[2] == cached.fresh) or differentiable:
        return None
    if update.version != update.owner.version:
        update.check()
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return attention(query, cached, scaling=scaling, mask=mask, softcap=softcap, s_aux=s_aux)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or is_causal or not isinstance(key, VQHandle):
        return None
    fresh, packed = key.update.cached.fresh, query.shape[2]
    if attn_mask is not None:  # of any shape that broadcasts
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if fresh == 1 and packed > 1:
        # Transformers folds the query heads of one token into the query dimension (`pack_gqa`).
        if attn_mask is not None and attn_mask.shape[-2] != 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], -1, 1, attn_mask.shape[-1])
        one_token = query.reshape(query.shape[0], -1, 1, query.shape[-1])
        out = attend(one_token, key, value, scaling=scale, mask=attn_mask)
        return None if out is None else out.reshape(*query.shape[:-1], out.shape[-1])
    if attn_mask is None and packed > 1:
        return None  # without a mask PyTorch looks ahead; our op does not
    return attend(query, key, value, scaling=scale, mask=attn_mask)


def _getitem(handle: Any, index: Any) -> VQHandle | None:
    whole = slice(None)
    new_axis = (whole, whole, None, whole, whole)
    plain = isinstance(handle, VQHandle) and handle.form == _HEADS and handle.repeats == 1
    if plain and isinstance(index, tuple) and index == new_axis:
        return VQHandle(handle.update, handle.side, _UNSQUEEZED)
    return None


def _expand(handle: Any, *sizes: Any) -> VQHandle | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(handle, VQHandle) or handle.form != _UNSQUEEZED or len(sizes) != 5:
        return None
    keep = all(
        size in (-1, own)
        for axis, (size, own) in enumerate(zip(sizes, handle.shape, strict=True))
        if axis != 2
    )
    return VQHandle(handle.update, handle.side, _EXPANDED, int(sizes[2])) if keep else None


def _reshape(handle: Any, *sizes: Any) -> VQHandle | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(handle, VQHandle) or handle.form != _EXPANDED:
        return None
    merged = VQHandle(handle.update, handle.side, _HEADS, handle.repeats)
    return merged if tuple(sizes) == tuple(merged.shape) else None


def _contiguous(handle: Any, *args: Any, **kwargs: Any) -> VQHandle | None:
    return handle if isinstance(handle, VQHandle) and handle.form == _HEADS else None


_LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _scaled_dot_product_attention,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
    torch.Tensor.contiguous: _contiguous,
}
