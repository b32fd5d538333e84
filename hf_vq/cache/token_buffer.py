"""What grows at its end along the token dimension and shrinks at both: floats, and codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme
from ..ops.layout import BLOCK, ROWS, allocate, block_bytes, to_rows, write_rows
from ..ops.library import autocasts, without_autocast

GROWTH = 1.5  # a full tape moves to one this much larger,
AHEAD = 4096  # but at most so many tokens: moving costs little beside as many steps that read all
_AS_IT_IS = nullcontext()


def storing(device: torch.device) -> AbstractContextManager[None]:
    """What is computed inside outlives the forward that computes it.

    So it holds no autograd graph and no inference tensors, which could not be updated in place by
    a later forward outside `torch.inference_mode()`, and autocast does not round it.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or autocasts(device):
        return _storing(device)
    return _AS_IT_IS  # the usual case, at a tenth of the cost


@contextmanager
def _storing(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield


def room_for(needed: int, held: int, capacity: int, limit: int | None) -> int:
    """Tokens to allocate for a tape that holds `held` and must hold `needed`.

    Args:
        capacity: tokens to allocate at first.
        limit: tokens it may ever hold; None = no limit.

    Raises:
        VQCacheError: `needed` is more than `limit`.
    """
    if limit is not None and needed > limit:
        raise VQCacheError(f"the cache is full: {needed} tokens, max_cache_len={limit}.")
    ahead = min(int(GROWTH * needed), needed + AHEAD) if held else needed
    room = max(ahead, capacity)
    return room if limit is None else min(room, limit)


class TokenBuffer:
    """Floats of tokens [B, H, tokens, D]; memory is kept ahead of them so that appending is cheap.

    Tokens once written are never written again, except those that come after a `pop`.

    Args:
        like: [B, H, any, D], decides shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.data = like.new_empty(*like.shape[:2], 0, like.shape[3])
        self.begin = self.end = 0

    def __len__(self) -> int:
        return self.end - self.begin

    def view(self) -> Tensor:
        """The tokens, without a copy: [B, H, len(self), D]."""
        return self.data.narrow(2, self.begin, self.end - self.begin)

    def append(self, tokens: Tensor) -> Tensor:
        """Write `tokens` [B, H, n, D] at the end, and return the `view` of all."""
        data, count = self.data, tokens.shape[2]
        # A deepcopy under inference_mode is made of inference tensors.
        if self.end + count > data.shape[2] or data.is_inference():
            self._move(self.end - self.begin + count)
            data = self.data
        data[:, :, self.end : self.end + count] = tokens  # `narrow` and `copy_` take longer
        self.end += count
        return data.narrow(2, self.begin, self.end - self.begin)

    def _move(self, needed: int) -> None:
        room = room_for(needed, len(self), 0, None)
        data = self.data.new_empty(*self.data.shape[:2], room, self.data.shape[3])
        if len(self):
            data[:, :, : len(self)] = self.view()
        self.data, self.begin, self.end = data, 0, len(self)

    def pop(self, count: int) -> None:
        """Forget the last `count` tokens (all, if it holds fewer)."""
        self.end -= min(count, len(self))

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens (all, if it holds fewer)."""
        self.begin += min(max(count, 0), len(self))

    def replace(self, tokens: Tensor) -> None:
        """Hold a copy of `tokens` [B, H, n, D] instead."""
        self.begin = self.end = 0
        self.data = self.data[:, :, :0]
        self.append(tokens)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows, such as a permutation or a move to another device."""
        self.data = function(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""
        return self.view().nbytes

    @property
    def allocated(self) -> int:
        """Bytes of the memory behind them."""
        return self.data.nbytes


class CodeBuffer:
    """Codes and scales of tokens, the codes in the order that the device's kernel reads.

    `data` holds the codes (`ops.layout` draws them), `scale` fp16 [B, H, tokens, 0, 1 or 2]; the
    tokens `begin` .. `end` of both count. Canonical rows go in by `replace` and come out by `rows`.
    On a device of another type than its first one a tape is in rows.

    Args:
        like: [B, H, any, D], what is coded: decides the sizes and the device.
        scheme: how a row of D numbers is coded.
        layout: of the codes.
        capacity: tokens to allocate at first; 0 = what comes.
        limit: tokens it may ever hold; None = no limit.
    """

    def __init__(
        self,
        like: Tensor,
        scheme: VQScheme,
        layout: str = ROWS,
        capacity: int = 0,
        limit: int | None = None,
    ) -> None:
        batch, heads, _, dim = like.shape
        self.vectors, self.bits = dim // scheme.vector_size, scheme.entry_bits
        self.width = packed_size(self.vectors, self.bits)  # bytes of one token's codes
        self.layout = self._home_layout = layout
        self._home = like.device.type
        self.capacity, self.limit = capacity, limit
        self.begin = self.end = 0
        scales = scheme.row_numbers
        self.scale = like.new_empty(batch, heads, 0, scales, dtype=torch.float16)
        self.data = self._codes(0)

    def __len__(self) -> int:
        return self.end - self.begin

    def rows(self) -> Tensor:
        """Canonical codes uint8 [B, H, len(self), width]; a view, if they lie in rows."""
        return to_rows(self.data, self.begin, len(self), self.bits, self.layout)

    def scales(self) -> Tensor:
        """The scales, without a copy: fp16 [B, H, len(self), 0, 1 or 2]."""
        return self.scale[:, :, self.begin : self.end]

    def reserve(self, count: int) -> int:
        """Make room for `count` tokens behind the last; they count once `end` is moved.

        Returns:
            The index of the first of them.

        Raises:
            VQCacheError: more tokens than `limit`.
        """
        # A deepcopy under inference_mode is made of inference tensors.
        if self.end + count > self.scale.shape[2] or self.data.is_inference():
            self._move(len(self) + count)
        return self.end

    def _move(self, needed: int) -> None:
        room = room_for(needed, len(self), self.capacity, self.limit)
        unit = self._unit
        first, skip = divmod(self.begin, unit)  # blocks are moved whole
        units = -(-(skip + room) // unit)
        used = -(-self.end // unit) - first
        data = self._codes(units)
        scale = self.scale.new_zeros(*self.scale.shape[:2], units * unit, self.scale.shape[3])
        if len(self):
            data[:, :, :used] = self.data[:, :, first : first + used]
            scale[:, :, skip : skip + len(self)] = self.scales()
        self.data, self.scale = data, scale
        self.begin, self.end = skip, skip + len(self)

    @property
    def _unit(self) -> int:
        """Tokens of one entry of `data` along the token dimension."""
        return 1 if self.layout == ROWS else BLOCK

    def _codes(self, units: int) -> Tensor:
        batch, heads = self.scale.shape[:2]
        if self.layout == ROWS:
            # Zeros: a GPU copies 16 bytes at a time, also those behind the last token.
            return self.scale.new_zeros(batch, heads, units, self.width, dtype=torch.uint8)
        size = block_bytes(self.vectors, self.bits)
        return allocate((batch, heads, units, size), self.scale.device)

    def pop(self, count: int) -> None:
        """Forget the last `count` tokens (all, if it holds fewer)."""
        self.end -= min(count, len(self))

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens (all, if it holds fewer)."""
        self.begin += min(max(count, 0), len(self))

    def replace(self, rows: Tensor, scales: Tensor) -> None:
        """Hold a copy of canonical `rows` [B, H, n, width] and of their `scales` instead.

        Batch, heads and device become those of `rows`.
        """
        self.scale = scales.new_empty(*scales.shape[:2], 0, scales.shape[3])
        self.layout = self._home_layout if scales.device.type == self._home else ROWS
        self.data = self._codes(0)
        self.begin = self.end = 0
        count = rows.shape[2]
        at = self.reserve(count)
        write_rows(self.data, at, rows, self.bits, self.layout)
        self.scale[:, :, at : at + count] = scales
        self.end += count

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows, such as a permutation or a move to another device."""
        scale = function(self.scale)
        if self._home_layout == ROWS or scale.device.type == self.scale.device.type:
            self.data, self.scale = function(self.data), scale
        else:
            self.replace(function(self.rows()), scale[:, :, self.begin : self.end])

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales of the tokens held."""
        batch, heads, _, scales = self.scale.shape
        return batch * heads * len(self) * (self.width + 2 * scales)

    @property
    def allocated(self) -> int:
        """Bytes of the memory behind them."""
        return self.data.nbytes + self.scale.nbytes
