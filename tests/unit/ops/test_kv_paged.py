"""The specification of pages that are read through tables: that of tapes, wherever pages lie."""

from __future__ import annotations

import pytest
import torch

from hf_vq.cache.codebooks import universal
from hf_vq.errors import VQCacheError
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import KVCacheView, decode_kv, encode_kv, kv_attention
from hf_vq.ops.kv import flatten
from hf_vq.ops.kv_ops import through_tables
from tests.fixtures.kv.views import append_kv, one_side, view_of

HEADS, DIM, TOKENS, PAGES = 2, 32, 8, 12
LENGTHS = (0, 1, 8, 29)


def filled(name: str) -> tuple[KVCacheView, list[torch.Tensor]]:
    """Requests of some lengths in pages of any order, and what their codes say: keys and values
    [1, H, length, D] of each. All else are no numbers."""
    scheme, cpu = KV_SCHEMES[name], torch.device("cpu")
    mean = torch.randn(1, HEADS, 1, DIM)
    free, table = torch.randperm(PAGES).tolist(), torch.full((len(LENGTHS), 5), -1)
    for row, length in enumerate(LENGTHS):
        for i in range(-(-length // TOKENS)):
            table[row, i] = free.pop()
    tensors, said = [], [[] for _ in LENGTHS]
    for part, centre in ((scheme.key, mean), (scheme.value, None)):
        book = universal(part, cpu)
        codes, scale = encode_kv(torch.randn(1, 1, 1, DIM), book, part)
        memory = torch.randint(0, 256, (PAGES, HEADS, TOKENS, codes.shape[3]), dtype=torch.uint8)
        scales = torch.full((PAGES, HEADS, TOKENS, scale.shape[3]), torch.nan).half()
        for row, length in enumerate(LENGTHS):
            if not length:
                continue
            position = torch.arange(length)
            slots = table[row][position // TOKENS] * TOKENS + position % TOKENS
            x = torch.randn(1, HEADS, length, DIM) + (0 if centre is None else centre)
            append_kv(x, centre, book, memory, scales, 0, part.spec(), "rows", slots)
            codes, scale = encode_kv(x if centre is None else x - centre, book, part)
            rows = decode_kv(codes, scale, book, part, DIM)
            said[row].append(rows if centre is None else rows + centre)
        tensors.append((memory, scales, book))
    (k, k_scale, k_book), (v, v_scale, v_book) = tensors
    none = torch.empty(1, HEADS, 0, DIM)
    cached = view_of(
        key_codes=k, key_scale=k_scale, key_mean=mean, key_codebook=k_book, key_sinks=none,
        key_recent=none, key_scheme=scheme.key.spec(), value_codes=v, value_scale=v_scale,
        value_codebook=v_book, value_sinks=none, value_recent=none,
        value_scheme=scheme.value.spec(), page_table=table.int(),
        cache_seqlens=torch.tensor(LENGTHS), max_seqlen=max(LENGTHS),
    )  # fmt: skip
    return cached, said


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["u4", "k4v2", "qserve-kv4"])
def test_rows_attend_to_their_own_tokens(name: str, count: int) -> None:
    cached, said = filled(name)
    query = torch.randn(len(LENGTHS), 2 * HEADS, count, DIM)
    found = kv_attention(query, cached, softmax_scale=0.2)
    assert not found[0].any()
    for row, length in enumerate(LENGTHS):
        asked = min(count, length)
        if not asked:
            continue
        keys, values = (x.repeat_interleave(2, 1) for x in said[row])
        seen = torch.ones(asked, length, dtype=torch.bool).tril(length - asked)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row : row + 1, :, count - asked :], keys, values, attn_mask=seen, scale=0.2
        )
        torch.testing.assert_close(found[row : row + 1, :, count - asked :], expected)


def test_opcheck() -> None:
    cached, _ = filled("u4")
    query, scheme = torch.randn(len(LENGTHS), 4, 1, DIM), cached.key.scheme
    for sink_logits in (None, torch.randn(4)):
        given = (query, *flatten(cached), None, sink_logits, 0.2, 5.0)
        torch.library.opcheck(torch.ops.hf_vq.kv_attention.default, given)
    x, slots, side = torch.randn(1, HEADS, 3, DIM), torch.tensor([3, 90, 17]), cached.key
    view = one_side(
        x, side.mean, side.codebook, side.codes, side.scale.zero_(), 0, scheme, side.layout
    )
    given = (x, x.new_empty(1, HEADS, 0, DIM), *flatten(view), slots)
    torch.library.opcheck(torch.ops.hf_vq.kv_append.default, given)


def test_what_does_not_belong_together_is_refused() -> None:
    cached, _ = filled("u4")
    query = torch.randn(len(LENGTHS), 4, 1, DIM)
    for wrong in (
        cached._replace(page_table=cached.page_table[1:]),
        cached._replace(cache_seqlens=cached.cache_seqlens[1:]),
        cached._replace(max_seqlen=41),
    ):
        with pytest.raises(VQCacheError, match="rows must be as many, pages enough"):
            kv_attention(query, wrong, softmax_scale=1.0)
    with pytest.raises(VQCacheError, match="2 key/value heads"):
        kv_attention(query[:, :3], cached, softmax_scale=1.0)


def test_without_a_kernel_pages_are_copied() -> None:
    u4 = KV_SCHEMES["u4"].key
    assert not through_tables(u4, u4, 128, 256, torch.empty(1))
