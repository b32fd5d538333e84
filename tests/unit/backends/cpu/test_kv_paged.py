"""Pages of whole blocks are read by the CPU's kernels, which find in them what a tape holds."""

import pytest
import torch

from hf_vq.backends.cpu import library
from hf_vq.cache.codebooks import universal
from hf_vq.cache.key_means import Calibrated
from hf_vq.cache.token_buffer import CodeBuffer
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.ops import kv_attention
from hf_vq.ops.layout import BLOCK, PLANES, QUADS
from hf_vq.serving import cache as serving
from hf_vq.serving.batch import Batch
from hf_vq.serving.pages import LayerPages, PageFormat
from tests.fixtures.kv.views import append_kv

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.why_not())

HEADS, DIM, TOKENS = 2, 64, 700


@pytest.mark.parametrize("name", ["u4", "u2", "nomad-u4"])
def test_attention_is_bit_equal_to_that_over_a_tape(name):
    scheme, like = KV_SCHEMES[name], torch.empty(1, HEADS, 1, DIM)
    page = PageFormat.of(scheme, HEADS, DIM, BLOCK, like)
    assert (page.keys.layout, page.values.layout) == (QUADS, PLANES)
    memory = torch.randint(0, 256, (7, page.nbytes), dtype=torch.uint8)
    books = universal(scheme.key, like.device), universal(scheme.value, like.device)
    mean = torch.randn(HEADS, DIM)
    layer = LayerPages(memory, page, books, Calibrated(mean))
    keys, values = torch.randn(2, 1, HEADS, TOKENS, DIM).unbind()
    past = 0
    for new in (1, 250, 448, 1):  # within a page, over its end, and one token
        batch = Batch(BLOCK, like.device)
        batch.add(past, new, [5, 2, 6][: -(-(past + new) // BLOCK)])
        part = slice(past, past + new)
        layer.write(keys[:, :, part], values[:, :, part], batch)
        past += new
    query = torch.randn(1, 3 * HEADS, 1, DIM)
    (group,) = layer.groups(batch)
    cached = layer.read(group, query)
    assert cached.max_seqlen == cached.num_coded == TOKENS and cached.key.recent.shape[2] == 0
    found = kv_attention(query, cached, softmax_scale=0.2, mask=group.mask)

    tapes = []
    for side, x, book, m in (
        (page.keys, keys, books[0], layer.mean), (page.values, values, books[1], None)
    ):  # fmt: skip
        tape = CodeBuffer(x, side.scheme, side.layout)
        at = tape.reserve(TOKENS)
        append_kv(x, m, book, tape.data, tape.scale, at, side.scheme.spec(), side.layout)
        tapes += [tape.data, tape.scale]
    key = cached.key._replace(codes=tapes[0], scale=tapes[1])
    value = cached.value._replace(codes=tapes[2], scale=tapes[3])
    whole = cached._replace(key=key, value=value)
    assert torch.equal(found, kv_attention(query, whole, softmax_scale=0.2))


@pytest.mark.parametrize(("past", "new"), [(0, 1), (0, 5), (7, 1), (7, 3)])
@pytest.mark.parametrize("tokens", [16, BLOCK])
def test_short_requests_attend_to_all_their_tokens(tokens, past, new):
    """A prompt of one token over pages of blocks attended to nothing."""
    scheme, like = KV_SCHEMES["u4"], torch.empty(1, HEADS, 1, DIM)
    page = PageFormat.of(scheme, HEADS, DIM, tokens, like)
    books = universal(scheme.key, like.device), universal(scheme.value, like.device)
    memory = torch.zeros(3, page.nbytes, dtype=torch.uint8)
    layer = LayerPages(memory, page, books, Calibrated(torch.randn(HEADS, DIM)))
    query, keys, values = torch.randn(3, 1, HEADS, past + new, DIM).unbind()
    batch = Batch(tokens, like.device)
    if past:
        batch.add(0, past, [1])
        layer.write(keys[:, :, :past], values[:, :, :past], batch)
        batch = Batch(tokens, like.device)
    batch.add(past, new, [1])
    layer.write(keys[:, :, past:], values[:, :, past:], batch)
    (group,) = layer.groups(batch)
    options = {"scaling": None, "softcap": None, "s_aux": None}
    found = serving._read(torch.nn.Module(), layer, group, query[:, :, past:], options)
    seen = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, past:], keys, values, attn_mask=seen
    )
    # Codes of 4 bits lose 8 % of a row (sqrt of .0067): of keys and of values, twice for chance.
    assert (found - exact).norm() <= 4 * 0.0067**0.5 * exact.norm()
