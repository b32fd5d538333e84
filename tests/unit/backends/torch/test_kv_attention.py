"""`torch.attention` against attention written out in float64, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.torch import kv_attention as torch_attention
from hf_vq.backends.torch import masks, partial_softmax
from hf_vq.ops import KVCacheView, kv_attention
from tests.fixtures.kv.attention_float64 import make, written_out


@pytest.fixture(
    params=[(1 << 30, 1 << 30), (1, 1)], ids=["at once", "piece by piece"], autouse=True
)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only this row runs; everything at once, or as little at a time as it can."""
    decoded, scores = request.param
    monkeypatch.setattr(torch_attention, "DECODED_BYTES", decoded)
    monkeypatch.setattr(partial_softmax, "SCORES", scores)
    monkeypatch.setattr(masks, "_COMPARED", scores)
    monkeypatch.setattr(torch_attention, "WHOLE_TOKENS", 7)
    monkeypatch.setattr(torch_attention, "_FEWEST_TOKENS", 7)
    with dispatch.using(
        entry
        for entry in dispatch.ENTRIES
        if entry.op != "kv_attention" or entry.name == "torch.attention"
    ):
        yield


def check(query: Tensor, cached: KVCacheView, **options: object) -> None:
    """Within what float32 rounds: of logits and their sums, of the rotation, of the output."""
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
    allowed += 2 * torch.finfo(query.dtype).eps * options["softmax_scale"] * math.prod(largest)
    assert (out.double() - exact).abs().max() <= allowed


SCHEMES = ["u4", "u3", "u2", "k4v2", "nomad-u4", "nomad-4", "nomad-2", "nomad-1", "cq-4", "cq-2"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_schemes_and_dtypes(scheme: str, dtype: torch.dtype) -> None:
    cached = make(scheme, dtype, length=53, window=8, fresh=11)
    check(torch.randn(2, 4, 11, 64).to(dtype), cached)


@pytest.mark.parametrize("dim", [16, 80, 96, 192])
def test_head_dims(dim: int) -> None:
    cached = make(dim=dim, value_dim=64, length=45, window=8, fresh=5)
    check(torch.randn(2, 4, 5, dim), cached)


@pytest.mark.parametrize("window", [0, 1, 3, 9, 100])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("queries", "fresh"), [(1, 1), (3, 3), (3, 20), (20, 20)])
def test_windows(window: int, sinks: int, queries: int, fresh: int) -> None:
    cached = make(batch=1, dim=16, length=43, window=window, sinks=sinks, fresh=fresh, slack=2)
    check(torch.randn(1, 2, queries, 16), cached)


@pytest.mark.parametrize("length", [10, 12, 14, 16, 19, 24])
def test_sinks_in_the_band(length: int) -> None:
    cached = make(dim=16, length=length, window=8, fresh=6, slack=40)
    check(torch.randn(2, 2, 6, 16), cached)
    cached = make(dim=16, length=length, window=8, fresh=6, slack=40, start=[0, 3])
    check(torch.randn(2, 2, 6, 16), cached, mask=causal(6, length, [0, 3]))


def test_more_queries_than_tokens_of_the_update() -> None:
    check(torch.randn(2, 2, 9, 16), make(dim=16, length=43, window=4, fresh=2))


def test_tail_shorter_than_the_window() -> None:
    cached = make(dim=16, length=60, window=20, fresh=4)
    cut = 60 - 4 - 9 - cached.recent_start  # after a deep crop
    cached = cached.replace(
        key_recent=cached.key.recent[:, :, cut:], value_recent=cached.value.recent[:, :, cut:],
        num_coded=51,
    )  # fmt: skip
    longer = make(dim=16, length=71, window=20, fresh=4)
    cached = cached.replace(
        key_codes=longer.key.codes, key_scale=longer.key.scale, value_codes=longer.value.codes,
        value_scale=longer.value.scale, key_first=longer.key.first, value_first=longer.value.first,
    )  # fmt: skip
    check(torch.randn(2, 2, 4, 16), cached)


