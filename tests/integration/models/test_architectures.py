"""Some classes of `scripts/check_architectures`, which checks all that Transformers can build, and
its record."""

import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import transformers

from benchmarks.records import read_record
from hf_vq.evaluation.record import read

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_architectures"
CLASSES = (
    "BartForSequenceClassification", "BloomForCausalLM", "BltForCausalLM", "FalconForCausalLM",
    "MambaForCausalLM", "RwkvForCausalLM", "LongT5ForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration", "Llama4ForCausalLM", "Siglip2Model",
    "Qwen2VLForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration",
    "WavLMForCTC", "ViTForImageClassification", "RobertaForSequenceClassification",
)  # fmt: skip


@pytest.mark.slow
def test_some_classes(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.jsonl"
    arguments = ["--out", str(record), "--processes", "1", "--only", *CLASSES]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    found = runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = read(record)["results"]["rows"]
    assert {row["class"]: row["outcome"] for row in rows} == dict.fromkeys(CLASSES, "run")
    assert all(0 < row["change"] < 0.5 for row in rows), rows
    inputs = {row["class"]: row["inputs"] for row in rows}
    assert {"image_grid_thw", "input_ids"} < {*inputs["Qwen2VLForConditionalGeneration"]}
    assert {"input_ids", "pixel_values", "spatial_shapes"} < {*inputs["Siglip2Model"]}
    assert f'"run": {len(CLASSES)}' in capsys.readouterr().out
    recorded = read_record("architectures")
    if recorded["versions"]["transformers"] == transformers.__version__:
        names = {row["class"] for row in recorded["results"]["rows"]}
        assert names == {*found["classes"]()}


def test_nearly_all_classes_run():
    rows = read_record("architectures")["results"]["rows"]
    count = Counter(row["outcome"] for row in rows)
    built = len(rows) - count["not built"] - count["no linear layer"]
    assert count["run"] >= 0.95 * built and built >= 0.95 * len(rows)
    assert all(row.get("why") or row.get("not run") for row in rows if row["outcome"] != "run")
