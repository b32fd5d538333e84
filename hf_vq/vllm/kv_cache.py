"""A KV cache of codes for vLLM: who asks for it, how large its blocks are, what centres its keys.

    vLLM's block of T tokens, H heads      uint8 [H, T, bytes of a token and head], dense
    the page of `serving.pages` in it      [ keys: codes | scales ][ values: codes | scales ]

vLLM counts blocks by the bytes of a token and head, and hands them out; all else is that of pages.
Nothing of a block depends on a prompt: the mean of the keys is that of `hf-vq calibrate`, or 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, wraps
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from .. import env, patches
from ..cache.codebooks import KVCodebooks, find
from ..cache.key_means import Calibrated
from ..errors import VQConfigError
from ..formats.catalog import KVScheme, kv_scheme
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme

try:
    from vllm.config.cache import register_kv_cache_dtype
except ImportError:  # before 0.33
    register_kv_cache_dtype = None

logger = init_logger("vllm.hf_vq")  # where vLLM's handlers are

SCHEMES = ("u4", "u3", "u2", "qserve-kv4")
DTYPES = {f"vq_{name}": name for name in SCHEMES}
"""Scheme of each `--kv-cache-dtype` that vLLM takes from 0.33 on."""
FOLDER = "kv"
"""Of a model, where kv_codebooks.safetensors may be, too: vLLM takes all files next to dense
weights for weights."""
_CACHED = AttentionType.DECODER, AttentionType.ENCODER_DECODER
"""Attention over a KV cache."""
_CURE = f"Set {env.VLLM_KV.name} to {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}"
_chosen: list[KVScheme] = []  # that of the model which this process loads


def register() -> None:
    """Make the cache known to vLLM, if it is asked for; may be called again.

    Raises:
        VQConfigError: `HF_VQ_VLLM_KV` names no scheme that blocks hold.
    """
    requested = env.VLLM_KV.get()
    if requested:
        scheme_of("auto")
        logger.info("%s=%s: KV caches are codes.", env.VLLM_KV.name, requested)
        _register(AttentionBackendEnum.CPU_ATTN, "VQCPUAttentionBackend")
    if requested or register_kv_cache_dtype is not None:
        _register(AttentionBackendEnum.CUSTOM, "VQAttentionBackend")
        patches.apply(patches.VLLM_BACKEND)
    if register_kv_cache_dtype is not None:
        for name in DTYPES:
            _register_dtype(name)
    if requested and not hasattr(AttentionBackend, "customize_spec"):
        patches.apply(patches.VLLM_KV)


def _register(backend: Any, name: str) -> None:
    path = f"hf_vq.vllm.attention.{name}"
    if not backend.is_overridden():
        register_backend(backend, path)
    elif backend.get_path() != path:
        logger.warning(
            "%s is another plugin's (%s): no KV cache has codes.", backend.name, backend.get_path()
        )


def _register_dtype(dtype: str) -> None:
    from vllm.config.cache import is_known_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        """A dtype of a KV cache, as vLLM asks about it."""

        name = dtype

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    if not is_known_kv_cache_dtype(dtype):
        register_kv_cache_dtype(dtype)(Handler)


def scheme_of(kv_cache_dtype: str) -> KVScheme:
    """The scheme that `--kv-cache-dtype` asks for, or the environment where that is `auto`.

    Raises:
        VQConfigError: there is none, or no block holds it.
    """
    name = DTYPES.get(kv_cache_dtype) or (env.VLLM_KV.get() if kv_cache_dtype == "auto" else "")
    if name not in SCHEMES:
        given = f"{env.VLLM_KV.name}={name!r}" if kv_cache_dtype == "auto" else kv_cache_dtype
        raise VQConfigError(
            f"{given}: no scheme of vLLM's KV cache. {_CURE}, and --kv-cache-dtype to auto."
        )
    return kv_scheme(name)


def choose(kv_cache_dtype: str) -> KVScheme:
    """`scheme_of`, of the model that is loaded: what says the size of a block names no dtype."""
    _chosen[:] = [scheme_of(kv_cache_dtype)]
    return _chosen[0]


def token_bytes(scheme: KVScheme, head_dim: int) -> int:
    """Bytes of a token's keys and values, of one head."""
    return sum(_row_bytes(side, head_dim) for side in (scheme.key, scheme.value))


