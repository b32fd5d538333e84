"""`hf_vq::kv_attention` against attention written out in float64, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_vq.cache.lazy_kv import decoded
from hf_vq.errors import VQCacheError
from hf_vq.ops import KVCacheView, kv_attention
from hf_vq.ops.kv import flatten
from tests.fixtures.kv.attention_float64 import decode, make, written_out
from tests.fixtures.kv.layouts import layouts  # noqa: F401


def check(query: Tensor, cached: KVCacheView, **options: object) -> None:
    """err(op) <= 2 err(same maths in torch at that dtype) + eps.

    eps: the output is rounded once to its dtype, and inside, in float32, a logit of at most
    softmax_scale |q| |k| is off by one rounding, which moves the output by as much times |v|.
    """
    options = {"softmax_scale": query.shape[-1] ** -0.5, **options}
    out = kv_attention(query, cached, **options)  # type: ignore[arg-type]
    exact = written_out(query, cached, torch.float64, **options)  # type: ignore[arg-type]
    plain = written_out(query, cached, query.dtype, **options)  # type: ignore[arg-type]
    assert out.dtype == query.dtype and out.shape == exact.shape
    allowed = 2 * (plain.double() - exact).abs().max()
    allowed += torch.finfo(query.dtype).eps * exact.abs().max()
    largest = [
        x.float().norm(dim=-1).max() for x in (query, cached.key.recent, cached.value.recent)
    ]
    allowed += torch.finfo(torch.float32).eps * options["softmax_scale"] * math.prod(largest)
    assert (out.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("dim", [8, 16, 64, 80, 96, 128, 192, 256])
def test_head_dims(dim: int) -> None:
    check(torch.randn(2, 2, 1, dim), make(dim=dim, length=29, window=8, slack=3))


@pytest.mark.parametrize(("scheme", "dim"), [("nomad-4", 320), ("nomad-u4", 264), ("u4", 520)])
def test_more_sub_quantizers_than_kernels_have(scheme: str, dim: int) -> None:
    check(torch.randn(2, 2, 1, dim), make(scheme, dim=dim, length=29, window=8, slack=3))


SCHEMES = ["u4", "u3", "u2", "k4v2", "nomad-u4", "nomad-4", "nomad-2", "nomad-1", "cq-4", "cq-2"]
SCHEMES += ["qserve-kv4"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_schemes_and_dtypes(scheme: str, dtype: torch.dtype) -> None:
    check(torch.randn(2, 2, 1, 64).to(dtype), make(scheme, dtype, length=29, window=8))


@pytest.mark.parametrize("scheme", ["u4", "u3", "u2", "k4v2", "nomad-u4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smoothed_keys(scheme: str, dtype: torch.dtype) -> None:
    cached = make(scheme, dtype, length=29, window=8, fresh=3, smoothed=True)
    for queries in (1, 3):
        check(torch.randn(2, 4, queries, 64).to(dtype), cached)
    check(torch.randn(2, 4, 1, 64).to(dtype), cached.replace(key_mean=None))
    keys = written_out_keys(cached)
    bound = 2 * torch.finfo(dtype).eps + 2e-5
    torch.testing.assert_close(decoded(cached, "key").double(), keys, rtol=bound, atol=bound)


def written_out_keys(cached: KVCacheView) -> Tensor:
    """Codes, decoded, with the floats of the window behind them and sinks in front."""
    key = cached.key
    assert key.smoothing is not None and key.mean is not None
    rows = decode(cached, "k", torch.float64) / key.smoothing + key.mean
    begin = cached.max_seqlen - cached.window - cached.num_new + 1
    floats = key.recent[:, :, begin - cached.recent_start :].double()
    rows = torch.cat([rows[:, :, :begin], floats], 2)
    rows[:, :, : key.sinks.shape[2]] = key.sinks.double()
    return rows


@pytest.mark.parametrize(("heads", "query_heads"), [(4, 4), (2, 4), (1, 4)])
@pytest.mark.parametrize("queries", [1, 5])
def test_heads_and_queries(heads: int, query_heads: int, queries: int) -> None:
    cached = make(heads=heads, dim=16, length=40, window=8, fresh=queries, slack=3)
    check(torch.randn(2, query_heads, queries, 16), cached)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("sinks", [0, 4])
def test_windows(window: int, sinks: int) -> None:
    cached = make(dim=16, length=23, window=window, sinks=sinks, fresh=3, slack=0)
    check(torch.randn(2, 2, 3, 16), cached)


def test_softcap_and_sink_logits() -> None:
    cached = make(dim=16, length=30, window=8, fresh=2)
    query = 3 * torch.randn(2, 4, 2, 16)
    check(query, cached, softcap=5.0, softmax_scale=0.5)
    check(query, cached, sink_logits=torch.randn(4))


def test_different_dims_of_keys_and_values() -> None:
    check(torch.randn(2, 4, 1, 32), make(dim=32, value_dim=16, length=30, window=8))


def test_masks_and_left_padding() -> None:
    cached = make(dim=16, length=30, window=8, fresh=3, start=[0, 11])
    query = torch.randn(2, 2, 3, 16)
    causal = torch.ones(3, 30, dtype=torch.bool).tril(27)
    mask = causal.expand(2, 1, 3, 30).clone()
    mask[1, :, :, :11] = False
    check(query, cached, mask=mask)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    check(query, cached, mask=additive)
    check(query, cached, mask=torch.randn(1, 1, 3, 30))  # a position bias
    mask[0] = False  # a query that sees nothing
    assert torch.equal(
        kv_attention(query, cached, mask=mask, softmax_scale=0.2)[0], torch.zeros(2, 3, 16)
    )


def test_longer_mask_is_cut_and_shorter_refused() -> None:
    cached = make(dim=16, length=30, window=8)
    query = torch.randn(2, 2, 1, 16)
    mask = torch.rand(2, 1, 1, 40) > 0.3
    cut = kv_attention(query, cached, mask=mask[..., :30], softmax_scale=1.0)
    assert torch.equal(kv_attention(query, cached, mask=mask, softmax_scale=1.0), cut)
    with pytest.raises(VQCacheError, match="mask covers 29"):
        kv_attention(query, cached, mask=mask[..., :29], softmax_scale=1.0)
    with pytest.raises(VQCacheError, match="heads"):
        kv_attention(query[:, :1], cached, softmax_scale=1.0)


def test_dense_is_what_the_first_query_sees() -> None:
    cached = make(dim=16, length=30, window=8, fresh=1)
    query = torch.randn(2, 2, 1, 16)
    scores = query @ decoded(cached, "key").mT / 4
    plain = scores.softmax(-1) @ decoded(cached, "value")
    exact = written_out(query, cached, torch.float64, softmax_scale=0.25)
    assert (plain.double() - exact).abs().max() < 1e-5


def test_opcheck() -> None:
    cached = make(dim=16, length=30, window=8, fresh=2, start=[0, 3])
    cached = cached.replace(
        key_scale=cached.key.scale.nan_to_num(), value_scale=cached.value.scale.nan_to_num()
    )
    mask = torch.rand(2, 1, 2, 30) > 0.3
    for extra in ([mask, torch.randn(4)], [None, None]):
        arguments = (torch.randn(2, 4, 2, 16), *flatten(cached), *extra, 0.25, 0.0)
        torch.library.opcheck(torch.ops.hf_vq.kv_attention, arguments)
