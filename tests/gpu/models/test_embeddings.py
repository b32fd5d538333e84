"""Embeddings and output heads of codes on a GPU: rows and products of the decoded matrix."""

import pytest
import torch
from torch import nn

import hf_vq
from hf_vq.cache import VQCache
from hf_vq.formats import coded_rows
from hf_vq.hf.embeddings import encode
from hf_vq.nn import VQLinear
from hf_vq.nn.embedding import VQEmbedding, VQTiedHead
from tests.fixtures.generation import build, greedy, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", coded_rows.KINDS)
@pytest.mark.parametrize("width", [64, 576])
def test_rows_and_products(kind, width):
    dense = nn.Embedding(500, width, dtype=torch.bfloat16)
    embedding = VQEmbedding(dense, kind, encode(dense.weight, kind, "embed"))
    rows = embedding.decoded(torch.float32).cuda()
    embedding.cuda()
    ids = torch.randint(0, 500, (3, 5), device="cuda")
    torch.testing.assert_close(embedding(ids).float(), rows[ids], rtol=2**-8, atol=1e-6)
    head = VQTiedHead(embedding)
    for tokens in (1, 7, 40):
        x = torch.randn(2, tokens, width, device="cuda", dtype=torch.bfloat16)
        y, expected = head(x).double(), x.double() @ rows.double().T
        assert (y - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-6"])
@pytest.mark.parametrize("size", [(50257, 768), (128256, 1024)])  # an odd number of rows, too
def test_an_untied_head(size, scheme):
    dense = nn.Sequential(nn.Linear(size[1], size[0], bias=False)).cuda().bfloat16()
    (head,) = hf_vq.quantize_model(dense, hf_vq.VQConfig(scheme, activations=None))
    rows = head.decoded()
    for tokens in (1, 7, 40, 300):
        x = torch.randn(tokens, size[1], device="cuda", dtype=torch.bfloat16)
        y, expected = head(x).double(), x.double() @ rows.double().T
        assert (y - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graphs_of_a_model_whose_head_is_codes():
    """`generate` with a static cache, which replays graphs, against eager steps."""
    config = hf_vq.VQConfig("turboquant-8", layers={"lm_head": "vq-4"}, activations=None)
    model = hf_vq.quantize_model(build("gqa", "sdpa"), config).cuda()
    assert isinstance(model.lm_head, VQLinear)
    ids = prompt(30).cuda()
    caches = [VQCache(model.config, max_cache_len=96, window=8) for _ in range(2)]
    wanted = greedy(model, ids, caches[0], 40, disable_compile=True)
    assert torch.equal(greedy(model, ids, caches[1], 40), wanted)
