"""The suite `serve` answers all requests, with floats and with codes."""

import pytest
import torch

from benchmarks.serving import serve
from hf_vq.errors import VQBackendError
from hf_vq.serving.continuous_batching import objection

pytestmark = pytest.mark.skipif(objection() is not None, reason=str(objection()))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """The case of a GPU is large, and so are texts that are compared."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(serve.same_text, "NEW", 4)


def test_rows_and_table():
    seen = []
    settings, results = serve.run(
        pairs=("dense/floats", "dense/u4"), requests=(1, 2), prompt=20, new=3, report=seen.append
    )
    rows = results["rows"]
    assert seen == rows and settings["prompt"] == 20
    assert [(row["kv"], row["requests"]) for row in rows] == [
        ("floats", 1), ("floats", 2), ("u4", 1), ("u4", 2),
    ]  # fmt: skip
    assert [row["attention"] for row in rows] == ["sdpa", "sdpa", "vq_paged", "vq_paged"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert rows[3]["capacity_tokens"] == rows[1]["capacity_tokens"] == 3 * serve.PAGE
    floats, codes = rows[1]["pages_gb"], rows[3]["pages_gb"]
    assert floats / codes == pytest.approx(32 / 4.125, rel=0.01)  # float32, head_dim 128
    assert "| `float32` | `floats` | `sdpa` | 768 |" in serve.table(rows)
    assert "| `float32` | `u4` | `vq_paged` | 768 |" in serve.table(rows)


def test_a_budget_that_is_too_small_is_a_row():
    _, results = serve.run(pairs=("dense/u4",), requests=(1,), memory_gb=0.01, prompt=4, new=2)
    (row,) = results["rows"]
    assert "failed" in row and "tokens_per_second" not in row
    assert "| - | - | - |" in serve.table(results["rows"])


def test_other_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(serve, "objection", lambda: "it has none")
    with pytest.raises(VQBackendError, match="it has none"):
        serve.run()


def test_as_many_as_fit(monkeypatch):
    monkeypatch.setattr(serve, "_fitting", lambda model, scheme, length, memory: 3)
    _, results = serve.run(pairs=("dense/u4",), requests=(1, serve.ALL), prompt=20, new=3)
    one, every = results["rows"]
    assert (one["all"], every["all"], every["requests"]) == (False, True, 3)
    found = serve.table(results["rows"])
    assert "| 1 requests | as many as fit | reading alone | same text |" in found
    assert f" (3) | - | {every['text']['same_text']} of 3, " in found
