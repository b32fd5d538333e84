"""`cpu.vq_attention` against its own roundings in float64, and against the reference."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.backends.cpu import kv as cpu_attention
from hf_vq.backends.cpu import library
from hf_vq.formats.catalog import KV_SCHEMES, KVScheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, kv_attention
from hf_vq.ops.layout import BLOCK, block_bytes, to_rows
from hf_vq.ops.library import parse
from hf_vq.ops.reference import kv_attention as attention_reference
from tests.fixtures.kv import cpu_attention_float64 as rounding
from tests.fixtures.kv.views import append_kv, view_of

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

WEIGHT_BITS = {"zen4": 8, "avx512": 8}  # half the bits of a weight; 7 where it is not said


@pytest.fixture(params=library.isas() or [""], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def store(
    x: Tensor, mean: Tensor | None, scheme: VQScheme, codebook: Tensor, layout: str, first: int
) -> tuple[Tensor, Tensor]:
    """`x` on a tape from token `first` on; around it are codes and scales that must not count."""
    batch, heads, count, dim = x.shape
    size = block_bytes(dim // scheme.vector_size, scheme.entry_bits)
    blocks = -(-(first + count) // BLOCK) or 1
    codes = torch.randint(0, 256, (batch, heads, blocks, size), dtype=torch.uint8)
    scales = int(scheme.has_scale)
    scale = torch.full((batch, heads, first + count, scales), torch.nan, dtype=torch.float16)
    append_kv(x, mean, codebook, codes, scale, first, scheme.spec(), layout)
    return codes, scale


def make(
    scheme: str | KVScheme = "nomad-u4",
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    length: int = 300,
    window: int = 20,
    sinks: int = 4,
    slack: int = 5,
    fresh: int = 1,
    first: int = 0,
    start: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> KVCacheView:
    """Random tokens, coded by the library itself: all that left the window of the newest query."""
    both = KV_SCHEMES[scheme] if isinstance(scheme, str) else scheme
    value_dim = value_dim or dim
    mean = 2 * torch.randn(batch, heads, 1, dim) if both.centre_keys else None
    keys = torch.randn(batch, heads, length, dim) + (0 if mean is None else mean)
    keys, values = keys.to(dtype), torch.randn(batch, heads, length, value_dim).to(dtype)
    books = [
        universal_tensor(part)
        if part.codebook == "universal"
        else torch.randn(kv_codebook_spec(part, heads, size).shape).half()
        for part, size in ((both.key, dim), (both.value, value_dim))
    ]
    coded = max(length - window, 0)
    layouts = cpu_attention.key_layout(both.key), "planes"
    k = store(keys[:, :, :coded], mean, both.key, books[0], layouts[0], first)
    v = store(values[:, :, :coded], None, both.value, books[1], layouts[1], first)
    tail = max(length - window - slack - fresh, 0)
    begin = start or [0] * batch
    return view_of(
        key_sinks=torch.stack([keys[b, :, begin[b] :][:, :sinks] for b in range(batch)]),
        value_sinks=torch.stack([values[b, :, begin[b] :][:, :sinks] for b in range(batch)]),
        key_codes=k[0], key_scale=k[1], key_mean=mean, value_codes=v[0], value_scale=v[1],
        key_recent=keys[:, :, tail:], value_recent=values[:, :, tail:],
        key_codebook=books[0], value_codebook=books[1],
        cache_leftpad=None if start is None else torch.tensor(start),
        max_seqlen=length, window=window, num_new=fresh, num_coded=coded,
        key_first=first, value_first=first,
        key_scheme=both.key.spec(), value_scheme=both.value.spec(),
        key_layout=layouts[0], value_layout=layouts[1],
    )  # fmt: skip


def check(query: Tensor, cached: KVCacheView, **options: Any) -> Tensor:
    """The library's output, which is what its roundings give."""
    options = {"softmax_scale": query.shape[-1] ** -0.5, **options}
    bits = WEIGHT_BITS.get(library.isa() or "", 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned)
        out = kv_attention(query, cached, **options)
    wanted, slack = rounding.attend(query, cached, bits, **options)
    slack = slack + torch.finfo(query.dtype).eps * wanted.abs() + 1e-12
    assert out.dtype == query.dtype and out.shape == wanted.shape
    worst = ((out.double() - wanted).abs() / slack).max()
    assert worst <= 1, f"{worst} times what float32 explains"
    return out


