"""Smoothed keys on the CPU: what is appended, what attention divides by, and who runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cpu import kv as cpu_kv
from hf_vq.backends.cpu import kv_static, library
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.packing import unpack_bits
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops import KVCacheView, kv_append, kv_attention
from hf_vq.ops.kv_ops import _attention_problem, _refuse, bound_to
from hf_vq.ops.layout import BLOCK, block_bytes, to_rows
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.ops.rotary_mean import rotated
from hf_vq.transforms import rotate
from tests.fixtures.kv import cpu_attention_float64 as rounding
from tests.fixtures.kv.attention_float64 import factors
from tests.fixtures.kv.views import view_of

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

SCHEMES = ["u4", "u3", "u2", "k4v2", "nomad-u4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WEIGHT_BITS = {"zen4": 8, "avx512": 8}
SINKS, WINDOW = 4, 16


@pytest.fixture(params=library.isas() or [""], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def behind(x: Tensor, room: int = 1000) -> Tensor:
    """A copy, with NaN in the memory around it."""
    memory = torch.full((x.numel() + 2 * room,), torch.nan)
    held = memory[room : room + x.numel()].view(x.shape)
    return held.copy_(x)


def layer(
    scheme: str = "u4",
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 64,
    length: int = 300,
    turning: float = 0.0,
    start: list[int] | None = None,
    centred: bool = True,
    **options: Any,
) -> tuple[KVCacheView, Tensor]:
    """A layer of random keys with codes, made by the kernel, and its keys."""
    both, coded = KV_SCHEMES[scheme], length - WINDOW
    mean = 2 * torch.randn(batch, heads, 1, dim) if centred else torch.zeros(batch, heads, 1, dim)
    smoothing = behind(factors(batch, heads, dim))
    keys = mean + torch.randn(batch, heads, length, dim) / smoothing
    found: dict[str, Any] = {}
    if turning:
        pairs = dim // 4
        rotary_mean = turning * torch.randn(batch, heads, 1, dim)
        rotary_mean[..., 2 * pairs :] = 0
        inv_freq = (1e6 ** -(torch.arange(pairs).double() / pairs)).float()
        keys = keys + rotated(rotary_mean, inv_freq, True, 777 + torch.arange(length))
        found = {
            "key_rotary_mean": rotary_mean, "rotary_inv_freq": inv_freq,
            "rotary_interleaved": True, "rotary_start": 777,
        }  # fmt: skip
    keys, values = keys.to(dtype), torch.randn(batch, heads, length, dim).to(dtype)
    layouts = cpu_kv.key_layout(both.key), "planes"
    first = [0] * batch if start is None else start
    for name, part, x, layout in zip(
        ("key", "value"), (both.key, both.value), (keys, values), layouts, strict=True
    ):
        size = block_bytes(dim // part.vector_size, part.entry_bits)
        shape = batch, heads, -(-length // BLOCK), size
        sinks = [x[b, :, at : at + SINKS] for b, at in enumerate(first)]
        found |= {
            f"{name}_codes": torch.randint(0, 256, shape, dtype=torch.uint8),
            f"{name}_scale": torch.full((batch, heads, length, 1), torch.nan).half(),
            f"{name}_codebook": universal_tensor(part), f"{name}_scheme": part.spec(),
            f"{name}_layout": layout, f"{name}_sinks": torch.stack(sinks),
            f"{name}_recent": x[:, :, coded:],
        }  # fmt: skip
    found |= {
        "key_mean": mean if centred else None, "key_smoothing": smoothing, "max_seqlen": length,
        "window": WINDOW, "num_new": 1, "num_coded": coded,
        "cache_leftpad": None if start is None else torch.tensor(start),
    } | options  # fmt: skip
    view = view_of(**found)
    kv_append(keys[:, :, :coded], values[:, :, :coded], view)
    return view, keys


def stored(view: KVCacheView, count: int) -> tuple[Tensor, Tensor]:
    """Codes of rows, and scales, of the first keys."""
    key = view.key
    rows = to_rows(key.codes, 0, count, key.parsed.entry_bits, key.layout)
    return rows.clone(), key.scale[:, :, :count].clone()


def check(
    query: Tensor, view: KVCacheView, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Both ways to call the kernel give what its roundings give."""
    problem = _attention_problem(query, view)
    assert dispatch.select(problem).name == "cpu.vq_attention"
    scale = query.shape[-1] ** -0.5
    bits = WEIGHT_BITS.get(library.isa() or "", 7)
    wanted, slack = rounding.attend(query, view, bits, softmax_scale=scale, **options)
    slack = slack + torch.finfo(query.dtype).eps * wanted.abs() + 1e-12
    if query.dtype == torch.float16:
        slack = slack + 2.0**-24
    mask = options.get("mask")
    for boxed in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", _poisoned)
            if boxed:
                out = kv_attention(query, view, softmax_scale=scale, **options)
            else:
                out = cpu_kv._attention(query, view, mask, None, scale, 0.0)
        assert out.dtype == query.dtype
        worst = ((out.double() - wanted).abs() / slack).max()
        assert worst <= 1, f"{worst} times what float32 explains"


