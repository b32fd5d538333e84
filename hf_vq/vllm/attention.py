"""The attention backend of a KV cache of codes, for vLLM.

    do_kv_cache_update     new keys and values become codes in their slots
    forward                every query reads every token as codes, its own too

So a token's codes, and what a request gets, do not depend on how its prompt was cut, on who shares
its blocks, or on whether it was evicted (`serving.pages`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)

from .. import env
from ..cache.codebooks import codebook_for
from ..cache.key_means import Rotary
from ..cache.kv_side import check_head_dim
from ..cache.rotary import RopeFrequencies
from ..errors import VQConfigError
from ..ops import kv_attention
from ..ops.layout import BLOCK
from ..serving.batch import Group, Slots
from ..serving.pages import LayerPages, PageFormat
from ..serving.prefill import DECODED_BYTES, flash, is_flash
from . import kv_cache
from .step import VQMetadata, VQMetadataBuilder

_PAGE = 64  # tokens, of which a block on a GPU is a multiple


class VQAttentionBackend(AttentionBackend):
    """Attention over blocks of codes, on a GPU."""

    holds_codes = True
    accept_output_buffer = True
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *kv_cache.DTYPES]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's table of backends."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens of a block."""
        return [MultipleOf(_PAGE)]

    @staticmethod
    def get_impl_cls() -> type[VQAttentionImpl]:
        """The class that attends."""
        return VQAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[VQMetadataBuilder]:
        """The class that looks at a step first."""
        return VQMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks of the size of their codes; from vLLM 0.32 on."""
        return kv_cache.coded(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Blocks that lie in one piece; from vLLM 0.32 on."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Shape of the blocks uint8, before vLLM 0.32."""
        return num_blocks, num_kv_heads, block_size, kv_cache.chosen_bytes(head_size)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """A connector may send some heads, and the bytes of a block are not sorted by head."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """True: logits that attend to nothing are added."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any, **more: Any
    ) -> str | None:
        """Why not, or None."""
        scheme = kv_cache.scheme_of(kv_cache_dtype or "auto")
        like = torch.empty(1, 1, 1, head_size, dtype=dtype, device="cuda")
        if PageFormat.of(scheme, 1, head_size, _PAGE, like).tables:
            return None
        return f"no kernel of hf_vq reads blocks of heads of {head_size} numbers"


class VQCPUAttentionBackend(VQAttentionBackend):
    """The same on a CPU, where vLLM has one backend and lets it be replaced."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's table of backends."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Tokens of a block."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens of a block that kernels read."""
        return BLOCK

    @classmethod
    def supports_combination(cls, *others: Any, **more: Any) -> str | None:
        """Why not, or None."""
        return None


@dataclass(frozen=True)
class _Model:
    """Where the means of keys are, and how keys turn."""

    folder: str
    revision: str | None
    config: Any


