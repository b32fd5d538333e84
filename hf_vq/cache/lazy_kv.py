"""What `update` of a coded layer returns: keys and values that are still made of codes.

LazyKV        eager. A tensor of the right shape. Attention of the function `vq` and PyTorch's
              `scaled_dot_product_attention`, which it intercepts, read the codes; it stays lazy
              through the `repeat_kv` in front of it. Every other operation decodes it first,
              which is right for any modelling code but slow, and is counted in
              `VQCache.fallbacks`.
CompiledKV    while torch.compile traces a static layer. No tensor, so that it is followed
              through a model like any Python object; whatever else is done with it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import VQCacheError
from ..formats.scheme import VQScheme
from ..ops import decode_kv, kv_attention
from ..ops.kv import KVCacheView
from ..ops.kv_ops import BoundKV
from ..ops.layout import to_rows
from ..ops.library import without_autocast
from ..ops.reference.codes import in_dtype
from ..ops.rotary_mean import rotated_key_mean

KEY, VALUE = "key", "value"
_HEADS, _UNSQUEEZED, _EXPANDED = "heads", "unsqueezed", "expanded"  # stages of repeat_kv
_ONLY = (
    "a compiled VQCache with max_cache_len can only be read by attention on codes: the attention "
    'implementations "sdpa" and "vq" of models that hand it keys and values as they are. Use '
    "VQCache(..., static=False)"
)


class Owner(Protocol):
    """The cache layer that made a `LazyKV`."""

    version: int

    def count_fallback(self) -> None:
        """Record that keys or values were decoded, or raise if that is forbidden."""


class KVUpdate:
    """What one `update()` made visible; shared by its keys and its values."""

    __slots__ = ("_dense", "bound", "owner", "version", "view")

    def __init__(self, view: KVCacheView, owner: Owner, bound: BoundKV | None = None) -> None:
        self.view, self.owner, self.version, self.bound = view, owner, owner.version, bound
        self._dense: dict[str, Tensor] = {}

    def check(self) -> None:
        """Raise VQCacheError if the tokens were cropped since."""
        if self.version != self.owner.version:
            raise VQCacheError(
                "these keys or values were returned before a later crop() or reset(), or before "
                "the prompt's attention; they are gone. Use what the latest update() returned."
            )

    def dense(self, which: str) -> Tensor:
        """Decoded keys or values [B, H, length, D]; exact for the first query of the update."""
        if which not in self._dense:
            self.check()
            self.owner.count_fallback()
            self._dense[which] = decoded(self.view, which)
        return self._dense[which]

    def lazy(self) -> tuple[LazyKV, LazyKV]:
        """The keys and the values."""
        return LazyKV(self, KEY), LazyKV(self, VALUE)


def decoded(view: KVCacheView, which: str) -> Tensor:
    """Keys or values of a growing cache, as the first query of the newest update sees them:
    [B, H, max_seqlen, D] in the model's dtype."""
    side, scheme = getattr(view, which), VQScheme.parse(getattr(view, which).scheme)
    length, start, recent, sinks = view.max_seqlen, view.recent_start, side.recent, side.sinks
    first_query = length - view.num_new
    near = max(min(first_query - view.window + 1, first_query), start, 0)
    near = min(near, view.num_coded)
    codes = to_rows(side.codes, side.first, near, scheme.entry_bits, side.layout)
    with without_autocast(recent.device):
        scale = side.scale[:, :, side.first : side.first + near]
        rows = decode_kv(codes, scale, side.codebook, scheme, side.dim)
    rows = rows if side.smoothing is None else rows / side.smoothing
    rows = rows if side.mean is None else rows + side.mean
    if which == KEY and view.key_rotary_mean is not None:
        rows = rows + rotated_key_mean(view, torch.arange(near, device=rows.device))
    rows = torch.cat([in_dtype(rows, recent.dtype), recent[:, :, near - start :]], 2)
    if not sinks.shape[2]:
        return rows
    leftpad = view.cache_leftpad
    if leftpad is None:
        leftpad = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    slot = torch.arange(rows.shape[2], device=rows.device) - leftpad[:, None]
    index = slot.clamp(0, sinks.shape[2] - 1)[:, None, :, None].expand_as(rows)
    is_sink = ((slot >= 0) & (slot < sinks.shape[2]))[:, None, :, None]
    return torch.where(is_sink, sinks.gather(2, index), rows)