def _poisoned(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype)


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_those_of_the_reference(scheme: str, dim: int) -> None:
    """Nearest to s (k - mean) but for what float32 rounds, so most of them equal; few at once, many
    at once and one by one have the same bits."""
    part = KV_SCHEMES[scheme].key
    if dim % (4 * part.vector_size):
        pytest.skip("no layout of this many numbers")
    for centred in (True, False):
        view, keys = layer(scheme, dim=dim, length=60, batch=2, centred=centred)
        count, key = 44, view.key
        codes, scale = stored(view, count)
        rows = keys[:, :, :count] - (0 if key.mean is None else key.mean)
        wanted, wanted_scale = reference.encode(rows * key.smoothing, key.codebook, None, part)
        same = codes == wanted
        assert same.float().mean() > 0.995
        _nearest(rows * key.smoothing, codes, scale, part)
        whole = same.all(-1)
        torch.testing.assert_close(
            scale[whole].float(), wanted_scale[whole].float(), rtol=2.0**-10, atol=0
        )
        for sizes in ([1] * count, [3] * 14 + [2]):
            key.codes.zero_()
            end = 0
            for size in sizes:
                end += size
                now = view._replace(num_coded=end)
                kv_append(keys[:, :, end - size : end], keys[:, :, :0], now)
            assert torch.equal(stored(view, count)[0], codes)
            assert torch.equal(stored(view, count)[1], scale)