class VQAttentionImpl(AttentionImpl[VQMetadata]):
    """Attention of one layer of vLLM.

    Raises:
        VQConfigError: the layer needs what codes do not have; says which cure there is.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale, self.softcap, self.sinks = float(scale), logits_soft_cap or 0.0, sinks
        self.kv_cache_dtype, self.tables = kv_cache_dtype, current_platform.device_type != "cpu"
        self.scheme = kv_cache.choose(kv_cache_dtype)
        lacks = {
            "ALiBi": alibi_slopes is not None,
            f"a sliding window of {sliding_window} tokens": sliding_window is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
        }
        if missing := [name for name, requested in lacks.items() if requested]:
            raise VQConfigError(
                f"a layer has {missing[0]}, which vLLM's KV cache of codes does not have. Serve "
                f"this model without {env.VLLM_KV.name}, or with Transformers, where layers with "
                "windows keep floats."
            )
        for side in (self.scheme.key, self.scheme.value):
            check_head_dim(side, head_size, "a layer of vLLM")
        settings = get_current_vllm_config().model_config
        self.model = _Model(settings.model, settings.revision, settings.hf_config)
        self._pages: tuple[tuple[int, torch.Size], LayerPages] | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, blocks: Tensor, slot_mapping: Tensor
    ) -> None:
        """Encode new keys and values [tokens, H, D] to slots int64 [tokens]; those below 0 are
        nobody's."""
        pages = self._pages_of(layer, blocks)
        count = slot_mapping.shape[0]
        positions = None
        if pages.turns:
            step = _metadata(layer.layer_name)
            if step is None:  # a step that warms up or is captured: all slots are below 0
                return
            positions = step.positions()[:count]
        keys, values = (x[:count].transpose(0, 1)[None] for x in (key, value))
        if self.tables:
            pages.put(keys, values, slot_mapping, positions)
            return
        kept = (slot_mapping >= 0).nonzero()[:, 0]
        if len(kept) < count:
            keys, values, slot_mapping = keys[:, :, kept], values[:, :, kept], slot_mapping[kept]
            positions = None if positions is None else positions[kept[kept < len(positions)]]
        slots = Slots(slot_mapping, blocks.shape[2], key.device, positions)
        pages.write(keys, values, slots)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Tensor,
        attn_metadata: VQMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [tokens, Hq, D] over the blocks of their requests.

        Returns:
            `output` [tokens, Hq, D], written to.
        """
        if attn_metadata is None:  # vLLM looks how much memory a step takes
            if query.is_cuda:
                torch.empty(DECODED_BYTES, dtype=torch.uint8, device=query.device)
            return output.zero_()
        pages, step = self._pages_of(layer, blocks), attn_metadata
        query = query[: step.tokens]
        queries = query.transpose(0, 1)[None]  # [1, Hq, tokens, D]
        if step.batch is not None:
            for group in pages.groups(step.batch):
                self._read(pages, group, queries, output)
            return output
        if step.table is not None:
            rows = len(step.table.length)
            view = pages.through(step.table, query)
            output[:rows] = self._attention(query[:rows, :, None], view)[:, :, 0]
        for chunks in step.chunks:
            options = {"softcap": self.softcap, "s_aux": self.sinks}
            if is_flash(queries, self.num_kv_heads, chunks, options):
                output[chunks.span] = flash(pages, chunks, queries, self.scale)[0].transpose(0, 1)
                continue
            for group in chunks.single:
                self._read(pages, group, queries, output)
        return output

    def _read(self, pages: LayerPages, group: Group, query: Tensor, output: Tensor) -> None:
        """Attention of a group, whose codes are copied side by side.

        Args:
            query: [1, Hq, tokens of the batch, D].
            output: [tokens, Hq, D], written to.
        """
        rows = group.rows  # [requests, new]
        queries = query[0][:, rows].transpose(0, 1)  # [requests, Hq, new, D]
        view = pages.read(group, queries)
        if group.past == 0 and group.shift is None and not self.softcap and self.sinks is None:
            out = F.scaled_dot_product_attention(
                queries, view.key.recent, view.value.recent, is_causal=True, scale=self.scale,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )  # fmt: skip
        else:
            out = self._attention(queries, view, group.mask)
        output[rows.flatten()] = out.transpose(1, 2).flatten(0, 1)

    def _attention(self, query: Tensor, view: Any, mask: Tensor | None = None) -> Tensor:
        return kv_attention(
            query, view, softmax_scale=self.scale, mask=mask, softcap=self.softcap,
            sink_logits=self.sinks,
        )  # fmt: skip

    def _pages_of(self, layer: Any, memory: Tensor) -> LayerPages:
        """The blocks of a layer as pages; made once, as vLLM's memory does not move.

        Args:
            memory: uint8 [blocks, H, T, bytes of a token and head].

        Raises:
            VQConfigError: no kernel reads such blocks, or the means of the keys are of others.
        """
        place = memory.data_ptr(), memory.shape
        if self._pages is None or self._pages[0] != place:
            self._pages = place, self._make(layer, memory)
        return self._pages[1]

    def _make(self, layer: Any, memory: Tensor) -> LayerPages:
        blocks, heads, tokens, _ = memory.shape
        index, where = extract_layer_index(layer.layer_name), layer.layer_name
        like = torch.empty(1, heads, 1, self.head_size, dtype=layer.dtype, device=memory.device)
        known = None
        if self.scheme.centre_keys:
            known = kv_cache.means_of(
                self.model.folder, self.model.revision, index, heads,
                get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(),
            )  # fmt: skip
        rope = RopeFrequencies(self.model.config)
        rotary = None if known is None else Rotary.of(rope, index, like, known)
        has_rotary = known is not None and known.rotary_mean is not None
        page = PageFormat.of(self.scheme, heads, self.head_size, tokens, like, has_rotary)
        dense = memory[0].is_contiguous() and page.nbytes == memory[0].numel()
        if not dense or (memory.is_cuda and not page.tables):
            raise VQConfigError(
                f"{where}: blocks of {tokens} tokens, {heads} heads of {self.head_size} numbers "
                f"({list(memory.shape)}, {list(memory.stride())} apart) are not read by a kernel. "
                f"Choose a --block-size that {_PAGE} divides (16 on a CPU), or serve without "
                f"{env.VLLM_KV.name}."
            )
        flat = memory.as_strided((blocks, page.nbytes), (memory.stride(0), 1))
        books = (
            codebook_for(self.scheme.key, None, like, where),
            codebook_for(self.scheme.value, None, like, where),
        )
        return LayerPages(flat, page, books, known, rotary)


def _metadata(layer: str) -> VQMetadata | None:
    """Metadata of the running step for a layer; None in a step without requests."""
    found: Any = get_forward_context().attn_metadata
    found = found[0] if isinstance(found, list) else found
    known: VQMetadata | None = found[layer] if isinstance(found, dict) else found
    return known
