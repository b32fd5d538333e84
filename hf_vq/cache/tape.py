"""A tensor that grows at its end along the token dimension and shrinks at both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..ops.attention import without_autocast

GROWTH = 1.5  # a full tape moves to one this much larger: appending costs O(1) copies per token


@contextmanager
def storing(device: torch.device) -> Iterator[None]:
    """What is computed inside outlives the forward that computes it.

    So it holds no autograd graph and no inference tensors, which could not be updated in place by
    a later forward outside `torch.inference_mode()`, and autocast does not round it.
    """
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield


class Tape:
    """Tokens [B, H, tokens, *]; capacity is kept ahead of the tokens so that appending is cheap.

    Tokens once written are never written again, except those that come after a `pop`.

    Args:
        like: [B, H, any, *], decides shape, dtype and device.
        capacity: tokens to allocate at the first append; 0 = what is appended.
        limit: tokens it may ever hold; None = no limit.
    """

    def __init__(self, like: Tensor, capacity: int = 0, limit: int | None = None) -> None:
        self.data = like.new_empty(*like.shape[:2], 0, *like.shape[3:])
        self.begin = self.end = 0
        self.capacity, self.limit = capacity, limit

    def __len__(self) -> int:
        return self.end - self.begin

    def view(self) -> Tensor:
        """The tokens, without a copy: [B, H, len(self), *]."""
        return self.data[:, :, self.begin : self.end]

    def append(self, tokens: Tensor) -> None:
        """Write `tokens` [B, H, n, *] at the end.

        Raises:
            VQCacheError: more tokens than `limit`.
        """
        count = tokens.shape[2]
        # A deepcopy under inference_mode is made of inference tensors.
        if self.end + count > self.data.shape[2] or self.data.is_inference():
            self._move(len(self) + count)
        self.data[:, :, self.end : self.end + count] = tokens
        self.end += count

    def _move(self, needed: int) -> None:
        if self.limit is not None and needed > self.limit:
            raise VQCacheError(f"the cache is full: {needed} tokens, max_cache_len={self.limit}.")
        room = max(int(GROWTH * needed), self.capacity) if len(self) else max(needed, self.capacity)
        room = min(room, self.limit) if self.limit is not None else room
        data = self.data.new_empty(*self.data.shape[:2], room, *self.data.shape[3:])
        data[:, :, : len(self)] = self.view()
        self.data, self.begin, self.end = data, 0, len(self)

    def pop(self, count: int) -> None:
        """Forget the last `count` tokens (all, if it holds fewer)."""
        self.end -= min(count, len(self))

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens (all, if it holds fewer)."""
        self.begin += min(max(count, 0), len(self))

    def replace(self, tokens: Tensor) -> None:
        """Hold a copy of `tokens` [B, H, n, *] instead."""
        self.begin = self.end = 0
        self.data = self.data[:, :, :0]
        self.append(tokens)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of rows, such as a permutation or a move to another device."""
        self.data = function(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held."""
        view = self.view()
        return view.numel() * view.element_size()

    @property
    def allocated(self) -> int:
        """Bytes of the memory behind them."""
        return self.data.numel() * self.data.element_size()


def empty_like_row(row: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """A prototype [B, H, 0, width] for a tape of rows that belong to `row` [B, H, n, D]."""
    return torch.empty(*row.shape[:2], 0, width, dtype=dtype, device=row.device)
