"""Rows of integers with a scale and a zero: `qserve-kv4`."""

import pytest
import torch
from transformers import LlamaConfig

from hf_vq.cache import VQCache
from hf_vq.errors import VQConfigError, VQSchemeError
from hf_vq.formats.catalog import KV_SCHEMES, weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.hf import VQConfig
from hf_vq.ops import decode_kv, encode_kv

KV4 = KV_SCHEMES["qserve-kv4"].key
BOOK = universal_tensor(KV4)


def coded(x):
    codes, scale = encode_kv(x, BOOK, KV4)
    return codes, scale, decode_kv(codes, scale, BOOK, KV4, x.shape[-1])


def test_what_is_stored():
    """QServe's formula, by hand: s = (max - min) / 15, z = -min / s, c = round(x / s + z)."""
    x = torch.tensor([[-1.5, -0.5, 0.5, 6.0]])
    codes, scale, rows = coded(x)
    assert scale.tolist() == [[0.5, 3.0]]
    assert codes.tolist() == [[0 | 2 << 4, 4 | 15 << 4]]
    assert rows.tolist() == [[-1.5, -0.5, 0.5, 6.0]]
    assert KV4.bits(128) == 4.25


@pytest.mark.parametrize("shift", [0.0, 3.0, -200.0])
def test_the_error_is_half_a_step(shift):
    x = torch.randn(2, 3, 7, 64) + shift
    codes, scale, rows = coded(x)
    assert codes.shape == (2, 3, 7, 32) and scale.shape == (2, 3, 7, 2)
    step, zero = scale.float().split(1, -1)
    # Half a step, what rounding the zero moves, and what the last code lacks as s was rounded.
    bound = step * (0.5 + zero.abs() / 2048 + 15 / 2048)
    assert ((rows - x).abs() <= bound * 1.001).all()
    assert (zero.abs() <= 1024).all()


def test_rows_without_a_range():
    x = torch.tensor([0.0, 2.5, -2.5, 1e-12])[:, None].expand(4, 8)
    *_, rows = coded(x)
    torch.testing.assert_close(rows, x, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("unit", [1e6, 1e9, 1e20, 1e30, 3e37])
def test_steps_beyond_fp16_saturate(unit):
    """The integers have the middle of the row, and so the signs, as far as 65504 reaches."""
    row = torch.tensor([-1.0, 0.25, 0, 1]).repeat(2)
    x = torch.stack([row, row.abs(), -row.abs(), torch.ones(8), torch.randn(8).clamp(-9, 9)]) * unit
    x = torch.cat([x, torch.randn(2, 8)])  # rows beside them are what they are alone
    codes, scale, rows = coded(x)
    assert scale.isfinite().all() and rows.isfinite().all()
    assert (rows[:5] * x[:5] >= 0).all(-1)[[1, 2, 3]].all()
    assert ((rows[0] > 0) == (x[0] > 0))[x[0] != 0].all()
    step = scale[:5, :1].float()
    assert (step[[0, 1, 2, 4]] == 65504).all()
    assert torch.equal(codes[5:], coded(x[5:])[0])


def test_the_largest_steps_are_those_of_the_formula():
    """Below 65520, which is the first that fp16 rounds to infinity, nothing saturates."""
    x = torch.tensor([[0.0, 15 * 65503.0], [0.0, 15 * 65519.0], [-15 * 40000.0, 15 * 25000.0]])
    x = x.repeat(1, 4)
    _, scale, rows = coded(x)
    step, zero = scale.float().split(1, -1)
    assert torch.equal(step[:, 0], torch.tensor([65504.0, 65504.0, 65000.0]).half().float())
    assert torch.equal(zero, (-x.amin(-1, keepdim=True) / step).half().float())
    torch.testing.assert_close(rows, x, rtol=1e-3, atol=65504 / 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value):
    x = torch.randn(3, 8)
    x[1, 4] = value
    *_, rows = coded(x)
    assert not rows[1].isfinite().all() and rows[[0, 2]].isfinite().all()


@pytest.mark.parametrize("fields", [{"vector_size": 2}, {"entry_bits": 9}, {"scale_group": 32}])
def test_schemes_that_cannot_be(fields):
    plain = {"vector_size": 1, "entry_bits": 4, "scale_group": 0, "rotation": "none"}
    with pytest.raises(VQSchemeError, match="integers"):
        VQScheme(codebook="integers", **{**plain, **fields})


def test_a_cache_of_them():
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    cache = VQCache(config, "qserve-kv4", sinks=0, window=0)
    keys, values = torch.randn(2, 2, 2, 9, 16).unbind()
    cache.update(keys[:, :, :8], values[:, :, :8], 0)
    k, v = cache.update(keys[:, :, 8:], values[:, :, 8:], 0)
    for found, x in ((k.decode(), keys), (v.decode(), values)):
        torch.testing.assert_close(found[:, :, :8], coded(x)[2][:, :, :8])
        assert torch.equal(found[:, :, 8], x[:, :, 8])  # the update's own
    query = torch.randn(2, 4, 1, 16)
    out = torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)
    dense = [x.decode().repeat_interleave(2, 1) for x in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *dense)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert cache.bits_per_element == 4 + 32 / 16


def test_weights_have_no_zeros():
    with pytest.raises(VQSchemeError, match="keys and values"):
        weight_scheme(KV4)
    with pytest.raises((VQSchemeError, VQConfigError), match="keys and values"):
        VQConfig(KV4.spec())