def poisoned(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype)


def reference(query: Tensor, cached: KVCacheView, **options: Any) -> Tensor:
    return attention_reference.attention(
        query, cached, options.get("mask"), options.get("sink_logits"),
        options.get("softmax_scale", query.shape[-1] ** -0.5), options.get("softcap", 0.0),
    )  # fmt: skip


@pytest.mark.parametrize("scheme", [n for n in KV_SCHEMES if n not in ("cq-1", "qserve-kv4")])
@pytest.mark.parametrize(("group", "queries"), [(1, 1), (3, 2)])
def test_schemes(scheme: str, group: int, queries: int) -> None:
    cached = make(scheme, length=600, first=250, fresh=queries)
    check(2 * torch.randn(1, 2 * group, queries, 32), cached)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_shape_of_codebook(size: int, bits: int) -> None:
    learned = VQScheme(size, bits, codebook="channel_group", scale_group=0, rotation="none")
    check(torch.randn(1, 4, 1, 32), make(KVScheme(learned, learned, False)))
    turned = VQScheme(
        size, bits, codebook="channel_group", scale_group=0, rotation="hadamard", rotation_block=0
    )
    cached = make(KVScheme(turned, turned, True), length=290)
    out = kv_attention(torch.randn(1, 4, 1, 32), cached, softmax_scale=0.2)
    assert out.isfinite().all()


@pytest.mark.parametrize("scheme", ["nomad-u4", "u2", "nomad-2"])
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(16, 16), (64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256)],
)
def test_head_dims(scheme: str, dim: int, value_dim: int) -> None:
    cached = make(scheme, dim=dim, value_dim=value_dim, heads=1)
    check(torch.randn(1, 2, 1, dim), cached)


@pytest.mark.parametrize("coded", [0, 1, 63, 64, 65, 255, 256, 257, 513])
@pytest.mark.parametrize("first", [0, 255])
def test_lengths(coded: int, first: int) -> None:
    cached = make(length=coded + 2, window=2, sinks=0, slack=0, first=first)
    check(torch.randn(1, 2, 1, 32), cached)
    check(torch.randn(1, 4, 1, 32), cached)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "queries"), [(1, 2), (2, 1), (4, 1), (1, 5), (8, 1), (5, 1), (7, 2), (2, 33)]
)
def test_groups_and_queries(group: int, queries: int) -> None:
    cached = make(length=330, fresh=queries, heads=1)
    check(torch.randn(1, group, queries, 32), cached)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "sinks"), [(0, 0), (0, 80), (1, 4), (7, 1), (100, 4), (999, 80)]
)
def test_windows_and_sinks(window: int, sinks: int) -> None:
    cached = make(length=290, window=window, sinks=sinks, fresh=3, slack=2)
    check(torch.randn(1, 2, 3, 32), cached)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    check(torch.randn(1, 4, 2, 32).to(dtype), make(dtype=dtype, fresh=2))


def test_keys_and_queries_of_two_dtypes() -> None:
    cached = make(dtype=torch.bfloat16)
    cached = cached.replace(
        key_recent=cached.key.recent.float(), key_sinks=cached.key.sinks.float()
    )
    check(torch.randn(1, 2, 1, 32), cached)


