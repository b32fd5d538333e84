"""How `cuda.attention_prefill` calls kernels, without a GPU: PyTorch's are replaced by what they
were seen to do on an H200, ours by their specifications."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cuda.kv import prefill as cuda_prefill
from hf_vq.backends.torch import kv_attention as torch_attention
from hf_vq.backends.torch.partial_softmax import Maths
from hf_vq.ops import KVCacheView, kv_attention
from hf_vq.ops.reference import codes as reference
from tests.fixtures.kv.attention_float64 import make, written_out

ran: list[str] = []


def flash(
    query: Tensor, keys: Tensor, values: Tensor, dropout: float, causal: bool, debug: bool, *,
    scale: float,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Heads of one size; causal: the last query sees the last key; sums [B, Hq, Q]."""
    ran.append("flash")
    assert keys.shape == values.shape and query.shape[1] % keys.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (query, keys, values)) and not dropout
    seen = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool)
    seen = seen.tril(keys.shape[2] - query.shape[2]) if causal else seen
    assert not causal or query.shape[2] == keys.shape[2]
    return *Maths().attend(query, keys, values, scale, mask=seen[None, None]), None


def cudnn(
    query: Tensor, keys: Tensor, values: Tensor, bias: None, lse: bool, dropout: float,
    causal: bool, debug: bool, *, scale: float,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Sums [B, Hq, Q, 1]."""
    ran.append("cudnn")
    assert bias is None and lse and not causal and keys.shape[2] % 1024 == 0
    assert query.shape[2] % 128 == 0
    out, lse_ = Maths().attend(query, keys, values, scale)
    return out.to(query.dtype), lse_[..., None], None


def efficient(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, lse: bool, dropout: float,
    causal: bool, *, scale: float,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """As many heads of keys as of queries; sums [B, Hq, Q rounded up to 32], 0 where nothing is
    seen."""
    ran.append("efficient")
    assert query.shape[:2] == keys.shape[:2] == values.shape[:2] and lse
    if bias is not None:
        assert bias.shape == (*query.shape[:3], keys.shape[2]) and bias.dtype == query.dtype
        assert bias.stride(-1) == 1 and bias.stride(-2) % 8 == 0
    out, total = Maths().attend(query, keys, values, scale, mask=bias, causal=causal)
    total = torch.where(total.isfinite(), total, 0.0)
    padded = torch.nn.functional.pad(total, (0, -total.shape[2] % 32), value=torch.inf)
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, padded, None


def decode(
    codes: Tensor, scale: Tensor, codebook: Tensor, mean: Tensor | None, scheme: object,
    head_dim: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows = reference.decode_rotated(codes, codebook, scale, scheme, head_dim)  # type: ignore[arg-type]
    return (rows if mean is None else rows + mean).to(dtype)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    aten = SimpleNamespace(
        _scaled_dot_product_flash_attention=lambda *x, **y: rounded(flash, x, y),
        _scaled_dot_product_cudnn_attention=cudnn,
        _scaled_dot_product_efficient_attention=efficient,
    )
    monkeypatch.setattr(cuda_prefill, "_aten", aten)
    monkeypatch.setattr(cuda_prefill, "decode", decode)
    monkeypatch.setattr(cuda_prefill, "merge", lambda *given: Maths().merge(*given))
    monkeypatch.setattr(cuda_prefill, "_rotate", reference.rotate)
    monkeypatch.setattr(cuda_prefill, "_has_fast_cudnn", lambda ordinal: True)
    monkeypatch.setattr(torch_attention, "DECODED_BYTES", 1 << 20)

    def run(*arguments: object) -> Tensor:
        return torch_attention.attention(*arguments, maths=cuda_prefill._MATHS)  # type: ignore[arg-type]

    others = [entry for entry in dispatch.ENTRIES if entry.op != "kv_attention"]
    prefill = dispatch.Entry("test.prefill", "kv_attention", dispatch.Implementation(run))
    ran.clear()
    with dispatch.using([*others, prefill]):
        yield


def rounded(kernel: Callable[..., tuple], given: tuple, options: dict) -> tuple:
    out, *others = kernel(*given, **options)
    return (out.to(given[0].dtype), *others)


def check(query: Tensor, cached: KVCacheView, **options: object) -> None:
    """As in tests/gpu/kv/test_prefill.py."""
    options = {"softmax_scale": query.shape[-1] ** -0.5, **options}
    out = kv_attention(query, cached, **options)  # type: ignore[arg-type]
    exact = written_out(query, cached, torch.float64, **options)  # type: ignore[arg-type]
    plain = written_out(query, cached, query.dtype, **options)  # type: ignore[arg-type]
    assert out.dtype == query.dtype and out.shape == exact.shape
    eps = torch.finfo(query.dtype).eps
    largest = [
        x.float().norm(dim=-1).max() for x in (query, cached.key.recent, cached.value.recent)
    ]
    allowed = 2 * (plain.double() - exact).abs().max() + eps * exact.abs().max()
    allowed += eps * options["softmax_scale"] * math.prod(largest) / math.sqrt(query.shape[-1])
    assert (out.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("queries", [1, 9, 33])
@pytest.mark.parametrize("dims", [(64, 64), (64, 32)])
def test_kernels_are_called_as_they_want_it(
    batch: int, queries: int, dims: tuple[int, int]
) -> None:
    cached = make(
        "u4", torch.bfloat16, batch=batch, dim=dims[0], value_dim=dims[1], length=150, window=8,
        fresh=queries,
    )  # fmt: skip
    query = torch.randn(batch, queries, 4, dims[0]).bfloat16().transpose(1, 2)
    check(query, cached)
    masked = {"efficient"} if queries > 1 else set()  # one query has no band
    assert set(ran) == ({"flash"} | masked if dims[0] == dims[1] else {"efficient"})
    ran.clear()
    mask = torch.rand(batch, 1, queries, 150) > 0.5
    check(query, cached, mask=mask)
    check(query, cached, mask=mask[:1])
    assert set(ran) == {"efficient"}


@pytest.mark.parametrize("queries", [7, 64, 150])
def test_cudnn_gets_few_sizes(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_prefill, "_MANY_QUERIES", 1)
    cached = make("u2", torch.bfloat16, batch=2, dim=16, length=2300 + queries, fresh=queries)
    query = torch.randn(2, 4, queries, 16).bfloat16()
    out = kv_attention(query, cached, softmax_scale=0.25)
    assert ran.count("cudnn") == 1 and ran.count("flash") == 2
    monkeypatch.setattr(cuda_prefill, "_MANY_QUERIES", 1 << 30)
    same = kv_attention(query, cached, softmax_scale=0.25)
    assert (out.float() - same).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * out.abs().max()


def test_what_needs_float32() -> None:
    cached = make("u4", torch.bfloat16, dim=16, length=80, window=8, fresh=12)
    query = torch.randn(2, 4, 12, 16).bfloat16()
    check(query, cached, softcap=5.0)
    check(query, cached, mask=torch.randn(2, 1, 12, 80))
    assert not ran
    check(torch.randn(2, 4, 12, 16), make(dim=16, length=80, window=8, fresh=12))
    assert not ran


def test_a_query_that_sees_nothing() -> None:
    cached = make("u4", torch.bfloat16, dim=16, length=80, window=8, fresh=12)
    query = torch.randn(2, 4, 12, 16).bfloat16()
    mask = torch.rand(2, 1, 12, 80) > 0.5
    mask[1, :, 3] = False
    mask[0, :, :, :66] = False  # nor in the first parts
    check(query, cached, mask=mask, sink_logits=torch.randn(4))
