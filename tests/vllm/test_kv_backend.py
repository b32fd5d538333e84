"""Who attends on a GPU if a KV cache of codes is asked for: the backend of codes, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import platforms
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from hf_vq import patches
from hf_vq.errors import VQConfigError
from hf_vq.vllm import kv_cache

CODES, FLOATS = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TRITON_ATTN


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A platform that has one, and takes the backend that it is given."""

    def chosen(selected: Any, **_: Any) -> str:
        platform.asked.append(selected)
        return "vllm.v1.attention.backend.AttentionBackend"

    platform = SimpleNamespace(device_type="cuda", get_attn_backend_cls=chosen, asked=[])
    forget()
    with set_current_vllm_config(VllmConfig()):
        monkeypatch.setattr(platforms, "current_platform", platform)
        yield platform
    forget()


def forget() -> None:
    """What other tests asked for, and what vLLM remembers."""
    patches.undo()
    for backend in (AttentionBackendEnum.CPU_ATTN, CODES):
        backend.clear_override()
    selector._cached_get_attn_backend.cache_clear()


def choose(backend: Any = None, kind: str = AttentionType.DECODER) -> None:
    """What a layer asks vLLM when it is made."""
    get_current_vllm_config().attention_config.backend = backend
    selector.get_attn_backend(64, torch.bfloat16, "auto", attn_type=kind)


@pytest.mark.parametrize("given", [None, CODES])
def test_codes_are_chosen(
    given: Any, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    kv_cache.register()
    kv_cache.register()
    choose(given)
    assert gpu.asked == [CODES]
    assert CODES.get_path() == "hf_vq.vllm.attention.VQAttentionBackend"


def test_another_backend_is_refused(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    kv_cache.register()
    with pytest.raises(VQConfigError, match=r"--attention-backend TRITON_ATTN.*HF_VQ_VLLM_KV"):
        choose(FLOATS)
    assert gpu.asked == []


def test_what_has_no_cache_is_left_to_vllm(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    kv_cache.register()
    choose(kind=AttentionType.ENCODER_ONLY)
    choose(FLOATS, AttentionType.ENCODER)
    gpu.device_type = "cpu"  # where the backend is replaced
    choose()
    assert gpu.asked == [None, FLOATS, None]


def test_nothing_changes_where_nobody_asks(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "")
    kv_cache.register()
    choose()
    choose(FLOATS)
    assert gpu.asked == [None, FLOATS]


def test_a_dtype_asks_too(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As --kv-cache-dtype names it from vLLM 0.33 on."""
    monkeypatch.setenv("HF_VQ_VLLM_KV", "")
    asked: list[Any] = []
    choice = kv_cache.with_coded_backend(lambda backend, of, **_: asked.append(backend))
    for dtype in ("vq_u4", "fp8", None):
        choice(
            backend=None, num_heads=8,
            attn_selector_config=SimpleNamespace(kv_cache_dtype=dtype, attn_type="decoder"),
        )  # fmt: skip
    assert asked == [CODES, None, None]