@pytest.mark.slow
def test_left_padding_and_masks() -> None:
    cached = make(batch=3, heads=1, length=280, fresh=2, start=[0, 11, 270])
    query = torch.randn(3, 2, 2, 32)
    causal = torch.ones(2, 280, dtype=torch.bool).tril(278)
    mask = causal.expand(3, 1, 2, 280).clone()
    mask[1, :, :, :11], mask[2, :, :, :270] = False, False
    check(query, cached, mask=mask)
    check(query, cached, mask=torch.nn.functional.pad(mask, (0, 9)))  # a static mask is longer
    lowest = torch.finfo(torch.float32).min
    check(query, cached, mask=torch.zeros(mask.shape).masked_fill(~mask, lowest))
    check(query, cached, mask=torch.randn(1, 2, 2, 280))
    check(query, cached, mask=torch.randn(3, 1, 1, 280).bfloat16())
    check(query.half(), cached, mask=torch.zeros(mask.shape).half().masked_fill(~mask, -torch.inf))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    cached = make(length=280, fresh=2)
    mask = torch.ones(1, 1, 2, 280, dtype=torch.bool)
    mask[..., 0, :] = False
    out = check(torch.randn(1, 2, 2, 32), cached, mask=mask, sink_logits=torch.randn(2))
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 32))
    additive = torch.full((1, 1, 2, 280), -torch.inf)
    assert torch.equal(
        kv_attention(torch.randn(1, 2, 2, 32), cached, softmax_scale=1.0, mask=additive),
        torch.zeros(1, 2, 2, 32),
    )


def test_softcap_and_sink_logits() -> None:
    query = 4 * torch.randn(1, 4, 2, 32)
    cached = make(fresh=2)
    check(query, cached, softcap=5.0, softmax_scale=0.5)
    check(query, cached, sink_logits=3 * torch.randn(4))
    check(query, cached, sink_logits=torch.full((4,), 60.0), softcap=20.0)


def test_large_logits() -> None:
    """The maximum moves from block to block, and most weights are 0."""
    cached = make(length=1100, window=4, sinks=0)
    check(40 * torch.randn(1, 4, 1, 32), cached)


def test_scales_of_either_sign() -> None:
    cached = make(length=700)
    for scale in (cached.key.scale, cached.value.scale):
        scale *= torch.randn(scale.shape).sign().half()
    check(torch.randn(1, 2, 1, 32), cached)
    check(torch.randn(1, 6, 1, 32), cached)
    cached.value.scale.copy_(-cached.value.scale.abs())
    check(torch.randn(1, 2, 1, 32), cached)


def test_a_row_of_zeros() -> None:
    cached = make()
    check(torch.zeros(1, 2, 1, 32) + torch.tensor(1e-38), cached)
    for tensor in (cached.key.scale, cached.value.scale):
        tensor.zero_()
    query = torch.randn(1, 2, 1, 32)
    query[0, 0] = 0
    out = kv_attention(query, cached, softmax_scale=0.2)
    assert out.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", ["nomad-u4", "nomad-4"])
def test_numbers_that_are_not_finite(bad: float, scheme: str) -> None:
    cached = make(scheme, length=290, window=4, sinks=0)
    query = torch.randn(1, 4, 1, 32)
    query[0, 1, 0, 5] = bad
    out = kv_attention(query, cached, softmax_scale=0.2)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2, 3]].isfinite().all()
    query[0, 1, 0, 5] = 0
    cached.value.scale[0, 1, 7] = bad
    out = kv_attention(query, cached, softmax_scale=0.2)
    assert out[0, :2].isfinite().all() and out[0, 2:].isnan().all()
    mask = torch.ones(1, 1, 1, 290, dtype=torch.bool)
    mask[..., 7] = False
    assert kv_attention(query, cached, softmax_scale=0.2, mask=mask).isfinite().all()
    if cached.key.scale.numel():
        cached.key.scale[0, 0, 9] = bad
        out = kv_attention(query, cached, softmax_scale=0.2, mask=mask)
        assert out[0, :2].isnan().all()
        assert out[0, 2:].isfinite().all()


