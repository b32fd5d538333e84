"""Suite `serve-vllm`: rows of engines that ran, and of one that did not."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving import serve, vllm_engine

ROW = {
    "weights": "vq-4", "kv": "u4", "capacity_tokens": 115200, "ms_between_tokens": {"1": 7.5},
    "requests": 75, "tokens_per_second": 1234.5,
}  # fmt: skip
FAILED = {"weights": "dense", "kv": "floats", "failed": "no memory"}


def test_an_engine_that_ends_says_why(tmp_path: Path, capfd) -> None:
    """Without vLLM, or without a model."""
    job = {"weights": "vq-4", "kv": "u4", "folder": str(tmp_path / "none"), "prompt": 8, "new": 8}
    with vllm_engine._engine(job | {"left": 1 << 20, "memory": 1.0}, tmp_path / "log") as engine:
        said = vllm_engine._said(engine)
    log = (tmp_path / "log").read_text().rstrip()
    assert said == {"failed": log.splitlines()[-1]} and "Error" in log
    assert log.splitlines()[-1] in capfd.readouterr().err


def test_table_of_what_ran() -> None:
    lines = vllm_engine.table([FAILED, ROW]).splitlines()
    assert lines[0] == (
        "| weights | KV cache | 1 request, ms | tokens that fit | as many as fit, tokens/s |"
    )
    assert lines[2:] == [
        "| `dense` | `floats` | - | - | - |",
        "| `vq-4` | `u4` | 7.50 | 115,200 | 1,234 (75) |",
    ]
    assert "`dense`" in vllm_engine.table([FAILED])


def test_a_case_with_other_values() -> None:
    case = serve.CASES["cpu"]
    other = case.but(prompt=7, new=None, memory_gb=0.0)
    assert (other.prompt, other.new, other.memory_gb) == (7, case.new, 0.0)
    assert other.settings["prompt"] == 7 and other.settings["hidden_size"] == 512
