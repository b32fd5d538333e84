"""Tables of `finetune`, and the sequences that it trains on."""

import argparse
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.fine_tuning import suite, table, worker
from hf_vq.evaluation.record import make_record


def row(name, loss, seconds, peak, **more):
    return {"name": name, "loss_before": 2.5, "loss_after": loss, "cpu_seconds": seconds,
            "imports_bytes": 500_000_000, "peak_bytes": peak,
            **{"weights_bytes": 200_000_000, **more}}  # fmt: skip


def record():
    settings = {"model": "small", "steps": 100, "sequence": 128, "rank": 16}
    merged = {"scheme_kld": 0.0881, "merged_kld": 0.0212, "merge_cpu_seconds": 31.6}
    merged["weights_bytes"] = 60_000_000
    rows = [row("vq-4", 1.515, 3.0, 1_000_000_000, **merged), row("bf16", 1.5, 6.0, 1_300_000_000)]
    return make_record("finetune", "python -m benchmarks finetune", settings, {"rows": rows}, "a1")


def test_training_is_compared_with_16_bits():
    lines = table.training([record()]).splitlines()
    assert lines[2] == "| small | `vq-4` | 2.500 | 1.515 | 0.50 | 500 | 0.62 |"
    assert lines[3] == "| small | bf16 | 2.500 | 1.500 | 1.00 | 800 | 1.00 |"
    assert "200 MB of bf16's 800 MB: without any, 0.75 would stay." in lines[5]
    assert lines[-1].startswith("Measured by `python -m benchmarks finetune`")


def test_merging():
    assert table.merging([record()]).splitlines()[2] == "| small | `vq-4` | 0.0881 | 0.0212 | 32 |"


def test_rows_become_equal_sequences():
    def tokenizer(text):
        return {"input_ids": [len(word) for word in text.split()]}

    tokenizer.eos_token_id = 0
    rows = [{"question": "a bb", "answer": "ccc"}, {"question": "dddd", "answer": "e"}]
    found = worker.sequences(tokenizer, rows, 3)
    assert [one["input_ids"] for one in found] == [[1, 2, 3], [0, 4, 1]]
    assert all(one["labels"] == one["input_ids"] for one in found)


def test_memory_is_of_this_process():
    found = worker.memory()
    assert 1 << 20 < found["VmRSS"] <= found["VmHWM"]


def test_methods_without_16_bits_are_refused(capsys):
    """Before anything is made: the others are compared with it."""
    words = ["finetune", "model", "--data", "data", "--methods", "vq-4"]
    assert main(words) == 2
    assert "--methods needs bf16" in capsys.readouterr().err


def test_what_is_held_out_is_not_trained_on(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"question": "{i}", "answer": ""}}\n' for i in range(30)))
    rows, last = worker.read_data(str(path), 2)
    assert [row["question"] for row in rows + last] == [str(i) for i in range(30)]
    assert len(last) == 20


def test_codes_are_calibrated_on_what_is_trained_on(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "q{i}", "answer": "a{i}"}}\n' for i in range(12)))
    options = dict(data=data, steps=1, tokens=8, held_out=1, rank=1, seed=0, threads=1, merge=False)
    args = argparse.Namespace(model="model", **options)
    seen = []

    def run(command, check):
        text = command[command.index("--text") + 1] if "--text" in command else None
        seen.append((command[3], command[command.index("--scheme") + 1]))
        seen.append(text and Path(text).read_text())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    workers = {
        method: suite._Worker(method, args, tmp_path)
        for method in ("vq-4", "vq-4+loftq", "vq-4+calibrated", "nf4")
    }
    codes = {method: each.options["codes"] for method, each in workers.items()}
    assert codes["vq-4+loftq"] == codes["vq-4"] == str(tmp_path / "vq-4")
    for method in ("vq-4", "vq-4+calibrated", "nf4"):
        workers[method].make_codes()
    text = "q0\na0\n\nq1\na1"
    assert seen == [("quantize", "vq-4"), None, ("calibrate", "vq-4"), text]


def test_nf4_has_gradients_after_it_was_evaluated():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(
        64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    ).to("cpu")
    model = torch.nn.Sequential(layer)
    worker.keep_gradients(model)
    with torch.no_grad():
        model.eval()(torch.ones(2, 64, dtype=torch.bfloat16))
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    model.train()(x).sum().backward()
    assert x.grad is not None and float(x.grad.abs().max()) > 0
