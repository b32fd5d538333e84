"""Continuous batching with pages of codes: `model.generate_batch`, `ContinuousBatchingManager` and
`transformers serve --continuous-batching`.

    GenerationConfig(cache_implementation="quantized", cache_config={"backend": "vq"})

says to continuous batching what it says to `generate`: the KV cache holds codes. What Transformers
5.23 lets one plug, and what is replaced here:

    attention       AttentionInterface, by the name `vq_paged`; it needs no mask, which for `sdpa`
                    would be a matrix of all tokens of a batch and all tokens of the cache
    allocation      `CacheAllocator` is made to be subclassed: `CodePageAllocator` is that of full
                    attention with other pages. Scheduler, prefix sharing, forks, eviction and
                    offloading to the CPU are Transformers', as they move whole blocks
    which cache     no hook: `ContinuousBatchingManager._create_batch_processor` names its class.
                    `PagedManager` overrides it, as it does the choice of the attention
    CUDA graphs     of steps of one token, as Transformers makes them for flash attention:
                    `PagedManager` decides what is decided for that
    which manager   no hook: `ContinuousMixin.init_continuous_batching` names its class; it is
                    replaced (`patches.TABLE`) and does what it did unless the generation config
                    says `vq`

The interfaces are not public, so their signatures are compared first, and others are refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import transformers
from transformers.generation import GenerationConfig

from ..cache import VQCache
from ..cache.codebooks import title
from ..errors import VQCacheError
from ..hf.generation import BACKEND

NEEDED = "5.23"  # whose interfaces are those that are used here
_SIGNATURES = {
    "cache.PagedAttentionCache": "config continuous_batching_config device distributed_helper dtype"
    " model_supports_logits_to_keep",
    "cache.PagedAttentionMemoryHandler": "config cb_config dtype bytes_per_sector tokens_per_sector"
    " bytes_per_block attn_types model_supports_logits_to_keep",
    "cache_allocators.FullAttentionCacheAllocator": "index config num_key_value_heads cache_dtype"
    " page_size layer_indices allow_block_sharing",
    "cache_allocators.SlidingAttentionCacheAllocator": "index config num_key_value_heads"
    " cache_dtype page_size layer_indices allow_block_sharing",
    "cache_allocators.CachePool": "num_sectors num_allocators num_reserved_sectors",
    "continuous_api.ContinuousBatchProcessor": "cache config generation_config"
    " continuous_batching_config logit_processor input_queue cancel_queue output_router"
    " background_thread_status model_device model_dtype scheduler distributed_helper",
    "continuous_api.ContinuousBatchingManager": "model generation_config"
    " continuous_batching_config workload_hints",
    "initialization.resolve_using_hints": "cb_config workload_hints",
    "initialization.resolve_without_hints": "cb_config",
}
# What subclasses override or call: under another name it would do nothing, without a word.
_ATTRIBUTES = {
    "cache.PagedAttentionCache": "extend_read_and_write_indices update _infer_read_cache_limit"
    " _infer_max_decode_fast_path_length fill_block_table",
    "cache.PagedAttentionMemoryHandler": "bytes_per_cache_token fixed_overhead_bytes"
    " _check_footprint compute_memory_footprint infer_max_batch_tokens_and_num_sectors",
    "cache_allocators.FullAttentionCacheAllocator": "get_read_indices register_cache_tensor update"
    " fill_block_table",
    "cache_allocators.SlidingAttentionCacheAllocator": "register_cache_tensor update",
    "continuous_api.ContinuousBatchProcessor": "reset",
    "continuous_api.ContinuousBatchingManager": "switch_to_cb_friendly_attn start stop destroy"
    " warmup pause is_running _run_generation_loop _create_batch_processor",
}
logger = logging.getLogger("ContinuousBatchingLogger")  # Transformers' own
_OPTIONS = {"backend", "scheme", "sinks", "window"}


@functools.lru_cache(1)
def objection() -> str | None:
    """Why this Transformers cannot hold codes in pages, or None."""
    for name, expected in _SIGNATURES.items():
        module, attribute = name.split(".")
        where = f"transformers.generation.continuous_batching.{module}"
        try:
            kind = getattr(__import__(where, fromlist=["_"]), attribute)
        except (ImportError, AttributeError):
            return f"it has no {where}.{attribute}"
        found = inspect.signature(kind)
        if list(found.parameters) != expected.split():
            return f"{where}.{attribute} takes {', '.join(found.parameters)}"
        for used in _ATTRIBUTES.get(name, "").split():
            if not hasattr(kind, used):
                return f"{where}.{attribute} has no {used}"
    return None


def with_vq_pages(begin: Any) -> Any:
    """`init_continuous_batching`, which reads the generation config first (`patches.TABLE`)."""
    signature = inspect.signature(begin)

    @functools.wraps(begin)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        config = given.get("generation_config")
        options = _options(config) or _options(self.generation_config)
        problem = objection()
        if options is not None and problem:
            raise VQCacheError(
                f"continuous batching with the cache backend 'vq' needs transformers {NEEDED}; this"
                f" is {transformers.__version__}: {problem}. Upgrade Transformers, or take"
                " cache_config out of the generation config for pages of floats."
            )
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if kept is not None and not problem:
            _check_kept(self, kept, options)
        if kept is not None or options is None:
            return begin(self, *args, **kwargs)
        from .cache import groups_of
        from .key_means import template_of
        from .manager import PagedManager

        groups_of(self.config.get_text_config())
        template = template_of(self, options.get("scheme"))
        config = self.generation_config if config is None else config
        settings = _completed(config, given.get("continuous_batching_config"))
        return PagedManager(self, config, settings, template, given.get("workload_hints"))

    return init_continuous_batching


def _completed(config: GenerationConfig, settings: Any) -> Any:
    """What `init_continuous_batching` of Transformers does to the two configs."""
    if config.eos_token_id is None:
        logger.warning("`eos_token_id` not set in GenerationConfig. Setting to -1 (disabled).")
        config.eos_token_id = -1
    deprecated = getattr(config, "continuous_batching_config", None)
    if settings is None and isinstance(deprecated, transformers.ContinuousBatchingConfig):
        logger.warning(
            "Passing ContinuousBatchingConfig through GenerationConfig is deprecated. Please pass "
            "it separately using the continuous_batching_config kwarg."
        )
        return deprecated
    return settings


def _check_kept(model: Any, kept: Any, options: dict[str, Any] | None) -> None:
    """Refuse a manager that was kept for the next session, if its pages are others than those that
    are asked for now."""
    from .manager import PagedManager

    has = kept.template.options.scheme if isinstance(kept, PagedManager) else None
    asked = None
    if options is not None:
        empty = VQCache.from_pretrained(model, options.get("scheme"), sinks=0, window=0)
        asked = empty.options.scheme
    if has != asked:
        raise VQCacheError(
            f"the manager that was kept (persistent_manager=True) has pages of {_title(has)}, the "
            f"generation config asks for {_title(asked)}. Call "
            "model.destroy_cached_continuous_batching_manager() first."
        )


def _title(scheme: Any) -> str:
    return "floats" if scheme is None else title(scheme)


def _options(config: GenerationConfig | None) -> dict[str, Any] | None:
    """The cache_config of a generation config that asks for codes.

    Raises:
        VQCacheError: it has keys that mean nothing to pages.
    """
    options = getattr(config, "cache_config", None)
    if getattr(config, "cache_implementation", None) != "quantized":
        return None  # nor does generate read cache_config then
    if not isinstance(options, dict) or options.get("backend") != BACKEND:
        return None
    if unknown := sorted(set(options) - _OPTIONS):
        raise VQCacheError(
            f"cache_config has keys {unknown} that continuous batching cannot follow: pages take "
            "the scheme only. Leave them out."
        )
    if wrong := [name for name in ("sinks", "window") if options.get(name)]:
        raise VQCacheError(
            f"cache_config asks for {' and '.join(wrong)}, but pages hold codes only: what a query "
            "reads may not depend on who shares a page. Leave them out, or set them to 0."
        )
    return options