@pytest.mark.parametrize("scheme", ["nomad-u4", "u4", "cq-2"])
def test_threads_share_the_tokens(scheme: str) -> None:
    cached = make(scheme, heads=1, length=5000, window=3, first=100)
    query, threads = torch.randn(1, 2, 1, 32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = check(query, cached)
        torch.set_num_threads(5)
        assert (check(query, cached) - alone).abs().max() < 1e-4
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_million_tokens() -> None:
    """Appended in chunks that end within blocks; each token has the codes that it has alone."""
    length, dim, chunk = 1 << 20, 16, 99_991
    both = KV_SCHEMES["nomad-u4"]
    cached = make(both, heads=1, dim=dim, length=2, window=2, sinks=0, slack=0)
    tapes = {}
    for which, scheme in (("key", both.key), ("value", both.value)):
        side = getattr(cached, which)
        layout, mean, codebook = side.layout, side.mean, universal_tensor(scheme)
        x = torch.randn(1, 1, length, dim)
        size = block_bytes(dim // scheme.vector_size, scheme.entry_bits)
        codes = torch.empty(1, 1, length // BLOCK, size, dtype=torch.uint8)
        scale = torch.empty(1, 1, length, 1, dtype=torch.float16)
        for at in range(0, length, chunk):
            part = x[:, :, at : at + chunk]
            append_kv(part, mean, codebook, codes, scale, at, scheme.spec(), layout)
        for t in (0, chunk - 1, chunk, length - 1, *torch.randint(length, (50,)).tolist()):
            alone = store(x[:, :, t : t + 1], mean, scheme, codebook, layout, t % BLOCK)
            found = to_rows(codes, t, 1, scheme.entry_bits, layout)
            assert torch.equal(found, to_rows(alone[0], t % BLOCK, 1, scheme.entry_bits, layout))
            assert torch.equal(scale[:, :, t], alone[1][:, :, -1])
        tapes |= {f"{which}_codes": codes, f"{which}_scale": scale}
    del x, part
    cached = cached.replace(**tapes, num_coded=length, max_seqlen=length)
    check(3 * torch.randn(1, 1, 1, dim), cached)


def test_the_largest_sums_of_tables() -> None:
    """256 sub-quantizers whose codes all have the highest of 255 steps: 65280 in 16 bits."""
    dim = 256
    cached = make("nomad-4", dim=dim, heads=1, window=2, sinks=0)
    levels = torch.linspace(-1, 1, 16).half()[:, None]
    cached = cached.replace(key_codebook=levels.expand(1, dim, 16, 1).contiguous())
    for code in (255, 0):
        cached.key.codes.fill_(code)
        for sign in (1.0, -1.0):
            check(sign * torch.ones(1, 2, 1, dim), cached)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["u4", "nomad-u4", "u2", "nomad-4"])
def test_the_kernel_adds_little_to_the_error_of_the_codes(scheme: str) -> None:
    """In units of what the codes themselves are wrong by: 8 bits of a query or of an entry have a
    rounding error of (max / 127) / sqrt(12), less than a tenth of that of 4-bit codes."""
    cached = make(scheme, dim=128, length=1030, window=0, sinks=0, slack=1030)
    query = torch.randn(1, 8, 1, 128)
    out = kv_attention(query, cached, softmax_scale=128**-0.5)
    coded = reference(query, cached)
    exact = reference(query, cached._replace(window=2000))
    ours, codes = (out - coded).square().mean().sqrt(), (coded - exact).square().mean().sqrt()
    assert ours < codes / 5


def test_functions() -> None:
    """e^x and tanh, by attention over two tokens: their weights are e^0 and e^-x."""
    x = torch.cat([torch.linspace(0, 80, 500), torch.logspace(-6, 1, 500)])
    heads = len(x)
    cached = make(heads=heads, dim=16, length=2, window=2, sinks=0)
    cached.key.recent.zero_()
    cached.key.recent[0, :, 1, 0] = -x
    cached.value.recent.zero_()
    cached.value.recent[0, :, 0, 0] = cached.value.recent[0, :, 1, 1] = 1
    query = torch.zeros(1, heads, 1, 16)
    query[..., 0] = 1
    for softcap in (0.0, 20.0):
        out = kv_attention(query, cached, softmax_scale=1.0, softcap=softcap).double()[0, :, 0]
        wanted = -x.double()
        wanted = softcap * torch.tanh(wanted / softcap) if softcap else wanted
        error = (out[:, 1] / out[:, 0]).log() - wanted
        assert error.abs().max() <= rounding.FUNCTIONS * (1 + 2 * softcap)


def test_scores() -> None:
    for scheme in ("u4", "nomad-u4", "nomad-4"):
        cached = make(scheme, length=600, first=250)
        query = torch.randn(1, 4, 2, 32)
        found = cpu_attention.scores(query, cached, 0.5)
        assert found.shape == (1, 4, 2, cached.num_coded)
        scheme_of_keys = parse(cached.key.scheme)
        codes = rounding.codes_of(cached, "k")
        for h in range(4):
            if scheme_of_keys.has_scale:
                dots = rounding.universal_dots(
                    query[0, h, 1], scheme_of_keys, cached.key.codebook, codes[0, h // 2]
                )
                wanted = dots.value * cached.key.scale[0, h // 2, 250:, 0].double()
                assert cached.key.mean is not None
                wanted = wanted + (query[0, h, 1].double() @ cached.key.mean[0, h // 2, 0].double())
                slack = dots.slack * cached.key.scale[0, h // 2, 250:, 0].double() + 1e-4
            else:
                dots = rounding.table_dots(
                    query[0, h, 1], cached.key.codebook[h // 2], codes[0, h // 2]
                )
                wanted, slack = dots.value, dots.slack + 1e-5
            assert ((found[0, h, 1].double() - wanted / 2).abs() <= slack).all()


def guarded(x: Tensor) -> Tensor:
    """A copy of `x` whose last byte is the last one before memory that may not be read."""
    size = x.numel() * x.element_size()
    pages = -(-max(size, 1) // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    guard = ctypes.c_void_p(start + (pages - 1) * mmap.PAGESIZE)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    if size == 0:
        return x.clone()
    offset = (pages - 1) * mmap.PAGESIZE - size
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape)
    return copy.copy_(x)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages with mprotect")
@pytest.mark.parametrize("scheme", ["nomad-u4", "u4", "u3", "u2", "cq-4", "nomad-1"])
@pytest.mark.parametrize("dim", [80, 128])
def test_nothing_outside_the_tensors_is_read(scheme: str, dim: int) -> None:
    cached = make(scheme, dim=dim, length=300, window=9, fresh=2)
    for codes in (cached.key.codes, cached.value.codes):
        codes.random_(0, 256)  # any codes whatever
    cached = cached.map(guarded)
    for heads, mask in ((2, torch.rand(1, 1, 2, 300) > 0.5), (6, torch.randn(1, 6, 2, 300))):
        query = guarded(torch.randn(1, heads, 2, dim))
        out = kv_attention(
            query,
            cached,
            softmax_scale=0.1,
            mask=guarded(mask),
            sink_logits=guarded(torch.ones(heads)),
        )
        assert out.isfinite().all()
    x = guarded(torch.randn(1, 2, 3, dim))
    append_kv(
        x, cached.key.mean, cached.key.codebook, cached.key.codes, cached.key.scale, 280,
        cached.key.scheme, cached.key.layout,
    )  # fmt: skip


def test_who_attends_and_why_not() -> None:
    def ask(scheme: str, layout: str = "", dim: int = 128, value_dim: int = 128) -> str:
        both = KV_SCHEMES[scheme]
        layouts = layout.split() or ("", "")
        problem = dispatch.KVAttentionProblem(
            "cpu", "float32", both.key.spec(), both.value.spec(), 1, 1, dim, value_dim, *layouts
        )
        found = cpu_attention.ATTENTION
        return found.supports(problem) or " ".join(found.layouts(problem))

    assert ask("u4") == "quads planes"
    assert ask("nomad-4") == ask("cq-2") == "planes planes"
    assert ask("u4", "quads planes") == "quads planes"
    assert "'rows'" in ask("u4", "rows rows")
    assert "head_dim 512" in ask("u4", dim=512)
    assert "head_dim 264" in ask("nomad-4", dim=264)  # more tables than sums of 16 bits hold
    assert "head_dim 36" in ask("u2", dim=36)
    assert "head_dim 258" in ask("u4", value_dim=258)


def test_a_strange_softmax_is_no_surprise() -> None:
    """One visible token: its value, whatever the logits are."""
    cached = make(length=300, window=4, sinks=0)
    mask = torch.zeros(1, 1, 1, 300, dtype=torch.bool)
    mask[..., 200] = True
    out = check(1e4 * torch.randn(1, 2, 1, 32), cached, mask=mask)
    value = reference(torch.ones(1, 2, 1, 32), cached, mask=mask)
    # The entries' own rounding: half of 1/127 of the largest of 32.
    assert (out - value).norm() < 0.02 * value.norm()
