"""`cuda.attention_prefill` against attention written out in float64, and its decoder bit by bit.

For the whole file an H200 needs about a minute, most of it attention in loops on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from hf_vq import VQCache, dispatch
from hf_vq.backends.cuda import devices
from hf_vq.backends.cuda.kv import prefill as cuda_prefill
from hf_vq.backends.torch import kv_attention as torch_attention
from hf_vq.backends.torch.partial_softmax import Maths
from hf_vq.cache.lazy_kv import decoded
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops import KVCacheView, kv_attention
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_attention as attention_reference
from tests.fixtures.kv.attention_float64 import codebook_of, make, written_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SCHEMES = ["u4", "u3", "u2", "k4v2", "nomad-u4", "nomad-4", "nomad-2", "nomad-1", "cq-4", "cq-2"]
SCHEMES += ["qserve-kv4"]
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def only_this_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if devices.available():
        pytest.skip(devices.available())
    monkeypatch.setattr(torch_attention, "DECODED_BYTES", 1 << 16)
    names = ("cuda.attention_prefill", "torch.attention")  # the latter makes caches on the CPU
    with dispatch.using(
        entry for entry in dispatch.ENTRIES if entry.op != "kv_attention" or entry.name in names
    ):
        yield


def on_gpu(cached: KVCacheView) -> KVCacheView:
    return cached.map(Tensor.cuda)


def check(query: Tensor, cached: KVCacheView, **options: object) -> None:
    """err(op) <= 2 err(same maths in torch at that dtype) + what rounding moves.

    That is the output's own rounding, and that of the rotated query: a logit of scaling |q| |k| is
    off by eps of it, which moves the output by as much times |v|.
    """
    options = {"softmax_scale": query.shape[-1] ** -0.5, **options}
    exact = written_out(query, cached, torch.float64, **options)  # type: ignore[arg-type]
    plain = written_out(query, cached, query.dtype, **options)  # type: ignore[arg-type]
    given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    with torch.device("cuda"):
        poison = torch.full((1 << 24,), torch.nan)
        del poison
    out = kv_attention(query.cuda(), on_gpu(cached), **given).cpu()  # type: ignore[arg-type]
    assert out.dtype == query.dtype and out.shape == exact.shape
    eps = torch.finfo(query.dtype).eps
    largest = [
        x.float().norm(dim=-1).max() for x in (query, cached.key.recent, cached.value.recent)
    ]
    allowed = 2 * (plain.double() - exact).abs().max() + eps * exact.abs().max()
    allowed += eps * options["softmax_scale"] * math.prod(largest) / math.sqrt(query.shape[-1])
    assert (out.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize(("number", "head_dim"), [*enumerate([64, 80, 96, 128, 192, 256])])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoder(scheme: str, head_dim: int, number: int) -> None:
    both, dtype = KV_SCHEMES[scheme], (*DTYPES, torch.float32)[number % 3]
    for part in {both.key, both.value}:
        book = codebook_of(part, 3, head_dim).cuda()
        width = head_dim // part.vector_size * part.entry_bits // 8
        tape = torch.randint(0, 256, (2, 3, 2000, width), dtype=torch.uint8, device="cuda")
        scales = torch.randn(2, 3, 2000, part.row_numbers, device="cuda").half()
        for first, count in ((0, 1), (3, 31), (7, 1500), (1999, 1)):
            codes, scale = tape[:, :, first : first + count], scales[:, :, first : first + count]
            want = reference.decode_rotated(codes, book, scale, part, head_dim)
            got = cuda_prefill.decode(codes, scale, book, None, part, head_dim, dtype)
            assert torch.equal(got, want.to(dtype))
            mean = torch.randn(2, 3, 1, head_dim, device="cuda")
            got = cuda_prefill.decode(codes, scale, book, mean, part, head_dim, dtype)
            assert torch.equal(got, (want + mean).to(dtype))


def written_part(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attention_maths.Part` in float64."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (keys, values))
    scores = query.double() @ keys.mT * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


PARTS = [  # of queries and keys: B, Hq, H, Q, n, D, Dv, and what is to run
    (1, 32, 8, 300, 2048, 128, 128, "_cudnn"),
    (2, 16, 16, 257, 4096, 64, 64, "_cudnn"),
    (1, 32, 8, 256, 2048, 192, 128, "_efficient"),
    (1, 32, 8, 300, 2047, 128, 128, "_flash"),
    (2, 8, 2, 33, 77, 80, 80, "_flash"),
    (1, 4, 1, 1, 1, 256, 256, "_flash"),
    (2, 8, 2, 33, 77, 64, 96, "_efficient"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", PARTS)
def test_partial_softmaxes_are_those_written_out(
    sizes: tuple[int, int, int, int, int, int, int, str], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    batch, heads, kv_heads, queries, count, dim, value_dim, chosen = sizes
    query = torch.randn(batch, queries, heads, dim, device="cuda", dtype=dtype).transpose(1, 2)
    keys = torch.randn(batch, kv_heads, count, dim, device="cuda", dtype=dtype)
    values = torch.randn(batch, kv_heads, count, value_dim, device="cuda", dtype=dtype)
    if torch.cuda.get_device_capability() < (9, 0) and chosen == "_cudnn":
        chosen = "_flash" if dim == value_dim else "_efficient"
    kernel, ran = getattr(cuda_prefill, chosen), []
    monkeypatch.setattr(cuda_prefill, chosen, lambda *given: (ran.append(1), kernel(*given))[1])
    random = torch.rand(batch, 1, queries, count, device="cuda") > 0.5
    random[0, 0, -1] = False
    square = torch.ones(queries, queries, dtype=torch.bool, device="cuda").tril()
    newest = keys[:, :, :queries], values[:, :, :queries]
    maths = cuda_prefill._MATHS
    for mask, given, options in (
        (None, (keys, values), {}),
        (random, (keys, values), {"mask": random, "blind": True}),
        (random[:1], (keys, values), {"mask": random[:1], "blind": True}),
        (random[:, :, :1], (keys, values), {"mask": random[:, :, :1], "blind": True}),
        (square, newest, {"causal": True}),
    ):
        if options.get("causal") and queries > count:
            continue
        out, lse = maths.attend(query, *given, 0.1, **options)
        want, total = written_part(query, *given, 0.1, mask)
        eps = torch.finfo(dtype).eps
        seen = total.isfinite()
        assert torch.equal(seen, lse.isfinite()) and (lse[~seen] == -torch.inf).all()
        assert (out[~seen] == 0).all() and lse.dtype == torch.float32
        # Weights are rounded to the dtype, and so is the output.
        assert ((out - want).abs() <= 2 * eps * given[1].abs().max()).all()
        assert ((lse - total)[seen].abs() <= 1e-5 * (1 + total[seen].abs())).all()
    assert ran


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("counts", [(0, 1), (1, 2), (9, 2)])
def test_partial_softmaxes_are_merged(
    counts: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    shape = (2, 3, 37)
    parts = [
        (torch.randn(*shape, dim, device="cuda", dtype=dtype), torch.randn(shape, device="cuda"))
        for _ in range(sum(counts))
    ]
    for out, lse in parts:
        lse += 30 * torch.randn(1, device="cuda")
        lse[0, 1, 5:9] = -torch.inf  # queries that see nothing
        out[0, 1, 5:9] = 0
    parts[0][1][1, 2] = -torch.inf
    parts[0][0][1, 2] = 0
    coded, others = parts[: counts[0]], parts[counts[0] :]
    scheme = KV_SCHEMES["u4"].value
    for aux in (None, torch.randn(3, device="cuda")):
        exact = Maths().merge(
            *([(out.double(), lse.double()) for out, lse in some] for some in (coded, others)),
            aux, scheme, torch.float64,
        )  # fmt: skip
        got = cuda_prefill.merge(coded, others, aux, scheme, dtype)
        assert got.dtype == dtype and (got[0, 1, 5:9] == 0).all()
        largest = max(out.abs().max() for out, _ in parts) * math.sqrt(dim)
        allowed = torch.finfo(dtype).eps * exact.abs() + 1e-5 * largest
        assert ((got - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme: str, dtype: torch.dtype) -> None:
    cached = make(scheme, dtype, batch=1, dim=128, length=333, window=40, fresh=45)
    check(torch.randn(1, 4, 45, 128).to(dtype), cached)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (192, 128), (128, 64), (256, 256)])
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    cached = make(
        "u4", dtype, dim=dims[0], value_dim=dims[1], length=211, window=40, fresh=45, batch=1
    )
    check(torch.randn(1, 4, 45, dims[0]).to(dtype), cached)


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize(
    ("sinks", "queries", "fresh"), [(0, 1, 1), (4, 33, 33), (4, 5, 70), (4, 130, 130)]
)
def test_windows(window: int, sinks: int, queries: int, fresh: int) -> None:
    cached = make(
        "u4", torch.bfloat16, batch=1, length=311, window=window, sinks=sinks, fresh=fresh
    )
    check(torch.randn(1, 4, queries, 64).bfloat16(), cached)


def causal(queries: int, length: int, start: list[int]) -> Tensor:
    j = torch.arange(length)
    i = torch.arange(length - queries, length)[:, None]
    return (j <= i) & (j >= torch.tensor(start)[:, None, None, None])


@pytest.mark.parametrize("start", [None, [0, 0], [0, 111], [290, 13]])
def test_masks(start: list[int] | None) -> None:
    length, queries = 300, 50
    cached = make("u4", torch.bfloat16, length=length, window=8, fresh=queries, start=start)
    query = torch.randn(2, 4, queries, 64).bfloat16()
    check(query, cached)
    mask = causal(queries, length, start or [0, 0])
    check(query, cached, mask=mask)
    check(query, cached, mask=mask, sink_logits=torch.randn(4))
    check(query, cached, mask=mask & (torch.rand(2, 1, queries, length) > 0.3))
    check(query, cached, mask=torch.randn(2, 1, queries, length))
    check(query, cached, softcap=5.0, sink_logits=torch.randn(4))


@pytest.mark.parametrize("length", [1000, 20000, 131072])
def test_long_contexts_against_the_reference(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "DECODED_BYTES", 4 << 20)
    cached = make("u4", torch.bfloat16, batch=1, heads=1, length=600, window=64, fresh=40, dim=64)
    coded = length - 64
    width = cached.key.codes.shape[3]
    codes = torch.randint(0, 256, (1, 1, coded, width), dtype=torch.uint8)
    scale = torch.rand(1, 1, coded, 1).half() * 0.5
    cached = cached.replace(
        key_codes=codes, value_codes=codes.flip(3), key_scale=scale, value_scale=scale,
        num_coded=coded, key_first=0, value_first=0, max_seqlen=length,
    )  # fmt: skip
    query = torch.randn(1, 4, 40, 64).bfloat16().cuda()
    cached = on_gpu(cached)
    want = attention_reference.attention(query.float(), cached, None, None, 0.125, 0.0)
    out = kv_attention(query, cached, softmax_scale=0.125)
    seen = decoded(cached, "value").float().norm(dim=-1).mean()
    assert (out - want).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * seen


def peak(model: LlamaForCausalLM, cache: Cache, chunks: list[int]) -> int:
    """Bytes beyond those of the model when a prompt comes in chunks."""
    ids = torch.randint(0, 64, (1, sum(chunks)), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        for part in ids.split(chunks, 1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("chunks", [[32768], [30720, 2048], [2048] * 16])
def test_prefill_needs_no_more_memory_than_floats(chunks: list[int]) -> None:
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=1024, intermediate_size=1024, vocab_size=64,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=sum(chunks),
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    codes = VQCache(config)
    needed = peak(model, codes, chunks)
    assert set(codes.fallbacks.values()) == {0}
    del codes
    assert needed <= peak(model, DynamicCache(config=config), chunks)


def test_codes_are_written_as_each_layer_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=128, intermediate_size=128, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    cache, seen = VQCache(config), []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def look(query: Tensor, key: Tensor, *given: object, **options: object) -> Tensor:
        coded = [layer.coded if layer.is_initialized else 0 for layer in cache.coded_layers]
        seen.append((type(key), coded))
        return sdpa(query, key, *given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
    with torch.no_grad():
        model(torch.randint(0, 64, (1, 300), device="cuda"), past_key_values=cache)
    coded = 300 - 64
    assert seen == [
        (Tensor, [coded, 0, 0]), (Tensor, [coded, coded, 0]), (Tensor, [coded, coded, coded])
    ]  # fmt: skip


def test_it_is_chosen_for_many_queries() -> None:
    spec = KV_SCHEMES["u4"].key.spec()
    asked = dispatch.KVAttentionProblem(
        "cuda", "bfloat16", spec, spec, 512, 16384, 128, 128, "rows", "rows"
    )
    with dispatch.using(dispatch.ENTRIES):
        assert dispatch.select(asked).name == "cuda.attention_prefill"