def _row_bytes(scheme: VQScheme, head_dim: int) -> int:
    return packed_size(head_dim // scheme.vector_size, scheme.entry_bits) + 2 * scheme.row_numbers


def chosen_bytes(head_dim: int) -> int:
    """`token_bytes` of the model that this process loads."""
    return token_bytes(_chosen[0] if _chosen else scheme_of("auto"), head_dim)


def coded(spec: Any) -> Any:
    """vLLM's `AttentionSpec` with blocks that hold codes.

    Raises:
        VQConfigError: values are narrower than keys.
    """
    if spec.state_content_bytes is not None:
        return spec
    _check(spec)
    size = chosen_bytes(spec.head_size)
    return replace(spec, dtype=torch.uint8, state_content_bytes=size)


def with_coded_blocks(before: Callable[..., Any]) -> Callable[..., Any]:
    """`Attention.get_kv_cache_spec` of a vLLM in which backends cannot say what a block holds."""

    @wraps(before)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import TQFullAttentionSpec

        spec = before(self, vllm_config)
        if spec is None or not getattr(self.attn_backend, "holds_codes", False):
            return spec
        _check(spec)
        given = {each.name: getattr(spec, each.name) for each in fields(spec)}
        size = chosen_bytes(spec.head_size)
        return TQFullAttentionSpec(**given | {"dtype": torch.uint8, "tq_slot_size": size})

    return get_kv_cache_spec


def with_coded_backend(before: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of a backend, which is that of codes on a GPU where codes are asked for."""

    @wraps(before)
    def get_attn_backend(backend: Any, attn_selector_config: Any, *args: Any, **more: Any) -> Any:
        from vllm.platforms import current_platform

        of, on_gpu = attn_selector_config, current_platform.device_type != "cpu"
        requested = env.VLLM_KV.get() or of.kv_cache_dtype in DTYPES
        if requested and on_gpu and of.attn_type in _CACHED:
            if backend not in (None, AttentionBackendEnum.CUSTOM):
                raise VQConfigError(
                    f"--attention-backend {backend.name} keeps no codes, which {env.VLLM_KV.name} "
                    "or --kv-cache-dtype asks for. Leave one of them out."
                )
            backend = AttentionBackendEnum.CUSTOM
        return before(backend, attn_selector_config, *args, **more)

    return get_attn_backend


def _check(spec: Any) -> None:
    if getattr(spec, "head_size_v", None) not in (None, spec.head_size):
        raise VQConfigError(
            f"keys of {spec.head_size} numbers and values of {spec.head_size_v}: blocks of codes "
            f"hold heads of one size. Serve this model without {env.VLLM_KV.name}."
        )


def means_of(
    model: str, revision: str | None, layer: int, heads: int, rank: int, ranks: int
) -> Calibrated | None:
    """The means of the keys of a layer, of the heads that a rank has; None: nothing is known.

    Args:
        model: its folder, or its name on the Hub.
        layer: number of the layer.
        heads: of this rank.
        rank: this one.
        ranks: how many there are; some may have the same heads.

    Raises:
        VQConfigError: they are of another model.
    """
    books = _codebooks(model, revision)
    if books is None or layer >= len(books.means):
        return None
    known = books.means[layer]
    if known is None:
        return None
    total = len(known.mean)
    first = rank * total // ranks
    if heads != max(total // ranks, 1):
        raise VQConfigError(
            f"{model}: the means of the keys of layer {layer} are of {total} heads, and a rank of "
            f"{ranks} has {heads}. Make kv_codebooks.safetensors with `hf-vq calibrate` again."
        )
    rows = slice(first, first + heads)
    turning, smoothing = (
        None if of_heads is None else of_heads[rows]
        for of_heads in (known.rotary_mean, known.smoothing)
    )
    return Calibrated(known.mean[rows], turning, known.interleaved, smoothing)


@lru_cache(maxsize=2)
def _codebooks(model: str, revision: str | None) -> KVCodebooks | None:
    path = find(model, revision) or find(os.path.join(model, FOLDER))
    if path is not None:
        return KVCodebooks.load(path)
    logger.warning(
        "%s has no kv_codebooks.safetensors: keys are coded without a mean, which costs quality. "
        "`hf-vq calibrate %s %s --kv u4` makes it.", model, model, os.path.join(model, FOLDER),
    )  # fmt: skip
    return None
