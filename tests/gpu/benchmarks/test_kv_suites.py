"""The suites that time coded caches run on a GPU."""

import pytest
from transformers import LlamaConfig

from benchmarks.cuda import attention as cuda_attention
from benchmarks.cuda import generate_kv as cuda_generate_kv


@pytest.mark.gpu
def test_cuda_attention():
    found = []
    _, results = cuda_attention.run(
        schemes=("u4", "cq-2"), quick=True, rounds=1, report=found.append
    )
    assert found == results["rows"]
    decode = [row for row in found if row["what"] == "decode"]
    for case in cuda_attention.QUICK:
        rows = {row["name"]: row for row in decode if row["context"] == case.context}
        peers = {name for name in rows if name.startswith("bf16 ")}
        assert peers and set(rows) == peers | {"u4", "cq-2"}
        for name in ("u4", "cq-2"):
            assert rows[name]["kernel"] == "cuda.vq_attention" and rows[name]["us"] > 0
            best = min(rows[peer]["us"] for peer in peers)
            assert rows[rows[name]["peer"]]["us"] == best and rows[name]["speedup"] > 0
            assert 0 < rows[name]["of_memory"] < 1
    turning = [row for row in found if row["what"] == "rotary"]
    assert {(row["name"], row["mean"]) for row in turning} == {
        ("u4", mean) for mean in cuda_attention.TURNING
    }
    assert all(row["of_plain"] > 0 and row["step_of_plain"] > 0 for row in turning)
    stores = [row for row in found if row["what"] == "store"]
    assert {row["name"] for row in stores} == {"bf16", "u4", "cq-2"}
    memory = {row["name"]: row["smaller"] for row in found if row["what"] == "memory"}
    assert memory["u4"] == pytest.approx(3.88, abs=0.01) and memory["cq-2"] == pytest.approx(8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first one of inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of inductor
def test_cuda_generate_kv():
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=2, num_key_value_heads=1,
        head_dim=128, intermediate_size=512, vocab_size=32000, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    _, results = cuda_generate_kv.run(config=config, cases=(cuda_generate_kv.Case(2, 16384),))
    rows = {(row["weights"], row["cache"]): row for row in results["rows"]}
    assert list(rows) == [("bf16", "bf16"), ("bf16", cuda_generate_kv.EXACT), ("bf16", "u4"),
                          ("vq-4", "u4")]  # fmt: skip
    dense, exact = rows["bf16", "bf16"], rows["bf16", cuda_generate_kv.EXACT]
    assert "generate_ms" not in exact and exact["eager_graph_ms"] > 0
    for weights in ("bf16", "vq-4"):
        row = rows[weights, "u4"]
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["generate_ms"])
        assert set(row["speedup"]) == {
            "generate_ms", "captured_ms", "step_ms", "eager_graph_ms", "gigabytes"
        }  # fmt: skip
        assert row["parts_ms"]["attention"] > 0
    assert rows["bf16", "u4"]["cache_gigabytes"] < dense["cache_gigabytes"] / 3