@pytest.mark.parametrize("scheme", ["u4", "u3", "u2", "k4v2", "nomad-u4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [None, [3, 0], [0, 11]])
def test_smoothed_keys(scheme: str, dtype: torch.dtype, start: list[int] | None) -> None:
    cached = make(scheme, dtype, length=53, window=8, fresh=11, start=start, smoothed=True)
    assert cached.key.smoothing is not None
    mask = None if start is None else causal(11, 53, start)
    for groups in (1, 4):
        query = torch.randn(2, 2 * groups, 11, 64).to(dtype)
        check(query, cached, mask=mask)
        check(query, cached, mask=mask, sink_logits=torch.randn(2 * groups), softcap=4.0)
    check(query, cached.replace(key_mean=None), mask=mask)
    check(query[:, :, :1], cached, mask=None if mask is None else mask[:, :, -1:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [None, [0, 11]])
def test_smoothed_keys_that_turn(interleaved: bool, start: list[int] | None) -> None:
    """As those that are decoded, turned and read as floats."""
    cached = make(dim=16, length=50, window=8, fresh=12, smoothed=True, start=start)
    turning = torch.randn(2, 2, 1, 16)
    turning[..., 8:] = 0
    cached = cached._replace(
        key_rotary_mean=turning, rotary_inv_freq=torch.tensor([1.0, 0.3, 0.1, 0.03]),
        rotary_interleaved=interleaved, rotary_start=7,
    )  # fmt: skip
    query = torch.randn(2, 4, 12, 16)
    mask = None if start is None else causal(12, 50, start)
    out = kv_attention(query, cached, mask=mask, softmax_scale=0.25)
    with dispatch.using(entry for entry in dispatch.ENTRIES if entry.name == "reference"):
        wanted = kv_attention(query, cached, mask=mask, softmax_scale=0.25)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_factors_of_one_change_nothing() -> None:
    cached = make(dim=16, length=50, window=8, fresh=12)
    query = torch.randn(2, 4, 12, 16)
    ones = cached.replace(key_smoothing=torch.ones(2, 2, 1, 16))
    assert torch.equal(*(kv_attention(query, each, softmax_scale=0.25) for each in (cached, ones)))


def test_softcap_and_sink_logits() -> None:
    cached = make(dim=16, length=50, window=8, fresh=12)
    query = 3 * torch.randn(2, 4, 12, 16)
    check(query, cached, softcap=5.0, softmax_scale=0.5)
    check(query, cached, sink_logits=torch.randn(4))
    check(query, cached, sink_logits=torch.randn(4), softcap=2.0, mask=causal(12, 50, [3]))


def causal(queries: int, length: int, start: list[int]) -> Tensor:
    j = torch.arange(length)
    i = torch.arange(length - queries, length)[:, None]
    return (j <= i) & (j >= torch.tensor(start)[:, None, None, None])


@pytest.mark.parametrize("start", [None, [0, 0], [0, 11], [11, 11], [40, 13], [44, 0], [2, 46]])
@pytest.mark.parametrize("told", [True, False])
def test_left_padding(start: list[int] | None, told: bool) -> None:
    length, queries = 50, 12
    begin = start if told else None
    cached = make(dim=16, length=length, window=8, fresh=queries, start=begin and list(begin))
    query = torch.randn(2, 4, queries, 16)
    mask = causal(queries, length, start or [0, 0])
    check(query, cached, mask=mask)
    check(query, cached, mask=torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))
    check(query, cached, sink_logits=torch.randn(4), mask=mask)
    check(query, cached)


def test_other_masks() -> None:
    cached = make(dim=16, length=50, window=8, fresh=12, start=[0, 11])
    query = torch.randn(2, 2, 12, 16)
    mask = torch.rand(2, 1, 12, 50) > 0.5
    check(query, cached, mask=mask)
    of_heads = torch.rand(1, 2, 12, 50) > 0.5
    out = kv_attention(query, cached, mask=of_heads, softmax_scale=0.25)
    for head in range(2):
        same = kv_attention(query, cached, mask=of_heads[:, head : head + 1], softmax_scale=0.25)
        assert torch.allclose(out[:, head], same[:, head], atol=1e-6)
    of_all = torch.rand(2, 1, 1, 50) > 0.5
    out = kv_attention(query, cached, mask=of_all, softmax_scale=0.25)
    same = kv_attention(query, cached, mask=of_all.expand(2, 1, 12, 50), softmax_scale=0.25)
    assert torch.equal(out, same)
    check(query, cached, mask=torch.randn(1, 1, 12, 50))
    longer = torch.cat([mask, torch.rand(2, 1, 12, 9) > 0.5], -1)
    out = kv_attention(query, cached, mask=mask, softmax_scale=0.2)
    assert torch.equal(kv_attention(query, cached, mask=longer, softmax_scale=0.2), out)
    mask[0] = False
    assert torch.equal(
        kv_attention(query, cached, mask=mask, softmax_scale=0.2)[0], torch.zeros(2, 12, 16)
    )


def test_a_mask_is_looked_at_again_once_it_changed() -> None:
    cached = make(dim=16, length=50, window=8, fresh=12)
    query, mask = torch.randn(2, 2, 12, 16), causal(12, 50, [0])
    check(query, cached, mask=mask)
    mask[..., :9] = False
    check(query, cached, mask=mask)
    mask[..., 20] = False
    check(query, cached, mask=mask)
    with torch.inference_mode():
        check(query, cached, mask=mask.clone())


def test_scratch_is_bounded(sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "DECODED_BYTES", 2 * 2 * 2 * 16 * 4 * 14)
    seen = []
    decode = partial_softmax.Maths.decode
    monkeypatch.setattr(
        partial_softmax.Maths,
        "decode",
        lambda *given: (seen.append(given[3] - given[2]), decode(*given))[1],
    )
    check(torch.randn(2, 2, 12, 16), make(dim=16, length=99, window=8, fresh=12))
    # Codes in front of the first query's window, without the sinks, and 7 of its band.
    assert max(seen) == 14 and sum(seen) == 2 * (99 - 12 - 8 + 1 - 4 + 7)
