"""The requests of one step of vLLM, as attention over blocks of codes reads them.

    batch on a GPU      [ tokens that generate | prompts, or chunks of them ]
                          Table: a row each      Chunks: decoded together

A token of a request with several new ones, as speculative decoding has, is a separate row: the
table of its request, and all tokens up to itself. Rows are made on the device, where vLLM knows how
long requests are; of prompts the host knows it. On a CPU a `Batch` says all.

A batch in which every request has one new token is a CUDA graph of vLLM's: it reads lengths and
tables where they always are, and kernels were chosen for the longest requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ..serving.batch import Batch, Group, Prompts, Request, Table
from ..serving.prefill import DECODED_BYTES, decoded_bytes


class Chunk(Group):
    """One request with several new tokens, whose blocks the device knows.

    Args:
        request: its tokens; no pages.
        tokens: of a page.
        table: int32 [1, width].
    """

    def __init__(self, request: Request, tokens: int, table: Tensor) -> None:
        super().__init__([request], tokens, table.device)
        self.blocks = table

    @cached_property
    def table(self) -> Tensor:
        """The pages int64 [1, pages]."""
        return self.blocks[:, : -(-self.length // self.tokens)].long()


class Chunks(Prompts):
    """Several of them, one behind the other in the batch.

    Args:
        requests: at least one; no pages.
        tokens: of a page.
        table: int32 [requests, width].
    """

    def __init__(self, requests: Sequence[Request], tokens: int, table: Tensor) -> None:
        super().__init__(requests, tokens, table.device)
        self.blocks = table

    @property
    def span(self) -> slice:
        """Their new tokens in the batch."""
        return slice(self.requests[0].first, self.requests[-1].rows.stop)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of all their tokens: int64 [1, 1, total] each."""
        page = self.positions // self.tokens
        all_ = self.begins[1].long()
        row = torch.repeat_interleave(all_.diff(), output_size=self.total)
        found = self.blocks[row, page].long()[None, None]
        return found, (self.positions % self.tokens)[None, None]

    @cached_property
    def single(self) -> list[Chunk]:
        """Each of them."""
        return [
            Chunk(request, self.tokens, self.blocks[i : i + 1])
            for i, request in enumerate(self.requests)
        ]


@dataclass
class VQMetadata(AttentionMetadata):
    """A step, as attention of all layers knows it.

    Args:
        tokens: of the batch, less those that fill it up.
        seq_lens: of each request int32 [requests], new tokens included.
        begins: where new tokens of each request begin, int32 [requests + 1].
        table: the first tokens of the batch, a row each; None = there are none.
        direct: every request of `table` has one new token.
        chunks: what is behind them.
        batch: all of it, on a CPU.
    """

    tokens: int
    seq_lens: Tensor
    begins: Tensor
    table: Table | None = None
    direct: bool = False
    chunks: list[Chunks] = field(default_factory=list)
    batch: Batch | None = None

    def positions(self) -> Tensor:
        """Position of each token in its request: int64 [tokens]. A graph may hold how they are
        found, so that those of single tokens are found anew."""
        if self.batch is not None:
            return self.batch.positions
        if self.direct and self.table is not None and not self.chunks:
            return self.table.newest
        return self._positions

    @cached_property
    def _positions(self) -> Tensor:
        return newest_of(self.tokens, self.seq_lens, self.begins)[1]


def newest_of(tokens: int, seq_lens: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Request, and position in it, of the first `tokens` tokens of a batch: int64 [tokens] each; of
    those that fill it up, any. The host waits for nothing."""
    token = torch.arange(tokens, device=begins.device)
    row = torch.searchsorted(begins[1:], token, right=True).clamp_max_(len(seq_lens) - 1)
    length = seq_lens[row]
    return row, torch.minimum(length - begins[row + 1] + token, length - 1).long()


class VQMetadataBuilder(AttentionMetadataBuilder[VQMetadata]):
    """Makes a `VQMetadata` of what vLLM says of a step.

    Attributes:
        tables: whether kernels read tables of blocks, as on a GPU.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page, self.tables = kv_cache_spec.block_size, device.type != "cpu"
        per_token = decoded_bytes(kv_cache_spec.num_kv_heads, kv_cache_spec.head_size)
        self.most = DECODED_BYTES // per_token  # tokens that are decoded at once
        if self.tables:
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        rows = vllm_config.scheduler_config.max_num_seqs
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> VQMetadata:
        """See `AttentionMetadataBuilder`."""
        given: CommonAttentionMetadata = common_attn_metadata
        threshold = self.reorder_batch_threshold or 1
        made = VQMetadata(given.num_actual_tokens, given.seq_lens, given.query_start_loc)
        if not self.tables:
            made.batch = self._batch(given)
            return made
        decodes, prompts, rows, _ = split_decodes_and_prefills(given, decode_threshold=threshold)
        if rows:
            made.direct = rows == decodes and (threshold == 1 or given.max_query_len == 1)
            made.table = self._table(given, decodes, rows, made.direct, given.max_seq_len)
        if prompts:
            made.chunks = self._chunks(given, decodes)
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> VQMetadata:
        """See `AttentionMetadataBuilder`: for as many tokens as tables hold."""
        made = self.build(0, common_attn_metadata)
        if made.table is not None:
            made.table = Table(
                made.table.pages, made.table.length, made.table.pages.shape[1] * self.page
            )
        return made

    def _table(
        self, given: CommonAttentionMetadata, requests: int, rows: int, direct: bool, longest: int
    ) -> Table:
        """The first requests: a row for each new token."""
        pages = given.block_table_tensor[:requests]
        longest = min(longest, pages.shape[1] * self.page)
        if direct:
            length = given.seq_lens[:rows].long()
            if rows <= len(self.lengths):  # an address that graphs know
                length = self.lengths[:rows].copy_(length)
            return Table(pages, length, longest)
        row, position = newest_of(rows, given.seq_lens[:requests], given.query_start_loc)
        return Table(pages[row], position + 1, longest)

    def _chunks(self, given: CommonAttentionMetadata, first: int) -> list[Chunks]:
        """The requests from `first` on, as many together as are decoded at once."""
        begins = given.query_start_loc_cpu.tolist()
        lengths = given.seq_lens_cpu_upper_bound
        lengths = (given.seq_lens if lengths is None else lengths).tolist()
        found: list[Chunks] = []
        begin, requests, total = first, list[Request](), 0  # of the next chunks
        for i in range(first, given.num_reqs + 1):
            new = begins[i + 1] - begins[i] if i < given.num_reqs else 0
            if requests and (not new or total + lengths[i] > self.most):
                table = given.block_table_tensor[begin : begin + len(requests)]
                found.append(Chunks(requests, self.page, table))
                requests = []
            if new:
                begin, total = (begin, total) if requests else (i, 0)
                requests.append(Request(begins[i], lengths[i] - new, new, ()))
                total += lengths[i]
        return found

    def _batch(self, given: CommonAttentionMetadata) -> Batch:
        batch = Batch(self.page, self.device)
        begins, lengths = given.query_start_loc.tolist(), given.seq_lens.tolist()
        for i in range(given.num_reqs):
            new = begins[i + 1] - begins[i]
            if new:
                pages = given.block_table_tensor[i, : -(-lengths[i] // self.page)].tolist()
                batch.add(lengths[i] - new, new, pages)
        return batch
