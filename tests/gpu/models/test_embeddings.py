"""Embeddings of codes on a GPU: rows and products are those of the decoded matrix."""

import pytest
import torch
from torch import nn

from hf_vq.formats import coded_rows
from hf_vq.hf.embeddings import encode
from hf_vq.nn.embedding import VQEmbedding, VQTiedHead

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
