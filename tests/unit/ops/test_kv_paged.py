"""The specification of pages that are read through tables: that of tapes, wherever pages lie."""

from __future__ import annotations

import pytest
import torch

from hf_vq.cache.codebooks import universal
from hf_vq.errors import VQCacheError
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import decode_kv, encode_kv
from hf_vq.ops.paged import PagedKV, append_paged, attention_paged, through_tables

HEADS, DIM, TOKENS, PAGES = 2, 32, 8, 12
LENGTHS = (0, 1, 8, 29)


def filled(name: str) -> tuple[PagedKV, list[torch.Tensor]]:
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
            append_paged(x, centre, book, memory, scales, slots, part.spec())
            codes, scale = encode_kv(x if centre is None else x - centre, book, part)
            rows = decode_kv(codes, scale, book, part, DIM)
            said[row].append(rows if centre is None else rows + centre)
        tensors.append((memory, scales, book))
    (k, k_scale, k_book), (v, v_scale, v_book) = tensors
    cached = PagedKV(
        k, k_scale, mean, v, v_scale, k_book, v_book, table.int(), torch.tensor(LENGTHS),
        max(LENGTHS), scheme.key.spec(), scheme.value.spec(),
    )  # fmt: skip
    return cached, said


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["u4", "k4v2", "qserve-kv4"])
def test_rows_attend_to_their_own_tokens(name: str, count: int) -> None:
    cached, said = filled(name)
    query = torch.randn(len(LENGTHS), 2 * HEADS, count, DIM)
    found = attention_paged(query, cached, scaling=0.2)
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
    query, scheme = torch.randn(len(LENGTHS), 4, 1, DIM), cached.key_scheme
    for s_aux in (None, torch.randn(4)):
        given = (query, *cached[:9], s_aux, cached.longest, 0.2, 5.0, scheme, scheme)
        torch.library.opcheck(torch.ops.hf_vq.attention_paged.default, given)
    x, slots = torch.randn(1, HEADS, 3, DIM), torch.tensor([3, 90, 17])
    given = (x, cached.k_mean, cached.codebook_k, cached.k_codes, cached.k_scale.zero_(), slots)
    torch.library.opcheck(torch.ops.hf_vq.append_paged.default, (*given, scheme))


def test_what_does_not_belong_together_is_refused() -> None:
    cached, _ = filled("u4")
    query = torch.randn(len(LENGTHS), 4, 1, DIM)
    for wrong in (
        cached._replace(table=cached.table[1:]),
        cached._replace(length=cached.length[1:]),
        cached._replace(longest=41),
    ):
        with pytest.raises(VQCacheError, match="rows must be as many and pages enough"):
            attention_paged(query, wrong, scaling=1.0)
    with pytest.raises(VQCacheError, match="2 heads"):
        attention_paged(query[:, :3], cached, scaling=1.0)


def test_without_a_kernel_pages_are_copied() -> None:
    u4 = KV_SCHEMES["u4"].key
    assert not through_tables(u4, u4, 128, 256, torch.empty(1))
