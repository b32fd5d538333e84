"""The suite that times CUDA kernels runs, and says what it needs."""

import pytest
import torch

from hf_vq.bench import cuda_linear, cuda_tune
from hf_vq.bench.record import read_record
from hf_vq.codegen import tuned
from hf_vq.codegen.choose_linear import LinearProblem, choose
from hf_vq.codegen.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError
from hf_vq.formats import weight_scheme


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(VQBackendError, match="needs a CUDA device"):
        cuda_linear.run()
    with pytest.raises(VQBackendError, match="needs a CUDA device"):
        cuda_tune.run()


@pytest.mark.gpu
def test_cuda_linear(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    _, results = cuda_linear.run(
        schemes=("vq-4", "aqlm-2"), shapes=((256, 256),), tokens=(1, 64), rounds=1
    )
    decode = {row["name"]: row for row in results["rows"] if row["what"] == "decode"}
    assert set(decode) == {"write", "read and write", "vq-4", "aqlm-2"}
    assert set(decode["vq-4"]["of_ceiling"]) == {"write", "read and write"}
    linear = [row for row in results["rows"] if row["what"] == "linear"]
    assert [row["tokens"] for row in linear if row["name"] == "bf16"] == [1, 64]
    ours = [row for row in linear if row["name"] == "vq-4"]
    assert [row["kernel"] for row in ours] == ["cuda.fused_linear"] * 2
    assert all(row["us"] > 0 for row in ours)
    assert set(ours[0]["speedup"]) == {"bf16", "int4 tinygemm"}
    mechanisms = [row for row in results["rows"] if row["what"] == "mechanism"]
    assert {"chosen", "no overlapping launches"} <= {row["plan"] for row in mechanisms}
    assert {row["name"] for row in results["rows"] if row["what"] == "host"} == {
        "bf16", "vq-4", "aqlm-2"
    }  # fmt: skip


@pytest.mark.gpu
def test_what_was_measured_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_VQ_STORE", str(tmp_path))
    tuned._on_disk.cache_clear()
    monkeypatch.setattr(cuda_tune, "PLANS", 3)
    rows = []
    path = cuda_tune.run(
        schemes=("vq-2",), shapes=((272, 512),), tokens=(1, 16), rounds=1, report=rows.append
    )
    assert path.parent == tmp_path and len(rows) == 2
    choose.cache_clear()
    for row, tokens in zip(rows, (1, 16), strict=True):
        problem = LinearProblem(
            weight_scheme("vq-2"), tokens, 272, 512, Dtype.FLOAT16, device_arch(0)
        )
        assert tuned.knobs(choose(problem)) == row["knobs"] == tuned.find(problem)
    tuned._on_disk.cache_clear()
    choose.cache_clear()


def test_what_the_record_promises():
    """What README, CHANGELOG and docs/cuda.md say of an H200."""
    rows = read_record("cuda-linear")["results"]["rows"]
    fast = {"vq-4", "vq-3", "vq-2", "turboquant-4", "quip-sharp-2", "aqlm-2"}
    few = [row for row in rows if row["what"] == "linear" and row["tokens"] <= 16]
    ours = [row for row in few if row["name"] in fast]
    assert {row["name"] for row in ours} == fast
    assert all(row["speedup"]["bf16"] > 1.2 for row in ours)
    assert all(row["kernel"] == "cuda.fused_linear" for row in ours)
    without = {row["plan"]: [] for row in rows if row["what"] == "mechanism"}
    for row in rows:
        if row["what"] == "mechanism":
            without[row["plan"]].append(row["times chosen"])
    assert min(without["one copy of the codebook (VQ-LLM)"]) > 1.2
    assert min(without["no overlapping launches"]) > 1
