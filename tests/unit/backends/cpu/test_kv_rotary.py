"""Keys with a rotary mean on the CPU: what is appended, what attention adds, and who runs it."""

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
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, kv_append, kv_attention
from hf_vq.ops.kv_ops import _attention_problem, _refuse, bound_to
from hf_vq.ops.layout import BLOCK, block_bytes, to_rows
from hf_vq.ops.library import append_problem
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.ops.rotary_mean import rotated
from tests.fixtures.kv import cpu_attention_float64 as rounding
from tests.fixtures.kv.views import view_of

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

SCHEMES = [n for n in KV_SCHEMES if n not in ("cq-1", "qserve-kv4")]
WEIGHT_BITS = {"zen4": 8, "avx512": 8}
HEADS, SINKS, WINDOW = 2, 4, 16
# head_dim, query heads of a key/value head, pairs, interleaved, n of position 0, size of m
SHAPES = [
    (64, 4, 32, False, 0, 200.0),
    (64, 1, 32, True, 100_000, 20.0),
    (96, 7, 24, False, 99_990, 200.0),
    (128, 4, 64, True, 12_345, 50.0),
    (256, 1, 32, False, 50_000, 200.0),
    (128, 7, 5, False, 0, 5.0),
]
CASES = [  # all of one scheme; of others a third, so that every shape meets some of them
    (scheme, shape)
    for i, scheme in enumerate(SCHEMES)
    for j, shape in enumerate(SHAPES)
    if scheme == "u4" or (i + j) % 3 == 0
]


