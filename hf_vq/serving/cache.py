"""`PagedCodes`: Transformers' `PagedAttentionCache`, with codes in the layers of full attention."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CacheAllocator,
    CachePool,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from ..cache import VQCache, VQCacheLayer
from ..cache.codebooks import codebook_for
from ..cache.key_means import Rotary
from ..cache.kv_side import check_head_dim
from ..errors import VQCacheError
from ..hf.attention import vq_attention
from ..ops import kv_attention
from .allocator import CodePageAllocator
from .batch import Batch, Group, Table
from .pages import LayerPages, PageFormat
from .prefill import DECODED_BYTES, flash, is_flash


class CodesMemory(PagedAttentionMemoryHandler):
    """How many pages fit: those of codes are not read back as floats, and there are no masks.

    Args:
        copied: bytes of a token's codes in one layer, a copy of which attention reads.
        tables: whether that is so of prompts alone, one request at a time.
    """

    def __init__(self, copied: int, tables: bool, **kwargs: Any) -> None:
        self.copied = copied if tables else 2 * copied
        super().__init__(**kwargs)
        self.num_attention_masks = 0

    @property
    def bytes_per_cache_token(self) -> int:
        """Besides the page: what attention copies, twice as much where requests are padded to one
        length, and its page and place, six int64 while they are computed."""
        return self.copied + 48

    @property
    def fixed_overhead_bytes(self) -> int:
        """What does not grow with the cache: parts of a long prompt as floats."""
        return int(super().fixed_overhead_bytes) + DECODED_BYTES

    def _check_footprint(self, max_batch_tokens: int, num_sectors: int) -> tuple[int, int]:
        if num_sectors <= 0:
            before = self.compute_memory_footprint(max_batch_tokens, 0) >> 20
            raise VQCacheError(
                f"continuous batching may use {max(self.available_memory, 0) >> 20} MB, but a batch"
                f" of {max_batch_tokens} tokens needs {before} MB before the first page. Make "
                "max_batch_tokens smaller, or max_memory_percent larger."
            )
        return super()._check_footprint(max_batch_tokens, num_sectors)


class PagedCodes(PagedAttentionCache):
    """The memory of continuous batching, with pages of codes.

    Its size is found as by Transformers: `num_blocks`, or what fits into `max_memory_percent` of
    the free memory. Layers of sliding attention keep floats, in Transformers' own rings.

    Args:
        template: an empty cache of the model, whose layers say how each is coded.
        others: as in `PagedAttentionCache`.

    Raises:
        VQCacheError: the model has no layer of full attention, head_dim cannot be coded, or heads
            are spread over devices.
    """

    def __init__(
        self,
        template: VQCache,
        config: PreTrainedConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        device: torch.device,
        distributed_helper: DistributedHelper,
        dtype: torch.dtype,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise VQCacheError(
                "pages of codes are not made for tensor parallelism. Run on one device, or take "
                "cache_config out of the generation config."
            )
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.max_blocks_per_request = continuous_batching_config.max_blocks_per_request or 0
        self.page_size = continuous_batching_config.page_size
        self.heads, self.dim = find_num_key_value_heads(config), find_head_dim(config)
        sharing = continuous_batching_config.allow_block_sharing
        self._make_allocators(template, sharing)
        self.bytes_per_sector = lcm(*(a.bytes_per_block for a in self._all), 128)
        self.tokens_per_sector = max(
            self.bytes_per_sector // a.bytes_per_block * a.tokens_per_page for a in self._all
        )
        bytes_per_block = sum(a.bytes_per_block for a in self._all)
        pages = self.codes.formats.values()
        memory = CodesMemory(
            copied=-(-max(page.nbytes for page in pages) // self.page_size),
            tables=all(page.tables for page in pages),
            config=config,
            cb_config=continuous_batching_config,
            dtype=dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=bytes_per_block,
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=model_supports_logits_to_keep,
        )
        self.max_batch_tokens, self.num_sectors = memory.infer_max_batch_tokens_and_num_sectors()
        held = self.num_sectors * self.bytes_per_sector
        self.cache_tensor = torch.zeros(
            held + 2 * self.bytes_per_sector, dtype=torch.uint8, device=self.device
        )
        self.pool = CachePool(self.num_sectors, len(self._all))
        for allocator in self._all:
            allocator.register_cache_tensor(
                self.bytes_per_sector, held, self.cache_tensor, self.pool
            )
        self.allow_block_sharing = sharing
        self.use_prefix_sharing = sharing and all(a.use_block_sharing for a in self._all)
        self.num_blocks = held // bytes_per_block
        self.read_cache_limit = self._infer_read_cache_limit()
        self.max_decode_fast_path_length = self._infer_max_decode_fast_path_length()
        self.max_tokens_read = max(a.tokens_per_page * a.num_blocks for a in self._all)
        self.layers = {index: self._layer(template, index) for index in self.codes.formats}
        self.batch = Batch(self.page_size, self.device)
        self._indices: list[list[int]] | None = None  # of the forward that the batch is for
        self._step: tuple[Table, Tensor] | None = None  # of a forward of one token for each request

    @property
    def _all(self) -> list[CacheAllocator]:
        return list(self.cache_allocators.values())

    def _make_allocators(self, template: VQCache, sharing: bool) -> None:
        groups = groups_of(self.config)
        self.cache_allocators: dict[str, CacheAllocator] = {}
        sliding = None
        if SLIDING_ATTENTION in groups:
            sliding = SlidingAttentionCacheAllocator(
                index=1, layer_indices=groups[SLIDING_ATTENTION], config=self.config,
                num_key_value_heads=self.heads, cache_dtype=self.dtype, page_size=self.page_size,
                allow_block_sharing=sharing,
            )  # fmt: skip
        formats = page_formats(template, self.config, self.page_size, self.dtype, self.device)
        other = 0 if sliding is None else sliding.bytes_per_block
        self.codes = CodePageAllocator(0, list(formats), list(formats.values()), other, sharing)
        self.cache_allocators[FULL_ATTENTION] = self.codes
        if sliding is not None:
            self.cache_allocators[SLIDING_ATTENTION] = sliding
        self.layer_to_allocator = {
            layer: allocator for allocator in self._all for layer in allocator.layer_indices
        }

    def _layer(self, template: VQCache, index: int) -> LayerPages:
        coded, where = _coded(template, index), f"layer {index} of the cache"
        like = torch.empty(1, self.heads, 1, self.dim, device=self.device)
        books = (
            codebook_for(coded.scheme.key, coded.codebooks[0], like, where),
            codebook_for(coded.scheme.value, coded.codebooks[1], like, where),
        )
        memory, page = self.codes.memory_of(index), self.codes.formats[index]
        known = coded.calibrated
        rotary = None if known is None else Rotary.of(coded.options.rope, index, like, known)
        return LayerPages(memory, page, books, known, rotary)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Called for every request of the next forward, in order. One that will be forked may
        have no new token: nothing of it is read or written.
        """
        if write_index is not self._indices:  # every forward has a list of its own
            self.batch, self._indices = Batch(self.page_size, self.device), write_index
        if query_length == 0:
            return
        super().extend_read_and_write_indices(
            request_id, past_length, query_length, read_index, write_index
        )
        self.batch.add(past_length, query_length, self.codes.block_table[request_id])

    @torch.compiler.disable
    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        s_aux: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Write the new tokens of the batch to a layer, and attend: [1, Hq, new tokens, D].

        Arguments as in `paged_attention`.
        """
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        index: int = module.layer_idx  # type: ignore[assignment]
        if index not in self.layers:
            return self._slide(module, query, key, value, options, kwargs)
        layer = self.layers[index]
        if kwargs.get("block_table") is not None:
            table, slots = self._decoding(index, kwargs)
            layer.put(key, value, slots, table.newest if layer.turns else None)
            return _through(layer, table, query, options)
        out = torch.zeros_like(query)  # rows behind those of the batch fill it up, where graphs are
        if self.codes.formats[index].tables:
            slots = kwargs["write_index"][self.codes.index]
            layer.put(key, value, slots, self.batch.positions if layer.turns else None)
            ones, prompts = self.batch.table, self.batch.prompts
            if ones is not None:
                out[:, :, ones.rows] = _through(layer, ones, query[:, :, ones.rows], options)
            groups = self.batch.longer
            if prompts is not None and is_flash(query, layer.k.side.heads, prompts, options):
                out[:, :, prompts.rows] = flash(layer, prompts, query, scaling)
                groups = []
        else:
            layer.write(key, value, self.batch)
            groups = layer.groups(self.batch)
        for group in groups:
            asked = query[0][:, group.rows].transpose(0, 1)  # [requests, Hq, new, D]
            part = _read(module, layer, group, asked, options)
            out[0, :, group.rows.flatten()] = part.transpose(0, 1).flatten(1, 2)
        return out

    def _decoding(self, index: int, kwargs: dict[str, Any]) -> tuple[Table, Tensor]:
        """The requests of a forward of one token each, and its slots: made by the first layer of
        every forward from what Transformers gives, and again whenever a CUDA graph is replayed.
        """
        if self._step is None or index == next(iter(self.layers)):
            pages = kwargs["block_table"][self.codes.index]
            length = kwargs["cu_seq_lens_k"][FULL_ATTENTION].diff().long()
            table = Table(pages, length, pages.shape[1] * self.page_size)
            self._step = table, table.slots(self.page_size, self.codes.write_trash_index)
        return self._step

    def _slide(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """A layer of sliding attention: one request at a time, without a mask over all of them."""
        index: int = module.layer_idx  # type: ignore[assignment]
        keys, values = self.update(key, value, index, dict(kwargs))
        out = torch.empty_like(query)
        window = self.cache_allocators[SLIDING_ATTENTION].sliding_window
        for request, (read, mask) in zip(
            self.batch.requests, self.batch.windows(window), strict=True
        ):
            out[:, :, request.rows] = _dense(
                module, query[:, :, request.rows], keys[:, :, read], values[:, :, read], mask,
                options,
            )  # fmt: skip
        return out


def groups_of(config: PreTrainedConfig) -> dict[str, list[int]]:
    """The layers of each kind of attention.

    Raises:
        VQCacheError: there is none of full attention, or keys and values have two sizes.
    """
    groups: dict[str, list[int]] = group_layers_by_attn_type(config)
    name, dim = type(config).__name__, find_head_dim(config)
    if FULL_ATTENTION not in groups:
        raise VQCacheError(
            f"{name} has no layer of full attention, so no page would hold codes. Take cache_config"
            " out of the generation config."
        )
    if (values := getattr(config, "v_head_dim", dim)) != dim:
        raise VQCacheError(
            f"{name} has values of {values} numbers and a head_dim of {dim}, which continuous "
            "batching does not know. Use model.generate."
        )
    return groups


def page_formats(
    template: VQCache,
    config: PreTrainedConfig,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, PageFormat]:
    """The page of each layer of full attention.

    Args:
        template: an empty cache of the model.
        config: of the model.
        tokens: of a page.
        dtype: of the model.
        device: of the model.
    """
    heads, dim = find_num_key_value_heads(config), find_head_dim(config)
    like = torch.empty(1, 1, 1, dim, dtype=dtype, device=device)
    formats = {}
    for index in groups_of(config)[FULL_ATTENTION]:
        scheme = _coded(template, index).scheme
        for part in (scheme.key, scheme.value):
            check_head_dim(part, dim, f"layer {index} of the cache")
        known = _coded(template, index).calibrated
        turns = known is not None and known.rotary_mean is not None
        formats[index] = PageFormat.of(scheme, heads, dim, tokens, like, turns)
    return formats


def _through(layer: LayerPages, table: Table, query: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention of new tokens [1, Hq, requests, D], of a request each."""
    scaling = options["scaling"]
    out = kv_attention(
        query[0].transpose(0, 1)[:, :, None], layer.through(table, query),
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=options["softcap"] or 0.0, sink_logits=options["s_aux"],
    )  # fmt: skip
    return out[:, :, 0].transpose(0, 1)[None]


def _read(
    module: torch.nn.Module, layer: LayerPages, group: Group, query: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of a group's new tokens [requests, Hq, new, D]."""
    view = layer.read(group, query)
    if group.past == 0:
        return _dense(module, query, view.key.recent, view.value.recent, None, options)
    scaling = options["scaling"]
    return kv_attention(
        query, view, softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=group.mask, softcap=options["softcap"] or 0.0, sink_logits=options["s_aux"],
    )  # fmt: skip


def _dense(
    module: torch.nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    out, _ = vq_attention(module, query, keys, values, mask, is_causal=True, **options)
    return out.transpose(1, 2)


def _coded(template: VQCache, index: int) -> VQCacheLayer:
    layer = template.layers[index]
    if not isinstance(layer, VQCacheLayer):
        raise VQCacheError(
            f"layer {index} of the cache is a {type(layer).__name__}, which pages of codes do not "
            "hold. Take cache_config out of the generation config."
        )
    return layer
