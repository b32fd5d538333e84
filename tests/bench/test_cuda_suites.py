"""The suite that times CUDA kernels runs, and says what it needs."""

import pytest
import torch

from hf_vq.bench import cuda_linear
from hf_vq.errors import VQBackendError


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(VQBackendError, match="needs a CUDA device"):
        cuda_linear.run()


@pytest.mark.gpu
def test_cuda_linear(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    monkeypatch.setenv("HF_VQ_BACKEND", "cuda")
    _, results = cuda_linear.run(
        schemes=("vq-4", "aqlm-2"), shapes=((256, 256),), tokens=(1, 64), rounds=1
    )
    decode = {row["name"]: row for row in results["rows"] if row["what"] == "decode"}
    assert set(decode) == {"write", "read and write", "vq-4", "aqlm-2"}
    assert set(decode["vq-4"]["of_ceiling"]) == {"write", "read and write"}
    linear = [row for row in results["rows"] if row["what"] == "linear"]
    assert [row["tokens"] for row in linear if row["name"] == "bf16"] == [1, 64]
    ours = [row for row in linear if row["name"] == "vq-4"]
    assert all(row["kernel"] == "cuda.linear" and row["us"] > 0 for row in ours)
    assert set(ours[0]["speedup"]) == {"bf16", "reference"}
