"""The committed records are of whole runs and say what made them. No test judges their numbers."""

import pytest

from benchmarks.quality.weights import MEASURED
from benchmarks.records import read_record


def rows(suite: str) -> list[dict]:
    record = read_record(suite)
    assert record is not None
    return record["results"]["rows"]


def test_cpu_records_have_all_their_peers():
    """A library that was not installed is a peer that no table shows."""
    layers = {row["name"] for row in rows("cpu-linear")}
    assert {"int4", "bf16", "fp32", "q4_K", "read", "aqlm"} <= layers
    assert "onnxruntime int8" in {row["name"] for row in rows("cpu-attention")}
    generated = rows("cpu-generate")
    cases = {(row["kv_heads"], row["context"]) for row in generated}
    for name in ("bf16 sdpa", "llama.cpp Q4_0, f16 cache"):
        found = {(r["kv_heads"], r["context"]) for r in generated if r["name"] == name}
        assert found == cases, name


@pytest.mark.parametrize(
    "suite", ["quality-weights", "quality-kv", "quality-kv-calibrated", "demo"]
)
def test_a_record_says_what_made_it(suite):
    record = read_record(suite)
    assert record is not None
    assert record["revision"] and record["date"]
    assert record["versions"]["hf-vq"][0].isdigit()
    command = f"{suite} MODEL_DIR --text TEXT"
    if "calibration_text" in record["settings"]:
        command += " --calibration TEXT"
    command = "hf-vq demo" if suite == "demo" else command
    found = record["command"].removesuffix(" --device-map cuda")
    found = found.removesuffix(f" --kinds {' '.join(MEASURED)}")
    assert found.endswith(command), "the tables show whole runs only"