class LazyKV(torch.Tensor):
    """Keys or values [B, H, tokens, D] that decode themselves when an operation touches them."""

    update: KVUpdate
    which: str
    form: str = _HEADS
    repeats: int = 1
    sizes: torch.Size

    @staticmethod
    def __new__(cls, update: KVUpdate, which: str, form: str = _HEADS, repeats: int = 1) -> LazyKV:
        """The keys or the values of an update; `repeats` and `form` follow `repeat_kv`."""
        view = update.view
        recent = (view.key if which == KEY else view.value).recent
        batch, heads, _, dim = recent.shape
        if form == _HEADS:
            sizes = torch.Size((batch, heads * repeats, view.max_seqlen, dim))
        else:
            copies = 1 if form == _UNSQUEEZED else repeats
            sizes = torch.Size((batch, heads, copies, view.max_seqlen, dim))
        lazy: LazyKV = torch.Tensor._make_wrapper_subclass(
            cls, sizes, dtype=recent.dtype, device=recent.device
        )
        own = lazy.__dict__
        own["update"], own["which"], own["sizes"] = update, which, sizes
        if form != _HEADS or repeats != 1:
            own["form"], own["repeats"] = form, repeats
        return lazy

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """As of any tensor; PyTorch's own goes through `__torch_function__`, at every question."""
        return self.sizes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyKV({list(self.shape)}, {self.dtype}, {self.which})"

    def decode(self) -> Tensor:
        """The dense tensor that this stands for."""
        rows = self.update.dense(self.which)
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
    return value.decode() if isinstance(value, LazyKV) else value


class CompiledKV:
    """Keys or values [B, H, max_seqlen, D] of a static layer, or a stage of `repeat_kv` of them.

    Args:
        view: the layer.
        num_new: tokens of the newest update.
        which: KEY or VALUE.
    """

    def __init__(
        self,
        view: KVCacheView,
        num_new: int,
        which: str,
        repeats: int = 1,
        unsqueezed: bool = False,
    ) -> None:
        self.view, self.num_new, self.which = view, num_new, which
        self.repeats, self.unsqueezed = repeats, unsqueezed

    @property
    def _recent(self) -> Tensor:
        return (self.view.key if self.which == KEY else self.view.value).recent

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for."""
        batch, heads, _, dim = self._recent.shape
        length = self.view.max_seqlen
        if self.unsqueezed:
            return torch.Size((batch, heads, self.repeats, length, dim))
        return torch.Size((batch, heads * self.repeats, length, dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that it stands for."""
        return self._recent.dtype

    @property
    def device(self) -> torch.device:
        """Of the tensor that it stands for."""
        return self._recent.device

    def _stage(self, repeats: int, unsqueezed: bool) -> CompiledKV:
        return CompiledKV(self.view, self.num_new, self.which, repeats, unsqueezed)

    def __getitem__(self, index: Any) -> CompiledKV:
        # slices cannot be compared while compiling
        if len(index) != 5 or index[2] is not None or self.unsqueezed or self.repeats > 1:
            self._refuse()
        return self._stage(1, True)

    def expand(self, *sizes: int) -> CompiledKV:
        """As in `repeat_kv`: [B, H, repeats, max_seqlen, D]."""
        if len(sizes) != 5 or not self.unsqueezed:
            self._refuse()
        return self._stage(sizes[2], True)

    def reshape(self, *sizes: int) -> CompiledKV:
        """As in `repeat_kv`: [B, H * repeats, max_seqlen, D]."""
        if len(sizes) != 4 or not self.unsqueezed:
            self._refuse()
        return self._stage(self.repeats, False)

    def contiguous(self) -> CompiledKV:
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


def is_coded(key: Any) -> bool:
    """Whether keys or values are those of a coded layer."""
    return type(key) is LazyKV or type(key) is CompiledKV


