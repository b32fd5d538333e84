"""The suites that time coded caches on a GPU, what they are made of, and their tables."""

import pytest
import torch
from transformers import DynamicCache

from benchmarks.cuda import attention as cuda_attention
from benchmarks.cuda import generate_kv as cuda_generate_kv
from benchmarks.random_kv import HEAD_DIM, bytes_read, coded_cache, copy_of
from benchmarks.tables import kv as kv_tables
from benchmarks.tables import pages as tables
from hf_vq.errors import VQBackendError
from hf_vq.evaluation.record import make_record
from hf_vq.formats.catalog import kv_scheme
from hf_vq.ops import kv_attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("suite", [cuda_attention, cuda_generate_kv])
def test_without_a_gpu_it_says_so(suite):
    with pytest.raises(VQBackendError, match="needs a CUDA device"):
        suite.run()


@pytest.mark.parametrize("context", [1, 64, 68, 69, 1500])
@pytest.mark.parametrize("name", cuda_attention.SCHEMES)
def test_a_cache_of_any_length(name, context):
    cached = coded_cache(name, 2, 3, context, torch.bfloat16, "cpu")
    assert (cached.max_seqlen, cached.num_new, cached.num_coded) == (
        context,
        1,
        max(context - 64, 0),
    )
    query = torch.randn(3, 4, 1, HEAD_DIM).bfloat16()
    other = copy_of(cached)
    assert other.key.recent.data_ptr() != cached.key.recent.data_ptr()
    first, second = (kv_attention(query, c, softmax_scale=0.1) for c in (cached, other))
    assert torch.equal(first, second) and first.isfinite().all()
    scheme = kv_scheme(name)
    per_token = HEAD_DIM * (scheme.key.bits(HEAD_DIM) + scheme.value.bits(HEAD_DIM)) / 8
    floats = min(context, 64 + 4)
    books = (cached.key.codebook.nbytes + cached.value.codebook.nbytes) * (context > floats)
    rows = 3 * 2 * (floats * 2 * HEAD_DIM * 2 + (context - floats) * per_token)
    assert bytes_read(cached) == rows + books


def test_a_cache_that_is_exactly_as_long_as_its_tokens():
    exact, plain = DynamicCache(), DynamicCache()
    exact.layers = [cuda_generate_kv.ExactLayer() for _ in range(2)]
    for count in (9, 1, 1):
        states = torch.randn(2, 2, 4, count, 8)
        for layer in range(2):
            pairs = zip(exact.update(*states, layer), plain.update(*states, layer), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert exact.get_seq_length() == 11 and not exact.is_compileable


def decode_rows(context, heads=32, kv_heads=8, batch=1):
    case = {"heads": heads, "kv_heads": kv_heads, "batch": batch, "context": context}
    row = {"what": "decode", **case, "us": 10.0, "us_min": 9.0, "of_memory": 0.5}
    return [
        {**row, "name": "bf16 flash", "us": 30.0},
        {**row, "name": "bf16 cuDNN", "us": 25.0},
        {**row, "name": "u4", "kernel": "cuda.vq_attention", "peer": "bf16 cuDNN", "speedup": 2.5},
        {"what": "decode", **case, "name": "u3", "kernel": "reference"},
    ]


def test_tables_of_attention():
    rows = [*decode_rows(4096), *decode_rows(16384), *decode_rows(16384, batch=8),
            *decode_rows(64, kv_heads=32), *decode_rows(64),
            {"what": "store", "name": "bf16", "kv_heads": 8, "batch": 1, "us": 4.0},
            {"what": "store", "name": "bf16", "kv_heads": 32, "batch": 1, "us": 5.0},
            {"what": "store", "name": "u4", "kv_heads": 32, "batch": 1, "us": 2.0},
            {"what": "store", "name": "u4", "kv_heads": 8, "batch": 1, "us": 3.0},
            ]  # fmt: skip
    table = kv_tables.decode(rows)
    assert "| heads, batch x context | SDPA, us | `u4` | `u3` |" in table
    assert "| 32/8, 1 x 16k | 25.0 | 2.50, 50% | - |" in table
    assert "| 32/8, 8 x 16k | 25.0 | 2.50, 50% | - |" in table and "x 0k" not in table
    short = kv_tables.short(rows)
    assert "| tokens | 32/32 heads | 32/8 heads | 32/32 heads, and storing |" in short
    assert "| 64 | 2.50 | 2.50 | 2.50 | 2.23 |" in short  # (25 + 4) / (10 + 3)
    assert kv_tables.store(rows).endswith("| us | 4.0-5.0 | 2.0-3.0 |")


def test_tables_of_generate():
    row = {"weights": "bf16", "cache": "bf16", "batch": 1, "context": 65536, "gigabytes": 23.6,
           "cache_gigabytes": 8.6, "eager_graph_ms": 20.0, "generate_ms": 16.0,
           "tokens_per_second": 62.5, "captured_per_second": 65.0, "step_ms": 15.0,
           "parts_ms": {"attention": 9.0, "x": 0.0}}  # fmt: skip
    ratios = {"generate_ms": 2.0, "captured_ms": 2.5}
    ours = {**row, "weights": "vq-4", "cache": "u4", "speedup": ratios}
    exact = {key: row[key] for key in ("weights", "batch", "context", "gigabytes",
                                       "cache_gigabytes", "eager_graph_ms")}  # fmt: skip
    exact["cache"] = cuda_generate_kv.EXACT
    table = kv_tables.generate([row, exact, ours])
    assert "| `vq-4` | `u4` | 1 x 65,536 | 8.60 | 62 | 2.00 | 65 | 2.50 | 15.00 | 9.00 |" in table
    assert "| bf16, no mask | 1 x 65,536 | 8.60 | - | - | - | - | - | - | 20.00 |" in table


def test_tables_say_what_was_not_measured(monkeypatch):
    monkeypatch.setattr(tables, "read_record", lambda suite: None)
    text = tables.TABLES["results:cuda-attention"]()
    assert text == "Not measured yet: `python -m benchmarks cuda-attention`."
    record = make_record("cuda-attention", "c", {}, {"rows": decode_rows(4096)}, "r")
    monkeypatch.setattr(tables, "read_record", lambda suite: record)
    assert "Measured by `c`" in tables.TABLES["results:cuda-attention"]()
