"""What one layer keeps of its keys, or of its values: codes of the old tokens, floats of the new.

position    0 .. sinks       ..            tail_start      coded              length
            [ sink floats ]                [ tail: floats                        ]
            [ codes + one fp16 scale per token and head     ]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..formats.scheme import VQScheme
from ..ops.reference.codes import LARGEST_SCALE
from .token_buffer import CodeBuffer, TokenBuffer

LOOKED_AT = 64  # tokens together, by `warn_of_newest`


def check_head_dim(scheme: VQScheme, head_dim: int, where: str) -> None:
    """Raise VQCacheError, naming `where`, if rows of `head_dim` numbers cannot be coded."""
    size = scheme.vector_size
    turned = scheme.rotation != "none"
    if head_dim % size or (turned and scheme.block(head_dim, where) % size):
        raise VQCacheError(
            f"{scheme.notation()} needs a head_dim divisible by {size}; {where} has {head_dim}. Use"
            " a scheme with shorter vectors, such as u4."
        )


def problem_with(
    k: Tensor,
    v: Tensor,
    before: tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.dtype, torch.device] | None,
) -> str | None:
    """What is wrong with the keys and values of an update, or None.

    Args:
        before: what came before: batch, heads and head_dim of keys and of values, their dtypes and
            device; None = nothing.
    """
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        return (
            f"keys {list(k.shape)} and values {list(v.shape)}; they must be [batch, heads, "
            "tokens, head_dim] and agree in the first three"
        )
    if not k.is_floating_point() or not v.is_floating_point() or k.device != v.device:
        return f"keys {k.dtype} on {k.device} and values {v.dtype} on {v.device}"
    if before is None:
        return None
    of_k, of_v, key_dtype, value_dtype, device = before
    sizes, wanted = [*k.shape[:2], k.shape[3], v.shape[3]], [*of_k, of_v[2]]
    if sizes != wanted:
        return (
            f"[batch, heads, head_dim of keys, of values] = {sizes} after {wanted}; use a new "
            "cache, or batch_select_indices, for another batch"
        )
    # Keys and values are of two dtypes under autocast: RoPE is computed in float32.
    return (
        f"{_dtypes(k.dtype, v.dtype)} on {k.device} after {_dtypes(key_dtype, value_dtype)} on "
        f"{device}; load or make the cache for the model's dtype and device, and use autocast for "
        "all of a sequence or none"
    )


def _dtypes(key: torch.dtype, value: torch.dtype) -> str:
    return str(key) if key == value else f"keys {key} and values {value}"


class SideBuffers:
    """Keys or values of one layer.

    Args:
        like: [B, H, n, D] of the tensor to come; decides shape, dtype and device.
        scheme: how a row of head_dim numbers is coded.
        codebook: fp16 [1, entries, x] or, learned, [H, D / x, entries, x], on the device of `like`.
        layout: of the codes (`ops.layout`).
        centred: whether a mean is subtracted before tokens are coded; zero until it is known.
        sinks: tokens at the start of each row that stay floats.
        capacity: tokens to allocate codes for at first.
        limit: tokens it may ever hold; None = no limit.
    """

    def __init__(
        self,
        like: Tensor,
        scheme: VQScheme,
        codebook: Tensor,
        *,
        layout: str,
        centred: bool,
        sinks: int,
        capacity: int,
        limit: int | None,
    ) -> None:
        batch, heads, _, dim = like.shape
        self.scheme, self.codebook, self.dim = scheme, codebook, dim
        self.spec, self.has_scale = scheme.spec(), scheme.has_scale
        self.codes = CodeBuffer(like, scheme, layout, capacity, limit)
        self.tail = TokenBuffer(like)
        self.sinks = like.new_zeros(batch, heads, sinks, dim)
        self.rotary_mean: Tensor | None = None  # of keys, see `key_means`; None = 0
        self.smoothing: Tensor | None = None  # likewise; None = 1
        self.mean: Tensor | None = None
        if centred:
            self.mean = like.new_zeros(batch, heads, 1, dim, dtype=torch.float32)

    def remember_sinks(self, tokens: Tensor, position: int, start: Tensor | None) -> None:
        """Keep those of `tokens` [B, H, n, D], which begin at `position`, that are sinks."""
        slots = self.sinks.shape[2]
        if start is None:
            count = min(slots - position, tokens.shape[2])
            if count > 0:
                parts = (self.sinks[:, :, :position], tokens[:, :, :count])
                self.sinks = torch.cat([*parts, self.sinks[:, :, position + count :]], 2)
            return
        index = start[:, None] + torch.arange(slots, device=start.device) - position  # [B, S]
        inside = ((index >= 0) & (index < tokens.shape[2]))[:, None, :, None]
        index = index.clamp(0, tokens.shape[2] - 1)[:, None, :, None].expand_as(self.sinks)
        self.sinks = torch.where(inside, tokens.gather(2, index), self.sinks)

    def warn_of_newest(self, tokens: Tensor, end: int, name: str, layer: int) -> bool:
        """Say which of the newest coded tokens has no right code; whether one has none.

        Scales are looked at 64 tokens at a time: of single tokens, call it after every 64th.

        Args:
            tokens: [B, H, n, D], as they were given to `kv_append`.
            end: position after the last of them.
            name: keys or values.
            layer: its number.
        """
        if self.has_scale:
            numbers = self.codes.scales()[:, :, -max(tokens.shape[2], LOOKED_AT) :]
        else:
            numbers = tokens.abs()
        if not numbers.numel() or numbers.max().item() < LARGEST_SCALE:  # NaN is not
            return False
        lost = ~numbers.isfinite().all(-1)
        beyond = (numbers >= LARGEST_SCALE).any(-1) & self.has_scale
        found = (lost | beyond).nonzero().tolist()
        if not found:
            return False
        row, head, token = found[0]
        why = f"are beyond {LARGEST_SCALE:g}, the largest scale, and were made smaller"
        if lost[row, head, token]:
            why = "hold NaN or infinity, so that what their codes give is no result"
        warnings.warn(
            f"{name} of layer {layer} of the cache {why}: head {head}, token "
            f"{end - numbers.shape[2] + token}, row {row} of the batch is the first. DynamicCache "
            "holds them as they are.",
            RuntimeWarning,
            stacklevel=2,
        )
        return True

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows, such as a permutation or a move to another device."""
        self.codes.map(function)
        self.tail.map(function)
        self.sinks = function(self.sinks)
        self.mean, self.rotary_mean, self.smoothing = (
            None if of_keys is None else function(of_keys)
            for of_keys in (self.mean, self.rotary_mean, self.smoothing)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of what is held; codebooks belong to the model."""
        return self.codes.nbytes + self.tail.nbytes + self._fixed

    @property
    def allocated(self) -> int:
        """Bytes of the memory behind it."""
        return self.codes.allocated + self.tail.allocated + self._fixed

    @property
    def _fixed(self) -> int:
        of_keys = self.mean, self.rotary_mean, self.smoothing
        return self.sinks.nbytes + sum(part.nbytes for part in of_keys if part is not None)

    @property
    def token_bits(self) -> int:
        """Bits of one token's codes and scales, of one head."""
        return 8 * (self.codes.width + 2 * self.codes.scale.shape[3])
