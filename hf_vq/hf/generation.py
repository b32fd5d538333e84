"""Support of `model.generate` for a `VQCache`: three entries of `patches.TABLE`.

- `QuantizedCache`, so that `cache_implementation="quantized", cache_config={"backend": "vq"}` makes
  a `VQCache` (also from a saved generation_config.json); other backends are untouched;
- `GenerationMixin._prepare_cache_for_generation` is followed by `VQCache.expect_prompt`, so that
  the cache knows the left padding and where the prompt ends, by `VQCache.stop_past_recording`:
  an earlier assisted generation left the recording on, and by `VQCache.decide`: a cache with
  `max_cache_len` is compiled where generate can;
- `GenerationMixin._sample`, the loop over tokens, which says what may happen between two of them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache, QuantizedCache
from transformers.generation import GenerationMode, PrefixConstrainedLogitsProcessor
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from .. import patches
from ..cache import VQCache
from ..cache.argument import CACHE
from ..errors import VQCacheError
from . import step
from .graphs import cuda_graphs, greedy_loop
from .step.snapshot import package_of

BACKEND = "vq"
_OPTIONS = [
    name
    for name in inspect.signature(VQCache).parameters
    if name not in ("config", "key_means", "codebooks")  # JSON cannot hold tensors
]


class QuantizedCacheOrVQCache(QuantizedCache):
    """Stands for `QuantizedCache` in generate: makes a `VQCache` for the backend `vq`."""

    def __new__(cls, backend: str, config: PreTrainedConfig, **options: Any) -> Any:
        """The cache of a backend.

        Raises:
            VQCacheError: an option that VQCache does not have.
        """
        if backend != BACKEND:
            return QuantizedCache(backend, config, **options)
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise VQCacheError(
                f"cache_config of the backend 'vq' has unknown keys {unknown}; known: {_OPTIONS}."
            )
        return VQCache(config, **options)


def enable_cache_backend() -> None:
    """Let generation configs ask for a `VQCache`, in `generate` and in continuous batching:

        hf_vq.enable_cache_backend()
        model.generate(**inputs, cache_implementation="quantized", cache_config={"backend": "vq"})

    Models with codes do this when they are loaded, so only one of floats needs the call.
    """
    patches.apply(patches.BACKEND)


def with_vq_backend(plain: Any) -> Any:
    """The class that replaces `QuantizedCache` in generate."""
    return QuantizedCacheOrVQCache


def tell_the_prompt(prepare: Any) -> Any:
    """`_prepare_cache_for_generation`, which tells a `VQCache` about the prompt afterwards."""

    @functools.wraps(prepare)
    def wrapped(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        options = getattr(generation_config, "cache_config", None)
        if isinstance(options, dict) and options.get("backend") == BACKEND:
            # Transformers before 5.20 takes the backend's name out of the user's own dict.
            generation_config.cache_config = dict(options)
        result = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, VQCache):
            if self.config.is_encoder_decoder:
                raise VQCacheError(
                    f"{type(self).__name__} has cross-attention, which needs a separate cache: "
                    "past_key_values=EncoderDecoderCache(VQCache(config), "
                    "DynamicCache(config=config))."
                )
            mask = model_kwargs.get("attention_mask")
            mask = mask if mask is not None and mask.ndim == 2 else None
            # generate drops a mask of ones but remembers its length.
            length = getattr(generation_config, "_mask_length", None) if mask is None else None
            cache.expect_prompt(mask, length)
        # The decoder's prompt of an encoder-decoder is a few tokens and has no padding mask.
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if isinstance(own, VQCache):
            _decide(self, generation_config, own, cache, *args, **kwargs)
            # An assistant's own cache records from one of its many calls to the next.
            if not getattr(generation_config, "is_assistant", False):
                own.stop_past_recording()
            _check_candidates(generation_config, own)
            if isinstance(cache, VQCache):
                step.install(self, cache, _new_tokens(generation_config, model_kwargs))
        return result

    return wrapped


def around_the_loop(sample: Any) -> Any:
    """`GenerationMixin._sample`: captured models and decoding steps know that they are in it."""

    @functools.wraps(sample)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(sample).bind(self, *args, **kwargs)
        known = bound.arguments
        unchanging = package_of(sample) == _OWN and _runs_no_users_code(self, known)
        with cuda_graphs.loop(self, known, unchanging), step.loop(self, unchanging):
            rest = greedy_loop.greedy_rest(self, known) if unchanging else None
            with cuda_graphs.watching(rest.watch if rest else None):
                if rest is None:
                    return sample(self, *args, **kwargs)
                known["logits_processor"] = rest.seen
                try:
                    return sample(*bound.args, **bound.kwargs)
                except greedy_loop.HandOver as exception:
                    handed = exception.with_traceback(None)  # which keeps what `_sample` held
                return rest.finish(handed)

    return wrapped


def _runs_no_users_code(model: Any, options: dict[str, Any]) -> bool:
    """True if only Transformers' code runs between two tokens, and none that calls the user's."""
    streamer = options.get("streamer")
    called = [
        *(options.get("logits_processor") or ()), *(options.get("stopping_criteria") or ()),
        *([] if streamer is None else [streamer, getattr(streamer, "tokenizer", streamer)]),
    ]  # fmt: skip
    return (
        all(_is_of_transformers(type(each)) for each in called)
        and not any(type(each) in _CALLING for each in called)
        and not any(name in model.__dict__ for name in _BETWEEN)
        and all(package_of(getattr(type(model), name)) == _OWN for name in _BETWEEN)
    )


def _is_of_transformers(defined: Any) -> bool:
    return str(getattr(defined, "__module__", "")).startswith(f"{_OWN}.")


_OWN = "transformers"
_CALLING = (PrefixConstrainedLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
_BETWEEN = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""What calls a function of the user's, and methods of a model that the loop calls."""