def attend(
    query: Tensor,
    key: Any,
    value: Any,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor | None:
    """Attention on the codes behind what an update returned; None where only decoded tensors do.

    Args:
        query: [B, Hq, Q, D], Q the tokens of the newest update.
        key: the keys.
        value: the values of the same update.
        scaling: factor of the logits; None = D^-1/2.
        mask: as in `ops.kv_attention`, like `softcap`.
        s_aux: [Hq] logits that attend to nothing.

    Returns:
        [B, Hq, Q, Dv].

    Raises:
        VQCacheError: while compiling, keys, values and queries do not belong together.
    """
    bound = None
    if type(key) is LazyKV and type(value) is LazyKV:
        update = key.update
        view = update.view
        same = update is value.update and key.which == KEY and value.which == VALUE
        _, heads, queries, _ = query.shape
        whole = key.form == value.form == _HEADS and heads % key.sizes[1] == 0
        differentiable = query.requires_grad and torch.is_grad_enabled()
        if not (same and whole and queries == view.num_new) or differentiable:
            return None
        if update.version != update.owner.version:
            update.check()
        bound = update.bound
    elif type(key) is CompiledKV:
        view = _compiled_view(query, key, value)
    else:
        return None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return kv_attention(
        query, view, softmax_scale=scale, mask=mask, softcap=softcap, sink_logits=s_aux,
        bound=bound,
    )  # fmt: skip


def _compiled_view(query: Tensor, key: CompiledKV, value: Any) -> KVCacheView:
    if not isinstance(value, CompiledKV):
        raise VQCacheError(f"{_ONLY}.")
    whole = not (key.unsqueezed or value.unsqueezed) and key.which == KEY and value.which == VALUE
    if not whole or query.shape[2] != key.num_new:
        raise VQCacheError(f"{_ONLY}.")
    return key.view


def _scaled_dot_product_attention(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if isinstance(key, CompiledKV):
        if dropout_p or is_causal or (attn_mask is None and query.shape[2] > 1):
            raise VQCacheError(f"{_ONLY}, without dropout and with a mask.")
        return attend(query, key, value, scaling=scale, mask=attn_mask)
    if isinstance(value, CompiledKV):
        raise VQCacheError(f"{_ONLY}.")
    if dropout_p or is_causal or not isinstance(key, LazyKV):
        return None
    new, packed = key.update.view.num_new, query.shape[2]
    if attn_mask is not None:  # of any shape that broadcasts
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if new == 1 and packed > 1:
        # Transformers folds the query heads of one token into the query dimension (`pack_gqa`).
        if attn_mask is not None and attn_mask.shape[-2] != 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], -1, 1, attn_mask.shape[-1])
        one_token = query.reshape(query.shape[0], -1, 1, query.shape[-1])
        out = attend(one_token, key, value, scaling=scale, mask=attn_mask)
        return None if out is None else out.reshape(*query.shape[:-1], out.shape[-1])
    if attn_mask is None and packed > 1:
        return None  # without a mask PyTorch looks ahead; our op does not
    return attend(query, key, value, scaling=scale, mask=attn_mask)


def _getitem(lazy: Any, index: Any) -> LazyKV | None:
    whole = slice(None)
    new_axis = (whole, whole, None, whole, whole)
    plain = isinstance(lazy, LazyKV) and lazy.form == _HEADS and lazy.repeats == 1
    if plain and isinstance(index, tuple) and index == new_axis:
        return LazyKV(lazy.update, lazy.which, _UNSQUEEZED)
    return None


def _expand(lazy: Any, *sizes: Any) -> LazyKV | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(lazy, LazyKV) or lazy.form != _UNSQUEEZED or len(sizes) != 5:
        return None
    keep = all(
        size in (-1, own)
        for axis, (size, own) in enumerate(zip(sizes, lazy.shape, strict=True))
        if axis != 2
    )
    return LazyKV(lazy.update, lazy.which, _EXPANDED, int(sizes[2])) if keep else None


def _reshape(lazy: Any, *sizes: Any) -> LazyKV | None:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not isinstance(lazy, LazyKV) or lazy.form != _EXPANDED:
        return None
    merged = LazyKV(lazy.update, lazy.which, _HEADS, lazy.repeats)
    return merged if tuple(sizes) == tuple(merged.shape) else None


def _contiguous(lazy: Any, *args: Any, **kwargs: Any) -> LazyKV | None:
    return lazy if isinstance(lazy, LazyKV) and lazy.form == _HEADS else None


_LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: _scaled_dot_product_attention,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
    torch.Tensor.contiguous: _contiguous,
}