@pytest.fixture(params=library.isas() or [""], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def turning_mean(dim: int, pairs: int, size: float, heads: int = HEADS) -> Tensor:
    """m [1, heads, 1, D]: one head has all pairs, the next some, and what has no pair is 0."""
    mean = size * torch.randn(1, heads, 1, dim).clamp(-1.4, 1.4) / 1.4
    mean[..., 2 * pairs :] = 0
    mean[:, 1::2, :, dim // 3 :] = 0
    return mean


def frequencies(dim: int, pairs: int) -> Tensor:
    return (1e6 ** -(torch.arange(pairs).double() / max(pairs, 1))).float()


def keys_like(mean: Tensor, inv_freq: Tensor, interleaved: bool, start: int, n: int) -> Tensor:
    turned = rotated(mean, inv_freq, interleaved, start + torch.arange(n))
    return turned + torch.randn(*turned.shape)


def empty_view(scheme: str, shape: tuple[Any, ...], length: int, **options: Any) -> KVCacheView:
    """A layer of random keys around a rotary mean, whose codes nobody wrote yet."""
    dim, _, pairs, interleaved, start, size = shape
    both = KV_SCHEMES[scheme]
    mean, inv_freq = turning_mean(dim, pairs, size), frequencies(dim, pairs)
    keys = keys_like(mean, inv_freq, interleaved, start, length)
    values = torch.randn(1, HEADS, length, dim)
    found: dict[str, Any] = {}
    layouts = cpu_kv.key_layout(both.key), "planes"
    for name, part, x, layout in zip(
        ("key", "value"), (both.key, both.value), (keys, values), layouts, strict=True
    ):
        size_of_block = block_bytes(dim // part.vector_size, part.entry_bits)
        book = (
            universal_tensor(part)
            if part.codebook == "universal"
            else torch.randn(kv_codebook_spec(part, HEADS, dim).shape).half()
        )
        blocks = -(-length // BLOCK)
        codes = torch.randint(0, 256, (1, HEADS, blocks, size_of_block), dtype=torch.uint8)
        scale = torch.full((1, HEADS, length, int(part.has_scale)), torch.nan).half()
        found |= {
            f"{name}_codes": codes, f"{name}_scale": scale, f"{name}_codebook": book,
            f"{name}_scheme": part.spec(), f"{name}_layout": layout,
            f"{name}_sinks": x[:, :, :SINKS], f"{name}_recent": x[:, :, length - WINDOW :],
        }  # fmt: skip
    found["key_mean"] = torch.randn(1, HEADS, 1, dim) if both.centre_keys else None
    found |= {
        "max_seqlen": length, "window": WINDOW, "num_new": 1, "num_coded": length - WINDOW,
        "key_rotary_mean": mean, "rotary_inv_freq": inv_freq, "rotary_interleaved": interleaved,
        "rotary_start": start, "key_keys": keys, "value_values": values,
    } | options  # fmt: skip
    floats = found.pop("key_keys"), found.pop("value_values")
    view = view_of(**found)
    coded = [x[:, :, : view.num_coded] for x in floats]
    kv_append(coded[0] + (0 if view.key.mean is None else view.key.mean), coded[1], view)
    return view


def check(query: Tensor, view: KVCacheView, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to call the kernel give what its roundings give."""
    scale = query.shape[-1] ** -0.5
    wanted, slack = rounding.attend(
        query, view, WEIGHT_BITS.get(library.isa() or "", 7), softmax_scale=scale
    )
    slack = slack + 2.0**-23 * wanted.abs() + 1e-12
    for boxed in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", _poisoned)
            if boxed:
                out = kv_attention(query, view, softmax_scale=scale)
            else:
                out = cpu_kv._attention(query, view, None, None, scale, 0.0)
        worst = ((out.double() - wanted).abs() / slack).max()
        assert worst <= 1, f"{worst} times what float32 explains"


def _poisoned(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype)


@pytest.mark.parametrize(("scheme", "shape"), CASES, ids=str)
def test_attention(scheme: str, shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    dim, group, *_, size = shape
    view = empty_view(scheme, shape, 300)
    problem = _attention_problem(torch.empty(1, HEADS, 1, dim), view)
    assert problem.rotary and dispatch.select(problem).name == "cpu.vq_attention"
    query = torch.randn(1, HEADS * group, 1, dim) * min(20 / size, 1)
    check(query, view, monkeypatch)


@pytest.mark.parametrize("scheme", ["u4", "nomad-4"])
@pytest.mark.parametrize("length", [20, 90, 272, 273, 529])
def test_lengths_and_places_in_the_buffer(
    scheme: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = empty_view(scheme, SHAPES[0], length)
    check(torch.randn(1, 2 * HEADS, 3, 64) / 10, view._replace(num_new=3), monkeypatch)


@pytest.mark.parametrize(("scheme", "shape"), CASES, ids=str)
def test_codes_are_those_of_what_is_left(scheme: str, shape: tuple[Any, ...]) -> None:
    """In one update and token by token: those of k - mean - R_n m, but for ties."""
    dim, _, _, interleaved, start, size = shape
    view = empty_view(scheme, shape, 40, num_coded=24)
    key = view.key
    keys = keys_like(view.key_rotary_mean, view.rotary_inv_freq, interleaved, start, 24)
    keys = keys + (0 if key.mean is None else key.mean)
    kv_append(keys, keys[:, :, :0], view)
    codes = to_rows(key.codes, 0, 24, key.parsed.entry_bits, key.layout).clone()
    scale = key.scale[:, :, :24].clone()
    turned = rotated(
        view.key_rotary_mean.double(), view.rotary_inv_freq, interleaved, start + torch.arange(24)
    )
    rows = keys.double() - (0 if key.mean is None else key.mean) - turned
    wanted, wanted_scale = reference.encode(rows.float(), key.codebook, None, key.parsed)
    decoded, exact = (
        reference.decode_rows(*part, key.parsed, dim).double()
        for part in ((codes, key.codebook, scale), (wanted, key.codebook, wanted_scale))
    )
    # A row that is 10^-5 |m| away has a code as good: of the distances, not of the codes.
    errors = [(each - rows).norm(dim=-1) for each in (decoded, exact)]
    assert (errors[0] <= errors[1] + 2e-5 * size * dim**0.5 + 1e-3 * rows.norm(dim=-1)).all()
    assert (codes != wanted).float().mean() < 0.02
    for t in range(24):
        kv_append(keys[:, :, t : t + 1], keys[:, :, :0], view._replace(num_coded=t + 1))
    alone = to_rows(key.codes, 0, 24, key.parsed.entry_bits, key.layout)
    if key.parsed.codebook == "universal":
        assert torch.equal(alone, codes)
    # Of entries of a learned codebook that are as near, to float32, any is right.
    found = reference.decode_rows(alone, key.codebook, key.scale[:, :, :24], key.parsed, dim)
    apart = (found - rows).square().sum(-1) - (decoded - rows).square().sum(-1)
    moved = (found - decoded).abs().sum(-1)
    assert (apart.abs() <= 2.0**-20 * rows.square().sum(-1) + 4e-5 * size * moved).all()
    assert torch.equal(key.scale[:, :, :24].nan_to_num(), scale.nan_to_num())


def test_zeros_change_nothing() -> None:
    """A head whose rotary mean is 0 has the codes and the results of one without, bit for bit."""
    view = empty_view("u4", SHAPES[0], 300)
    zeros = torch.zeros_like(view.key_rotary_mean)
    keys, query = torch.randn(1, HEADS, 284, 64), torch.randn(1, 8, 1, 64)
    made = []
    for turning in (zeros, None):
        each = view._replace(key_rotary_mean=turning)
        kv_append(keys, keys, each)
        out = kv_attention(query, each, softmax_scale=0.1)
        made.append((view.key.codes.clone(), view.key.scale[:, :, :284].clone(), out))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


def test_kernels_are_bound_to_what_the_layer_has() -> None:
    view = empty_view("u4", SHAPES[0], 300)
    key = view.key.recent[:, :, -1:]
    plain = bound_to(None, key, view._replace(key_rotary_mean=None))
    bound = bound_to(plain, key, view)
    assert bound is not plain and bound_to(bound, key, view) is bound
    assert _refuse not in bound[:3]
    query = torch.randn(1, 8, 1, 64) / 10
    for other in (view, view._replace(rotary_inv_freq=view.rotary_inv_freq / 2)):
        out = kv_attention(query, other, softmax_scale=0.1, bound=bound)
        assert torch.equal(out, kv_attention(query, other, softmax_scale=0.1))
        codes = []
        for each in (bound, None):
            view.key.codes.zero_()
            kv_append(key, key, other, None, each)
            codes.append(view.key.codes.clone())
        assert torch.equal(*codes) and codes[0].any()
    problem = append_problem(key.device, key.dtype, view.key.scheme, 1, 64, "quads", rotary=True)
    assert dispatch.select(problem).name == "cpu.vq_append"


@pytest.mark.parametrize("scheme", ["u4", "u2", "nomad-u4"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2]], ids=str)
def test_a_static_layer(
    scheme: str, shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its means are measured as the reference measures them; then it is a growing one."""
    dim, group, pairs, interleaved, start, size = shape
    slots, capacity, size = 48, 400, min(size, 50.0)
    inv_freq = frequencies(dim, pairs)
    keys = keys_like(turning_mean(dim, pairs, size), inv_freq, interleaved, start, capacity)
    values = torch.randn(1, HEADS, capacity, dim)
    grown = empty_view(scheme, shape, capacity)

    def static() -> KVCacheView:
        return grown.replace(
            key_codes=grown.key.codes.clone(), key_scale=grown.key.scale.clone(),
            value_codes=grown.value.codes.clone(), value_scale=grown.value.scale.clone(),
            key_sinks=torch.zeros(1, HEADS, SINKS, dim), key_mean=torch.zeros(1, HEADS, 1, dim),
            value_sinks=torch.zeros(1, HEADS, SINKS, dim),
            key_recent=torch.zeros(1, HEADS, slots, dim), num_coded=0,
            value_recent=torch.zeros(1, HEADS, slots, dim), max_seqlen=capacity,
            key_rotary_mean=torch.zeros(1, HEADS, 1, dim),
            cache_seqlens=torch.zeros((), dtype=torch.long),
            key_mean_known=torch.zeros(1, HEADS, dtype=torch.bool), num_new=0,
        )  # fmt: skip

    ours, wanted = static(), static()
    at = 0
    while at + 32 < capacity:
        step = [x[:, :, at : at + (32 if at < 96 else 17)] for x in (keys, values)]
        at += step[0].shape[2]
        kv_append(*step, ours)
        static_reference.kv_append(*step, wanted)
        if at == 49:
            assert ours.key_mean_known.all() and ours.key_rotary_mean.abs().max() > size / 2
    assert int(ours.cache_seqlens) == int(wanted.cache_seqlens) == at
    torch.testing.assert_close(ours.key_rotary_mean, wanted.key_rotary_mean)
    torch.testing.assert_close(ours.key.mean, wanted.key.mean)
    coded = at - WINDOW
    rows = [
        to_rows(v.key.codes, 0, coded, v.key.parsed.entry_bits, v.key.layout)
        for v in (ours, wanted)
    ]
    assert (rows[0] != rows[1]).float().mean() < 0.02
    asked: list[KVCacheView] = []
    real = kv_static.kv_attention

    def spy(query: Tensor, view: KVCacheView, **options: Any) -> Tensor:
        asked.append(view)
        return real(query, view, **options)

    monkeypatch.setattr(kv_static, "kv_attention", spy)
    query = torch.randn(1, HEADS * group, 1, dim) / 10
    out = kv_attention(query, ours, softmax_scale=0.2)
    (view,) = asked
    assert view.key_rotary_mean is ours.key_rotary_mean and view.rotary_start == start
    bits = WEIGHT_BITS.get(library.isa() or "", 7)
    wanted_out, slack = rounding.attend(query, view, bits, softmax_scale=0.2)
    assert ((out.double() - wanted_out).abs() <= slack + 2.0**-23 * wanted_out.abs() + 1e-12).all()