def _new_tokens(generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """Count the tokens that `generate` makes at most."""
    if generation_config.max_new_tokens is not None:
        return int(generation_config.max_new_tokens)
    mask = model_kwargs.get("attention_mask")
    prompt = getattr(generation_config, "_mask_length", None)
    if mask is not None and mask.ndim == 2:
        prompt = mask.shape[1]
    return int(generation_config.max_length or 0) - (prompt or 0)


def _decide(
    model: Any,
    generation_config: Any,
    own: VQCache,
    cache: Any,
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Use a static cache where generate will compile, and refuse one that is too short."""
    plain = generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    plain = plain and not generation_config.is_assistant  # whose candidates are cropped
    reads = model.config._attn_implementation in ("sdpa", "vq")
    whole = getattr(generation_config, "prefill_chunk_size", None) is None
    settings = generation_config.compile_config
    compiles = model.device.type == "cuda" or getattr(settings, "_compile_all_devices", False)
    own.decide(compiles and plain and reads and whole and own is cache)
    if isinstance(cache, EncoderDecoderCache) and isinstance(cache.cross_attention_cache, VQCache):
        cache.cross_attention_cache.decide(False)
    limit = own.options.max_cache_len
    if own.is_compileable and limit is not None and max_cache_length > limit:
        raise VQCacheError(
            f"generate may need {max_cache_length} tokens of the cache, which has max_cache_len="
            f"{limit}. Make the cache larger, or max_new_tokens or max_length smaller."
        )


def _check_candidates(generation_config: Any, cache: VQCache) -> None:
    candidates = getattr(generation_config, "prompt_lookup_num_tokens", None) or 0
    if candidates >= cache.options.window:
        warnings.warn(
            f"prompt_lookup_num_tokens={candidates} with VQCache(window={cache.options.window}): "
            "candidates read each other as floats, greedy decoding reads codes beyond the window, "
            "so the two may differ. Use fewer candidates than the window.",
            stacklevel=5,  # through torch.no_grad of generate, to its caller
        )
