"""Some classes of `scripts/check_architectures`, which checks all that Transformers can build."""

import runpy
import sys
from pathlib import Path

import pytest

from hf_vq.evaluation.record import read

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_architectures"
CLASSES = (
    "BloomForCausalLM", "FalconForCausalLM", "MambaForCausalLM", "RwkvForCausalLM",
    "LongT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    "Llama4ForCausalLM", "Qwen3OmniMoeThinkerForConditionalGeneration", "WavLMForCTC",
    "ViTForImageClassification", "RobertaForSequenceClassification",
)  # fmt: skip


@pytest.mark.slow
def test_some_classes(tmp_path, monkeypatch, capsys):
    record = tmp_path / "record.jsonl"
    arguments = ["--out", str(record), "--processes", "1", "--only", *CLASSES]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = read(record)["results"]["rows"]
    assert {row["class"]: row["outcome"] for row in rows} == dict.fromkeys(CLASSES, "run")
    assert all(0 < row["change"] < 0.5 for row in rows), rows
    assert '"run": 11' in capsys.readouterr().out
