"""What a compiled `VQStaticLayer.update` returns in place of keys and values.

It is no tensor, so that torch.compile follows it through a model like any Python object: through
`repeat_kv` to `scaled_dot_product_attention`, which torch lets it answer (`__torch_function__`), or
to the attention function `vq`. Nothing else can be done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..ops.static import StaticKV, attention_static

_ONLY = (
    "a compiled VQCache with max_cache_len can only be read by attention on codes: the attention "
    'implementations "sdpa" and "vq" of models that hand it keys and values as they are. Use '
    "VQCache(..., static=False)"
)


class StaticUpdate(NamedTuple):
    """What one update made visible: the layer, and the tokens of this update."""

    cached: StaticKV
    fresh: int


class StaticHandle:
    """Keys or values [B, H, capacity, D] of a static layer, or a stage of `repeat_kv` of them."""

    def __init__(
        self, update: StaticUpdate, side: str, repeats: int = 1, unsqueezed: bool = False
    ) -> None:
        self.update, self.side = update, side
        self.repeats, self.unsqueezed = repeats, unsqueezed

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for."""
        cached = self.update.cached
        batch, heads, _, dim = (cached.tail_k if self.side == "k" else cached.tail_v).shape
        capacity = cached.capacity
        if self.unsqueezed:
            return torch.Size((batch, heads, self.repeats, capacity, dim))
        return torch.Size((batch, heads * self.repeats, capacity, dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that it stands for."""
        cached = self.update.cached
        return (cached.tail_k if self.side == "k" else cached.tail_v).dtype

    @property
    def device(self) -> torch.device:
        """Of the tensor that it stands for."""
        return self.update.cached.tail_k.device

    def __getitem__(self, index: Any) -> StaticHandle:
        # slices cannot be compared while compiling
        if len(index) != 5 or index[2] is not None or self.unsqueezed or self.repeats > 1:
            self._refuse()
        return StaticHandle(self.update, self.side, 1, True)

    def expand(self, *sizes: int) -> StaticHandle:
        """As in `repeat_kv`: [B, H, repeats, capacity, D]."""
        if len(sizes) != 5 or not self.unsqueezed:
            self._refuse()
        return StaticHandle(self.update, self.side, sizes[2], True)

    def reshape(self, *sizes: int) -> StaticHandle:
        """As in `repeat_kv`: [B, H * repeats, capacity, D]."""
        if len(sizes) != 4 or not self.unsqueezed:
            self._refuse()
        return StaticHandle(self.update, self.side, self.repeats)

    def contiguous(self) -> StaticHandle:
        """The same."""
        return self

    def _refuse(self) -> NoReturn:
        raise VQCacheError(f"{_ONLY}.")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"there is no {name!r}: {_ONLY}.")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **(kwargs or {}))
        raise VQCacheError(f"{_ONLY}; {func} was asked of it.")


def attend_static(
    query: Tensor,
    key: Any,
    value: Any,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention on the codes behind two handles of the same update: [B, Hq, Q, Dv].

    Args:
        query: [B, Hq, Q, D], Q the tokens of the newest update.

    Raises:
        VQCacheError: the handles do not belong together or to the queries.
    """
    if not (isinstance(key, StaticHandle) and isinstance(value, StaticHandle)):
        raise VQCacheError(f"{_ONLY}.")
    whole = not (key.unsqueezed or value.unsqueezed) and key.side == "k" and value.side == "v"
    if not whole or query.shape[2] != key.update.fresh:
        raise VQCacheError(f"{_ONLY}.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_static(
        query, key.update.cached, scaling=scaling, mask=mask, softcap=softcap, s_aux=s_aux
    )


def _scaled_dot_product_attention(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or is_causal or (attn_mask is None and query.shape[2] > 1):
        raise VQCacheError(f"{_ONLY}, without dropout and with a mask.")
    return attend_static(query, key, value, scaling=scale, mask=attn_mask)
