"""Cases of the kernels for KV caches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from cases import FLOATS, Case
from torch import Tensor

from hf_vq.backends.cuda.kv import append as cuda_append
from hf_vq.backends.cuda.kv import attention as cuda_attention
from hf_vq.backends.cuda.kv import key_means as cuda_means
from hf_vq.backends.cuda.kv import prefill as cuda_prefill
from hf_vq.backends.cuda.kv import step as cuda_store
from hf_vq.backends.torch.partial_softmax import Maths
from hf_vq.cache.key_means import Calibrated
from hf_vq.formats import KV_SCHEMES, VQScheme
from hf_vq.formats.packing import packed_size
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import KVCacheView, KVSide
from hf_vq.ops.kv import flatten
from hf_vq.ops.layout import ROWS
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference import kv_attention as attention_reference
from hf_vq.ops.reference import kv_static as static_reference
from hf_vq.ops.reference.key_means import prompt_means, prompt_smoothing
from hf_vq.serving.batch import Table
from hf_vq.serving.pages import LayerPages, PageFormat


def keys_and_values() -> Iterator[Case]:
    """Plans of append.cu: one token, some, and more than are few."""
    names = ("u4", "u3", "u2", "nomad-u4", "cq-4", "cq-2", "nomad-2", "qserve-kv4")
    for name, dim, tokens in product(names, (80, 128), (1, 30, 1101)):
        yield f"append {tokens} x {dim} {name}", partial(append, KV_SCHEMES[name].key, dim, tokens)


def kv_codebook(scheme: VQScheme, heads: int, dim: int) -> Tensor:
    """The universal one, or random ones."""
    if scheme.has_scale:
        return universal_tensor(scheme)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape).half()


def append(scheme: VQScheme, dim: int, tokens: int) -> None:
    """One launch."""
    x, book = torch.randn(1, 2, tokens, dim), kv_codebook(scheme, 2, dim)
    size = packed_size(dim // scheme.vector_size, scheme.entry_bits)
    codes = torch.full((1, 2, tokens + 1, size), 7, dtype=torch.uint8).cuda()
    scale = torch.full((1, 2, tokens + 1, scheme.row_numbers), 7).half().cuda()
    mean = torch.zeros(1, 2, 1, dim).cuda() if scheme.has_scale else None
    x_there = x.half().cuda()
    none = x_there[:, :, :0]
    side = KVSide(codes, scale, book.cuda(), mean, none, none, 0, scheme.spec(), ROWS)
    view = KVCacheView(side, side, None, None, None, None, tokens, 0, 0, tokens)
    cuda_append.append(x_there, None, view, None)
    codes, scale = codes.cpu(), scale.cpu()
    assert (codes[:, :, -1] == 7).all() and (scale[:, :, -1] == 7).all()
    rows = reference.decode_rows(codes[:, :, :-1], book, scale[:, :, :-1], scheme, dim)
    error = ((rows - x).norm() / x.norm()).item()
    assert error < 0.8, f"relative error {error}"


def steps_of_a_cache() -> Iterator[Case]:
    """Plans of kv_step.cu."""
    for name, tokens in product(("u4", "k4v2", "cq-4", "nomad-2", "qserve-kv4"), (1, 3)):
        yield f"store {tokens} {name}", partial(store_steps, name, tokens)


def store_steps(name: str, tokens: int, dim: int = 128) -> None:
    """Launches until the tape is full, with a mean that is found on the way."""
    scheme, centred = KV_SCHEMES[name], KV_SCHEMES[name].centre_keys

    def side(part: VQScheme, mean: Tensor | None) -> KVSide:
        width = packed_size(dim // part.vector_size, part.entry_bits)
        return KVSide(
            torch.zeros(2, 2, 12, width).byte(), torch.zeros(2, 2, 12, part.row_numbers).half(),
            kv_codebook(part, 2, dim), mean, torch.zeros(2, 2, 2, dim).half(),
            torch.zeros(2, 2, 12, dim).half(), 0, part.spec(), ROWS,
        )  # fmt: skip

    here = KVCacheView(
        side(scheme.key, torch.zeros(2, 2, 1, dim) if centred else None), side(scheme.value, None),
        torch.tensor([0, 3]), torch.zeros((), dtype=torch.int64), None,
        torch.zeros(2, 2).bool() if centred else None, 12, 4, 0, 0,
    )  # fmt: skip
    there = here.map(Tensor.cuda)
    for _ in range(18 // tokens):
        new = [torch.randn(2, 2, tokens, dim).half() for _ in range(2)]
        static_reference.kv_append(*new, here)
        cuda_store.append(new[0].cuda(), new[1].cuda(), there)
    for expected, found in zip(flatten(here), flatten(there), strict=True):
        if isinstance(expected, Tensor) and expected.numel():
            same = torch.isclose(found.cpu().double(), expected.double(), rtol=2.0**-9, atol=1e-6)
            assert same.double().mean() > 0.99, f"{same.double().mean()} of {expected.shape}"


def coded_parts() -> Iterator[Case]:
    """Plans of dequantize_kv.cu and softmax_merge.cu."""
    for n, (name, head_dim) in enumerate(product(KV_SCHEMES, (80, 128, 192))):
        yield f"decode_kv {name} {head_dim}", partial(decode_kv, name, head_dim, n)
    for head_dim, coded in product((64, 80, 96, 128, 192, 256), (0, 3)):
        yield f"merge {head_dim} {coded}", partial(merge, head_dim, coded)


def decode_kv(name: str, head_dim: int, number: int) -> None:
    """Launches for some tokens of a tape, of keys and of values."""
    dtype = list(FLOATS.values())[number % 3]
    for scheme in (KV_SCHEMES[name].key, KV_SCHEMES[name].value):
        book = kv_codebook(scheme, 3, head_dim)
        width = packed_size(head_dim // scheme.vector_size, scheme.entry_bits)
        codes = torch.randint(0, 256, (2, 3, 1100, width), dtype=torch.uint8)
        scale = torch.rand(2, 3, 1100, scheme.row_numbers).half()
        mean = torch.randn(2, 3, 1, head_dim)
        some = slice(7, 7 + (1, 129, 1093)[number % 3])
        exact = reference.decode_rotated(codes, book, scale, scheme, head_dim)[:, :, some] + mean
        found = cuda_prefill.decode(
            codes.cuda()[:, :, some], scale.cuda()[:, :, some], book.cuda(), mean.cuda(), scheme,
            head_dim, dtype,
        )  # fmt: skip
        assert torch.equal(found.cpu(), exact.to(dtype))


def merge(head_dim: int, coded: int) -> None:
    """One launch; the reference is that of the CPU."""
    parts = [
        (torch.randn(2, 3, 37, head_dim).half(), torch.randn(2, 3, 37)) for _ in range(coded + 2)
    ]
    aux, scheme = torch.randn(3), KV_SCHEMES["u4"].value
    exact = Maths().merge(parts[:coded], parts[coded:], aux, scheme, torch.float32)
    there = [(out.cuda(), lse.cuda()) for out, lse in parts]
    found = cuda_prefill.merge(there[:coded], there[coded:], aux.cuda(), scheme, torch.float16)
    assert (found.cpu() - exact).norm() < 2.0**-9 * exact.norm()


def in_pages() -> Iterator[Case]:
    """Plans of append.cu and attention.cu with pages."""
    for name, dim, page in product(("u4", "u2", "nomad-u4", "qserve-kv4"), (80, 128), (64, 256)):
        yield f"pages of {page} x {dim} {name}", partial(serve, name, dim, page)


def serve(name: str, dim: int, page: int) -> None:
    """Requests of several lengths come to pages of any order, and attend to them."""
    scheme, lengths, width = KV_SCHEMES[name], (700, 1, 0, 65), -(-700 // page)
    pages, like = 4 * width, torch.empty(1, dtype=torch.float16, device="cuda")
    kind = PageFormat.of(scheme, 2, dim, page, like)
    memory = torch.zeros(pages, kind.nbytes, dtype=torch.uint8, device="cuda")
    books = (kv_codebook(scheme.key, 2, dim).cuda(), kv_codebook(scheme.value, 2, dim).cuda())
    layer = LayerPages(memory, kind, books, Calibrated(torch.randn(2, dim)))
    table = torch.randperm(pages).view(4, width).int().cuda()
    length = torch.tensor(lengths).cuda()
    for row, count in enumerate(lengths):
        position = torch.arange(count, device="cuda")
        slots = table[row][position // page] * page + position % page
        layer.put(*torch.randn(2, 1, 2, count, dim, device="cuda").half(), slots)
    query = torch.randn(4, 8, 1, dim, device="cuda").half()
    given = layer.through(Table(table, length, max(lengths)), query), None, None, dim**-0.5, 0.0
    exact = attention_reference.attention_paged(query.float(), *given)
    found = cuda_attention.attention(query, *given).float()
    assert (found - exact).norm() < 2.0**-7 * exact.norm()


def attended() -> Iterator[Case]:
    """Plans of attention.cu: one query, and some."""
    names = ("u4", "u3", "u2", "k4v2", "nomad-u4", "cq-4", "cq-2", "qserve-kv4")
    for name, dim, queries in product(names, (80, 128), (1, 5)):
        yield f"attention {queries} x {dim} {name}", partial(attend, name, dim, queries)


def attend(name: str, dim: int, queries: int, tokens: int = 700, window: int = 64) -> None:
    """One launch: 2 kv heads, 4 query heads for each, sinks, codes and the newest floats."""
    parts, heads, coded = KV_SCHEMES[name], 2, tokens - window

    def side(scheme: VQScheme, mean: Tensor | None) -> KVSide:
        width = packed_size(dim // scheme.vector_size, scheme.entry_bits)
        codes = torch.randint(0, 256, (1, heads, coded, width), dtype=torch.uint8)
        scale = torch.rand(1, heads, coded, scheme.row_numbers).half()
        floats = (torch.randn(1, heads, count, dim).half() for count in (4, 96))
        book = kv_codebook(scheme, heads, dim)
        return KVSide(codes, scale, book, mean, *floats, 0, scheme.spec(), ROWS)

    query = torch.randn(1, 4 * heads, queries, dim).half()
    mean = torch.randn(1, heads, 1, dim) if parts.centre_keys else None
    view = KVCacheView(
        side(parts.key, mean), side(parts.value, None), None, None, None, None, tokens, window,
        queries, coded,
    )  # fmt: skip
    options = None, None, dim**-0.5, 0.0
    exact = attention_reference.attention(query, view, *options).float()
    found = cuda_attention.attention(query.cuda(), view.map(Tensor.cuda), *options).cpu().float()
    assert (found - exact).norm() < 2.0**-7 * exact.norm()


def decided() -> Iterator[Case]:
    """Plans of key_means.cu and key_smoothing.cu: a block, or several, for each head."""
    for dtype, (dim, pairs), tokens in product(FLOATS.values(), ((80, 20), (256, 128)), (9, 150)):
        yield f"decide {tokens} x {dim} {dtype}", partial(decide, dtype, dim, pairs, tokens)


def decide(dtype: torch.dtype, dim: int, pairs: int, tokens: int) -> None:
    """A launch of each, for keys that turn."""
    keys = torch.randn(2, 3, tokens, dim) + 3 * torch.randn(2, 3, 1, dim)
    query = (torch.randn(2, 12, tokens, dim) * torch.randn(dim).exp()).to(dtype)
    keys, inv_freq = keys.to(dtype), 1e4 ** -(torch.arange(pairs) / pairs)
    exact = prompt_means(keys, 4, inv_freq, None, 0.1, 16)
    there = cuda_means.prompt_means(keys.cuda(), 4, inv_freq.cuda(), None, 0.1, 16)
    for found, expected in zip(there, exact, strict=True):
        assert torch.allclose(found.cpu(), expected, atol=1e-4)
    factors = prompt_smoothing(query, keys, *exact[:2], pairs, exact.shown)
    found = cuda_means.prompt_smoothing(query.cuda(), keys.cuda(), *there[:2], pairs, there.shown)
    assert torch.allclose(found.cpu(), factors, rtol=1e-3)


MAKERS = {
    "key_means": decided,
    "attention": attended,
    "pages": in_pages,
    "append": keys_and_values,
    "kv_step": steps_of_a_cache,
    "kv": coded_parts,
}