def _nearest(rows: Tensor, codes: Tensor, scale: Tensor, scheme: VQScheme) -> None:
    """As tests/unit/backends/cpu/test_kv_append.py says it."""
    turned, book = rotate(rows.double(), scheme), universal_tensor(scheme)[0].double()
    index = unpack_bits(codes, scheme.entry_bits, rows.shape[3] // scheme.vector_size).long()
    unit = turned.square().mean(-1, keepdim=True).sqrt()
    vectors = (turned / unit).unflatten(-1, (-1, scheme.vector_size))[..., None, :]
    distance = (vectors - book).square().sum(-1)
    chosen = distance.gather(-1, index[..., None])[..., 0]
    size = vectors.norm(dim=-1) + book.norm(dim=-1)
    rotating = 8 * turned.norm(dim=-1)[..., None, None] / unit[..., None] * size
    terms = (2 * scheme.vector_size + 3) * size.square()
    assert (chosen <= distance.amin(-1) + 2.0**-23 * (terms + rotating).amax(-1)).all()
    entries = book[index].flatten(-2)
    exact = turned.square().sum(-1) / (turned * entries).sum(-1)
    error = (scale[..., 0].double() - exact).abs()
    assert (error <= exact * (2.0**-11 + (rows.shape[3] + 1) * 2.0**-24)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_a_rotary_mean_and_of_other_dtypes(dtype: torch.dtype) -> None:
    view, keys = layer(dtype=dtype, turning=20.0, length=60, batch=2)
    assert view.key.mean is not None and view.key_rotary_mean is not None
    turned = rotated(
        view.key_rotary_mean.double(), view.rotary_inv_freq, True, 777 + torch.arange(44)
    )
    rows = (keys[:, :, :44].double() - view.key.mean - turned) * view.key.smoothing
    codes, scale = stored(view, 44)
    wanted, wanted_scale = reference.encode(rows.float(), view.key.codebook, None, view.key.parsed)
    assert (codes != wanted).float().mean() < 0.02
    found, exact = (
        reference.decode_rows(*each, view.key.parsed, 64).double()
        for each in ((codes, view.key.codebook, scale), (wanted, view.key.codebook, wanted_scale))
    )
    # As for the rotary mean alone, times how much s enlarges it.
    most = view.key.smoothing.amax()
    errors = [(each - rows).norm(dim=-1) for each in (found, exact)]
    bound = 2e-5 * 20 * 8 * most + 1e-3 * rows.norm(dim=-1)
    assert (errors[0] <= errors[1] + bound).all()


def test_huge_rows() -> None:
    """Rows whose squares overflow are read again, smaller; the factors are not forgotten."""
    view, _ = layer(length=60, centred=False)
    keys = 3e25 * torch.randn(1, 2, 44, 64)
    kv_append(keys, keys[:, :, :0], view)
    codes, scale = stored(view, 44)
    kv_append(keys / 2.0**90, keys[:, :, :0], view)
    assert torch.equal(codes, stored(view, 44)[0]) and (scale == 65504).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turning", [0.0, 20.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention(
    scheme: str, turning: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, _ = layer(scheme, dtype, turning=turning)
    query = torch.randn(1, 8, 1, 64) / (10 if turning else 1)
    check(query.to(dtype), view, monkeypatch)


@pytest.mark.parametrize("dim", [16, 24, 40, 80, 96, 128, 256])
@pytest.mark.parametrize("centred", [True, False])
def test_attention_of_other_head_dims(
    dim: int, centred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, _ = layer(dim=dim, centred=centred, length=100)
    check(torch.randn(1, 4, 1, dim), view, monkeypatch)


@pytest.mark.parametrize("share", [1, 2, 7])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_queries_and_groups(share: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = layer(batch=2, heads=3, length=90, num_new=queries)
    check(torch.randn(2, 3 * share, queries, 64), view, monkeypatch)


@pytest.mark.parametrize("turning", [0.0, 5.0])
def test_left_padding(turning: float, monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = layer(batch=2, length=90, start=[0, 11], turning=turning)
    mask = (torch.arange(90) >= torch.tensor([0, 11])[:, None])[:, None, None]
    check(torch.randn(2, 4, 1, 64) / 2, view, monkeypatch, mask=mask)


@pytest.mark.parametrize("turning", [0.0, 20.0])
@pytest.mark.parametrize("queries", [1, 3])
def test_ones_change_nothing(turning: float, queries: int) -> None:
    """Codes and results are those of keys that are not smoothed, bit for bit."""
    view, keys = layer(turning=turning, num_new=queries)
    query, made = torch.randn(1, 8, queries, 64), []
    for smoothing in (torch.ones_like(view.key.smoothing), None):
        each = view.replace(key_smoothing=smoothing)
        kv_append(keys[:, :, :284], keys[:, :, :0], each)
        made.append((*stored(view, 284), kv_attention(query, each, softmax_scale=0.1)))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)
    kv_append(keys[:, :, :284], keys[:, :, :0], view)
    assert not torch.equal(made[0][0], stored(view, 284)[0])


def test_strides_of_factors_and_means() -> None:
    """Views of other tensors are read where they are, or copied."""
    view, keys = layer(batch=2)
    query = torch.randn(2, 4, 1, 64)
    wanted = kv_attention(query, view, softmax_scale=0.1), *stored(view, 284)
    wide = [torch.full((2, 3, 2, 70), torch.nan) for _ in range(2)]
    for held, x in zip(wide, (view.key.mean, view.key.smoothing), strict=True):
        held[:, :2, 1:, 3:67] = x
    mean, smoothing = (held[:, :2, 1:, 3:67] for held in wide)
    for given in (
        {"key_mean": mean},
        {"key_smoothing": smoothing},
        {"key_mean": mean, "key_smoothing": smoothing},
        {"key_smoothing": view.key.smoothing.mT.contiguous().mT},
    ):
        other = view.replace(**given)
        other.key.codes.zero_()
        kv_append(keys[:, :, :284], keys[:, :, :0], other)
        found = kv_attention(query, other, softmax_scale=0.1), *stored(other, 284)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("turning", [0.0, 20.0])
def test_bound_kernels(turning: float) -> None:
    """Kernels that are bound to a layer read its factors anew each time."""
    view, _ = layer(turning=turning)
    key = view.key.recent[:, :, -1:]
    bound = bound_to(None, key, view)
    assert _refuse not in bound[:3]
    query = torch.randn(1, 8, 1, 64) / 10
    for smoothing in (view.key.smoothing, factors(1, 2, 64), None):
        other = view.replace(key_smoothing=smoothing)
        bound = bound_to(bound, key, other)
        out = kv_attention(query, other, softmax_scale=0.1, bound=bound)
        assert torch.equal(out, kv_attention(query, other, softmax_scale=0.1))
        codes = []
        for each in (bound, None):
            view.key.codes.zero_()
            kv_append(key, key, other, None, each)
            codes.append(view.key.codes.clone())
        assert torch.equal(*codes) and codes[0].any()


@pytest.mark.parametrize("turning", [0.0, 20.0])
@pytest.mark.parametrize("start", [[0, 0], [0, 5]])
def test_a_static_layer(turning: float, start: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codes are those of the reference; then it is a growing one."""
    grown, keys = layer(batch=2, turning=turning, length=200)
    values, slots = torch.randn_like(keys), 48

    def static() -> KVCacheView:
        zeros = {
            f"{side}_{part}": torch.zeros(2, 2, count, 64)
            for side in ("key", "value") for part, count in (("sinks", SINKS), ("recent", slots))
        }  # fmt: skip
        return grown.replace(
            key_codes=grown.key.codes.clone(), key_scale=grown.key.scale.clone(),
            value_codes=grown.value.codes.clone(), value_scale=grown.value.scale.clone(),
            num_coded=0, num_new=0, cache_seqlens=torch.zeros((), dtype=torch.long),
            key_mean_known=torch.ones(2, 2, dtype=torch.bool), cache_leftpad=torch.tensor(start),
            **zeros,
        )  # fmt: skip

    ours, wanted, at = static(), static(), 0
    while at < 180:
        step = [x[:, :, at : at + (30 if at < 90 else 15)] for x in (keys, values)]
        at += step[0].shape[2]
        kv_append(*step, ours)
        static_reference.kv_append(*step, wanted)
    coded = at - WINDOW
    assert torch.equal(ours.key.smoothing, wanted.key.smoothing)
    assert (stored(ours, coded)[0] != stored(wanted, coded)[0]).float().mean() < 0.02
    asked: list[KVCacheView] = []
    real = kv_static.kv_attention

    def spy(query: Tensor, view: KVCacheView, **options: Any) -> Tensor:
        asked.append(view)
        return real(query, view, **options)

    monkeypatch.setattr(kv_static, "kv_attention", spy)
    query = torch.randn(2, 8, 1, 64) / 10
    mask = (torch.arange(200) >= torch.tensor(start)[:, None])[:, None, None]
    mask = mask & (torch.arange(200) < at)
    out = kv_attention(query, ours, softmax_scale=0.125, mask=mask)
    (view,) = asked
    assert view.key.smoothing is ours.key.smoothing
    bits = WEIGHT_BITS.get(library.isa() or "", 7)
    exact, slack = rounding.attend(query, view, bits, softmax_scale=0.125, mask=mask)
    assert ((out.double() - exact).abs() <= slack + 2.0**-23 * exact.abs() + 1e-12).all()
    # The reference sees the same, but for 8 bits of queries and entries.
    plain = static_reference.attention(query, ours, mask, None, 0.125, 0.0)
    assert (out - plain).norm() < 0.02 * plain.norm()
