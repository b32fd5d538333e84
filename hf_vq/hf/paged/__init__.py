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
    which manager   no hook: `ContinuousMixin.init_continuous_batching` names its class; it is
                    replaced once, and does what it did unless the generation config says `vq`

The interfaces are not public, so their signatures are compared first, and others are refused.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from transformers.generation import GenerationConfig
from transformers.generation.continuous_batching import ContinuousMixin

from ...cache import VQCache
from ...errors import VQCacheError
from ..generation import BACKEND
from . import attention

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
}
_OPTIONS = {"backend", "scheme", "sinks", "window"}


@functools.lru_cache(1)
def objection() -> str | None:
    """Why this Transformers cannot hold codes in pages, or None."""
    for name, expected in _SIGNATURES.items():
        module, attribute = name.split(".")
        where = f"transformers.generation.continuous_batching.{module}"
        try:
            found = inspect.signature(getattr(__import__(where, fromlist=["_"]), attribute))
        except (ImportError, AttributeError):
            return f"it has no {where}.{attribute}"
        if list(found.parameters) != expected.split():
            return f"{where}.{attribute} takes {', '.join(found.parameters)}"
    return None


def register() -> None:
    """Let continuous batching read the generation config; a second call does nothing."""
    attention.register()
    mixin: Any = ContinuousMixin
    begin = mixin.init_continuous_batching
    if not hasattr(begin, "_hf_vq"):
        mixin.init_continuous_batching = _reading_the_config(begin)


def _reading_the_config(begin: Any) -> Any:
    @functools.wraps(begin)
    def init_continuous_batching(
        self: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        options = _options(generation_config) or _options(self.generation_config)
        if options is None or getattr(self, "_cached_continuous_batching_manager", None):
            return begin(self, generation_config, continuous_batching_config, **kwargs)
        if problem := objection():
            raise VQCacheError(
                f"continuous batching with the cache backend 'vq' needs transformers {NEEDED}; this"
                f" is {transformers.__version__}: {problem}. Upgrade Transformers, or take"
                " cache_config out of the generation config for pages of floats."
            )
        from .cache import groups_of
        from .manager import PagedManager

        groups_of(self.config.get_text_config())
        template = VQCache.from_pretrained(self, options.get("scheme"), sinks=0, window=0)
        config = generation_config or self.generation_config
        if config.eos_token_id is None:
            config.eos_token_id = -1  # as Transformers does: no token ends
        return PagedManager(self, config, continuous_batching_config, template, **kwargs)

    init_continuous_batching._hf_vq = True  # type: ignore[attr-defined]
    return init_continuous_batching


def _options(config: GenerationConfig | None) -> dict[str, Any] | None:
    """The cache_config of a generation config that asks for codes.

    Raises:
        VQCacheError: it has keys that mean nothing to pages.
    """
    options = getattr(config, "cache_config", None)
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
