"""`hf_vq::kv_attention` against attention written out in float64, one query at a time."""

from __future__ import annotations

import math
from itertools import product

import numpy
import pytest
import torch
from torch import Tensor

from hf_vq.cache.lazy_kv import decoded
from hf_vq.cache.token_buffer import CodeBuffer
from hf_vq.errors import VQCacheError
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, encode_kv, kv_attention
from hf_vq.ops.kv import flatten
from hf_vq.ops.layout import layouts_for, to_rows, write_rows

from ..kv_views import view_of


def make(
    scheme: str = "u4",
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    length: int = 61,
    sinks: int = 4,
    window: int = 16,
    fresh: int = 1,
    slack: int = 5,
    start: list[int] | None = None,
) -> KVCacheView:
    """A cache of random tokens with codes for all that left the window, floats for the rest."""
    both = KV_SCHEMES[scheme]
    value_dim = value_dim or dim
    mean = 2 * both.centre_keys * torch.randn(batch, heads, 1, dim)
    keys = (torch.randn(batch, heads, length, dim) + mean).to(dtype)
    values = torch.randn(batch, heads, length, value_dim).to(dtype)
    codebooks = [codebook_of(both.key, heads, dim), codebook_of(both.value, heads, value_dim)]
    coded = max(length - window, 0)
    k = encode_kv(keys[:, :, :coded].float() - mean, codebooks[0], both.key)
    v = encode_kv(values[:, :, :coded].float(), codebooks[1], both.value)
    tail = max(length - window - slack - fresh, 0)
    first = [0] * batch if start is None else start
    pick = [slice(position, position + sinks) for position in first]
    layouts = layouts_for(both.key, both.value, dim, value_dim, keys)
    k_codes, k_scale, k_first = on_tape(*k, both.key, dim, layouts[0])
    v_codes, v_scale, v_first = on_tape(*v, both.value, value_dim, layouts[1])
    return view_of(
        key_sinks=torch.stack([keys[b, :, pick[b]] for b in range(batch)]),
        value_sinks=torch.stack([values[b, :, pick[b]] for b in range(batch)]),
        key_codes=k_codes, key_scale=k_scale, key_mean=mean if both.centre_keys else None,
        value_codes=v_codes, value_scale=v_scale,
        key_recent=keys[:, :, tail:], value_recent=values[:, :, tail:],
        key_codebook=codebooks[0], value_codebook=codebooks[1],
        cache_leftpad=None if start is None else torch.tensor(start), max_seqlen=length,
        window=window, num_new=fresh, num_coded=coded, key_first=k_first, value_first=v_first,
        key_scheme=both.key.spec(), value_scheme=both.value.spec(),
        key_layout=layouts[0], value_layout=layouts[1],
    )  # fmt: skip


def codebook_of(scheme: VQScheme, heads: int, dim: int) -> Tensor:
    if scheme.has_scale:
        return universal_tensor(scheme)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape).half()


def on_tape(
    rows: Tensor, scale: Tensor, scheme: VQScheme, dim: int, layout: str
) -> tuple[Tensor, Tensor, int]:
    """Codes and scales somewhere on a tape, and where; around them is what must not be read."""
    first, count = 250 if layout != "rows" else 3, rows.shape[2]
    tape = CodeBuffer(rows.new_empty(*rows.shape[:3], dim), scheme, layout)
    tape.reserve(first + count + 1)
    tape.data.random_(256)
    tape.scale.fill_(torch.nan)
    write_rows(tape.data, first, rows, scheme.entry_bits, layout)
    tape.scale[:, :, first : first + count] = scale
    return tape.data, tape.scale, first


def decode(cached: KVCacheView, side: str, dtype: torch.dtype) -> Tensor:
    """Rows in `dtype`: bits, table, scale, Hadamard; nothing shared with the package but the order
    of blocks, which tests/ops/test_layout.py writes out."""
    part = cached.key if side == "k" else cached.value
    codes, scale, codebook, _, _, _, first, spec, layout = part
    dim, scheme = part.recent.shape[-1], VQScheme.parse(spec)
    codes = to_rows(codes, first, cached.num_coded, scheme.entry_bits, layout)
    scale = scale[:, :, first : first + cached.num_coded]
    bits = numpy.unpackbits(codes.numpy(), axis=-1, bitorder="little")
    bits = bits[..., : dim // scheme.vector_size * scheme.entry_bits]
    shape = (*bits.shape[:-1], dim // scheme.vector_size, scheme.entry_bits)
    bits = bits.reshape(shape).astype(numpy.int64)
    index = (bits << numpy.arange(scheme.entry_bits)).sum(-1)
    if scheme.codebook == "integers":
        step, zero = scale.to(dtype).split(1, -1)
        return (torch.from_numpy(index).to(dtype) - zero) * step
    if scheme.codebook != "universal":
        head = torch.arange(codebook.shape[0])[:, None, None]
        chosen = codebook[head, torch.arange(codebook.shape[1]), torch.from_numpy(index)]
        return chosen.to(dtype).flatten(-2)
    rows = codebook[0].to(dtype)[torch.from_numpy(index)].flatten(-2) * scale.to(dtype)
    block = dim & -dim
    hadamard = torch.ones(1, 1, dtype=dtype)
    while len(hadamard) < block:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype), hadamard)
    return (rows.unflatten(-1, (-1, block)) @ hadamard / math.sqrt(block)).flatten(-2)


def written_out(
    query: Tensor,
    cached: KVCacheView,
    dtype: torch.dtype,
    *,
    softmax_scale: float,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention in `dtype`, by loops over rows, heads and queries."""
    batch, query_heads, queries, _ = query.shape
    groups = query_heads // cached.key.recent.shape[1]
    length, tail = cached.max_seqlen, cached.recent_start
    sinks = cached.key.sinks.shape[2]
    k, v = decode(cached, "k", dtype), decode(cached, "v", dtype)
    k = k if cached.key.mean is None else k + cached.key.mean.to(dtype)
    out = torch.zeros(batch, query_heads, queries, v.shape[-1], dtype=dtype)
    j = torch.arange(length)
    for b, h, t in product(range(batch), range(query_heads), range(queries)):
        i = length - queries + t
        start = 0 if cached.cache_leftpad is None else int(cached.cache_leftpad[b])
        rows = []
        for codes, floats, sink in (
            (k, cached.key.recent, cached.key.sinks), (v, cached.value.recent, cached.value.sinks)
        ):  # fmt: skip
            first = min(i - cached.window + 1, length - cached.num_new)
            near = range(max(first, tail), length)
            row = floats[b, h // groups].new_zeros(length, floats.shape[-1]).to(dtype)
            row[: codes.shape[2]] = codes[b, h // groups]
            row[near.start :] = floats[b, h // groups, near.start - tail :].to(dtype)
            row[start : start + sinks] = sink[b, h // groups].to(dtype)
            rows.append(row)
        scores = (rows[0] @ query[b, h, t].to(dtype)) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is None:
            scores[j > i] = -math.inf
        elif mask.dtype == torch.bool:
            scores[~mask[min(b, len(mask) - 1), 0, t]] = -math.inf
        else:
            scores = scores + mask[min(b, len(mask) - 1), 0, t].to(dtype)
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits[h : h + 1].to(dtype)])
        out[b, h, t] = scores.softmax(0)[:length].nan_to_num(0.0) @ rows[1]
    return out


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
