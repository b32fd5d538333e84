"""`PagedManager`: Transformers' `ContinuousBatchingManager` with another cache and attention."""

from __future__ import annotations

import gc
from copy import copy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (
    resolve_using_hints,
    resolve_without_hints,
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.utils import logging

from ..cache import VQCache
from ..errors import VQCacheError
from .attention_switch import hold, release
from .cache import PagedCodes, groups_of, page_formats

logger = logging.get_logger(__name__)


class PagedManager(ContinuousBatchingManager):
    """Continuous batching whose pages hold codes; made by `model.init_continuous_batching`.

    Args:
        model: that generates; its attention is `vq_paged` until its last manager stops.
        generation_config: as Transformers' manager takes it.
        continuous_batching_config: likewise; None = its defaults.
        template: an empty cache of the model, whose layers say how each is coded.
        workload_hints: likewise.

    Raises:
        VQCacheError: the config asks for CUDA graphs or compilation that there cannot be.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig | None,
        template: VQCache,
        workload_hints: Any = None,
    ) -> None:
        self.template = template
        config = continuous_batching_config or ContinuousBatchingConfig()
        try:
            known = copy(config)
            known.max_blocks_per_request = None  # it would warn that there are no block tables
            super().__init__(model, generation_config, known, workload_hints)
            self._decide_graphs(config, workload_hints)
        except BaseException:
            release(model, self)
            raise

    def _decide_graphs(self, given: ContinuousBatchingConfig, hints: Any) -> None:
        """Transformers has block tables, and CUDA graphs of steps of one token, for flash attention
        only: what it decides for that is decided here, where kernels read tables.

        Args:
            given: the config before anything was decided.
            hints: of the workload.
        """
        settings = self.continuous_batching_config
        compiled = settings.varlen_compile_config or settings.decode_compile_config
        if compiled or given.decode_compile_config:
            raise VQCacheError(
                "pages of codes are not read by compiled code. Leave the compile configs and "
                "default_compile_level out of the ContinuousBatchingConfig."
            )
        tables = self._tables(settings.page_size)
        varlen, decode = settings.cuda_graph_booleans
        if varlen or (decode and not tables):
            raise VQCacheError(
                "prompts in pages of codes are read by a number of launches that changes with the "
                "batch, and so is everything where no kernel reads tables of pages, or where "
                "layers of sliding attention keep floats: no CUDA graph holds them. Set "
                "use_cuda_graph to (False, True), or leave it and the padding intervals out of the "
                "ContinuousBatchingConfig."
            )
        if not tables:
            if given.max_blocks_per_request:
                logger.warning(
                    "max_blocks_per_request is not used: no kernel reads tables of these pages."
                )
            return
        asked = copy(given)
        resolve_using_hints(asked, hints)
        resolve_without_hints(asked)
        settings.max_blocks_per_request = asked.max_blocks_per_request
        if given.use_cuda_graph is None and self.model.device.type == "cuda":
            settings.use_cuda_graph = (False, settings.max_blocks_per_request > 0)
        if given.use_async_batching is None:
            settings.use_async_batching = any(settings.cuda_graph_booleans)

    def _tables(self, page_size: int) -> bool:
        """Whether all layers have pages that kernels read through tables."""
        model, text = self.model, self.model.config.get_text_config()
        formats = page_formats(self.template, text, page_size, model.dtype, model.device)
        full = len(groups_of(text)) == 1
        return full and all(page.tables for page in formats.values())

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Read the pages by `vq_paged`, whatever the model's attention is."""
        hold(model, self)

    def warmup(self) -> None:
        """Capture CUDA graphs, as Transformers does. What earlier managers left is freed before:
        a process that frees graphs while it captures one ends."""
        gc.collect()
        super().warmup()

    def start(self) -> None:
        """Start the thread that generates; also again, after it has stopped."""
        if not self.is_running():
            hold(self.model, self)
        super().start()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the thread that generates, as Transformers does."""
        super().stop(*args, **kwargs)
        if not self.is_running():  # else the thread does it when it ends
            release(self.model, self)

    def destroy(self) -> None:
        """Stop for good, as Transformers does."""
        super().destroy()
        release(self.model, self)

    def _run_generation_loop(self) -> None:
        try:
            super()._run_generation_loop()
        finally:
            release(self.model, self)

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """As Transformers does, but what was put on the device is there when this returns: batches
        are copied and computed on streams of their own, which do not wait for the one that fills
        inputs with zeros. On a busy GPU that came after the first batch, which then had none."""
        try:
            processor = self.batch_processor
            if isinstance(processor, ContinuousBatchProcessor):
                processor.reset()
            else:
                processor = self._new_batch_processor()
            if (device := self.model.device).type == "cuda":
                torch.cuda.synchronize(device)
        except BaseException:
            release(self.model, self)
            raise
        return processor

    def _new_batch_processor(self) -> ContinuousBatchProcessor:
        """As Transformers does, but for the class of the cache."""
        config, settings = self.model.config.get_text_config(), self.continuous_batching_config
        keeps = getattr(self.model, "_supports_logits_to_keep", None)
        cache = PagedCodes(
            self.template, config, settings, self.model.device, self.distributed_helper,
            self.model.dtype, bool(callable(keeps) and keeps()),
        )  # fmt: skip
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(settings, cache.num_blocks, cache.max_batch_tokens)
        if settings.scheduler_type not in SCHEDULER_MAPPING:
            raise VQCacheError(
                f"scheduler_type {settings.scheduler_type!r} is none of {list(SCHEDULER_MAPPING)}."
            )
        scheduler = SCHEDULER_MAPPING[settings.scheduler_type](
            cache, settings.safety_margin, settings.max_requests_per_batch
        )
        return ContinuousBatchProcessor(
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
