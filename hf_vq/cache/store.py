"""What one layer keeps of its keys, or of its values: codes of the old tokens, floats of the new.

position    0 .. sinks       ..            tail_start      coded              length
            [ sink floats ]                [ tail: floats                        ]
            [ codes + one fp16 scale per token and head     ]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme
from ..ops import encode_kv
from .tape import Tape, empty_like_row

ENCODE_TOKENS = 4096  # tokens encoded at a time: bounds the float32 copies of a long prompt


class Store:
    """Keys or values of one layer.

    Args:
        like: [B, H, n, D] of the tensor to come; decides shape, dtype and device.
        scheme: how a row of head_dim numbers is coded.
        codebook: fp16 [1, entries, x] on the device of `like`.
        sinks: tokens at the start of each row that stay floats.
        capacity: tokens to allocate codes for at first.
        limit: tokens it may ever hold; None = no limit.
        where: the layer, for messages.

    Raises:
        VQCacheError: head_dim cannot be coded by the scheme.
    """

    def __init__(
        self,
        like: Tensor,
        scheme: VQScheme,
        codebook: Tensor,
        *,
        sinks: int,
        capacity: int,
        limit: int | None,
        where: str,
    ) -> None:
        dim = like.shape[-1]
        if dim % scheme.vector_size or scheme.block(dim, where) % scheme.vector_size:
            raise VQCacheError(
                f"{scheme.notation()} needs a head_dim divisible by {scheme.vector_size}; {where} "
                f"has {dim}. Use a scheme with shorter vectors, such as u4."
            )
        self.scheme, self.codebook, self.dim = scheme, codebook, dim
        width = packed_size(dim // scheme.vector_size, scheme.entry_bits)
        self.codes = Tape(empty_like_row(like, width, torch.uint8), capacity, limit)
        self.scale = Tape(empty_like_row(like, 1, torch.float16), capacity, limit)
        self.tail = Tape(like)
        batch, heads = like.shape[:2]
        self.sinks = like.new_zeros(batch, heads, sinks, dim)
        self.mean = torch.zeros(batch, heads, 1, dim, dtype=torch.float32, device=like.device)

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

    def encode(self, tokens: Tensor) -> None:
        """Append the codes of `tokens` [B, H, n, D]. They are never computed again."""
        for part in tokens.split(ENCODE_TOKENS, 2):
            codes, scale = encode_kv(part.float() - self.mean, self.codebook, self.scheme)
            self.codes.append(codes)
            self.scale.append(scale)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows, such as a permutation or a move to another device."""
        for tape in (self.codes, self.scale, self.tail):
            tape.map(function)
        self.sinks, self.mean = function(self.sinks), function(self.mean)

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        return self.coded_nbytes + self.tail.nbytes + self.sinks.nbytes + self.mean.nbytes

    @property
    def coded_nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of the memory behind it."""
        tapes = self.codes.allocated + self.scale.allocated + self.tail.allocated
        return tapes + self.sinks.nbytes + self.mean.nbytes


def key_mean(keys: Tensor, sinks: int) -> Tensor:
    """The vector that is subtracted from a row's keys before they are coded.

    A constant in all keys of a head shifts all logits of a query alike, so softmax does not see it,
    but a code would. The sinks are left out: their keys are unlike all others.

    Args:
        keys: [B, H, n, D], the first tokens of a row, sinks included.

    Returns:
        [B, H, 1, D] float32.
    """
    return keys[:, :, sinks:].float().mean(2, keepdim=True)
