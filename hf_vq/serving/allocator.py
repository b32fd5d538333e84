"""Blocks of code pages, where Transformers' continuous batching has blocks of floats.

A block is T tokens of one request, in all layers of full attention:

    [ page of layer 0 | page of layer 1 | ... ] and what makes blocks of both kinds fill a sector

A sector is what Transformers hands to one kind of attention. With sliding layers, which stay
floats, it must hold whole blocks of codes and whole blocks of floats: rather than their least
common multiple, which may be a hundred megabytes, blocks of codes are padded, by up to a fifth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
)

from ..errors import VQCacheError
from .pages import ALIGNMENT, PageFormat

MOST_BLOCKS = 8  # blocks of floats in a sector, if blocks of codes must fit too


class CodePageAllocator(FullAttentionCacheAllocator):
    """Allocator of the layers with full attention, whose pages hold codes.

    Args:
        index: of the allocator in the cache.
        layers: number of each layer.
        formats: its page.
        other: bytes of a block of the sliding layers; 0 = there are none.
        allow_block_sharing: whether requests with one prefix share blocks.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[int],
        formats: Sequence[PageFormat],
        other: int,
        allow_block_sharing: bool,
    ) -> None:
        self.formats = dict(zip(layers, formats, strict=True))
        tokens = formats[0].keys.tokens
        self.supports_block_table = all(page.tables for page in formats)
        needed = sum(page.nbytes for page in formats)
        self._before_cache_tensor_init(
            index, list(layers), tokens, padded(needed, other), allow_block_sharing
        )
        # Layers may have pages of several sizes: to Transformers, all of a block are one page.
        self.pages_per_block, self.bytes_per_block = 1, self.bytes_per_page
        self.block_physical_stride = tokens  # a token's number: block * tokens + place

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """Take the memory that all allocators share."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def memory_of(self, layer: int) -> Tensor:
        """The pages of a layer: uint8 [blocks, bytes of a page], a view."""
        first = 0
        for index, page in self.formats.items():
            if index == layer:
                return self._copy_view[:, first : first + page.nbytes]
            first += page.nbytes
        raise KeyError(layer)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """None: tables of blocks are read instead."""
        return []

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: Tensor
    ) -> None:
        """The blocks of a request, int32 [width], at every token of every request: no op of torch,
        which would take longer than the GPU."""
        blocks = self.block_table[request_id]
        if block_table.device.type == "cpu":
            block_table.numpy()[: len(blocks)] = blocks
        else:
            super().fill_block_table(request_id, past_length, query_length, block_table)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: another attention function than `vq_paged` was called."""
        raise VQCacheError(
            "pages of codes are read by the attention 'vq_paged' only, which continuous batching "
            "sets; do not change the model's attention while it runs."
        )

    get_cache_for_block_table = update


def padded(needed: int, other: int) -> int:
    """Bytes of a block that has room for `needed`, so that a few blocks of `other` bytes can be
    divided into whole ones."""
    least = -(-needed // ALIGNMENT) * ALIGNMENT
    found = []
    for room in range(other, (MOST_BLOCKS + 1) * other, other or 1):
        parts = room // least
        while parts and room % (parts * ALIGNMENT):
            parts -= 1
        if parts:
            found.append(room // parts)
    return min(found, default=least)
