"""Tables of `finetune`, and the sequences that it trains on."""

from benchmarks.__main__ import main
from benchmarks.fine_tuning import table, worker
from hf_vq.evaluation.record import make_record


def row(name, loss, seconds, peak, **more):
    return {"name": name, "loss_before": 2.5, "loss_after": loss, "cpu_seconds": seconds,
            "imports_bytes": 500_000_000, "peak_bytes": peak, "weights_bytes": 200_000_000,
            **more}  # fmt: skip


def record():
    settings = {"model": "small", "steps": 100, "sequence": 128, "rank": 16}
    merged = {"scheme_kld": 0.0881, "merged_kld": 0.0212, "merge_cpu_seconds": 31.6}
    rows = [row("vq-4", 1.515, 3.0, 1_000_000_000, **merged), row("bf16", 1.5, 6.0, 1_300_000_000)]
    return make_record("finetune", "python -m benchmarks finetune", settings, {"rows": rows}, "a1")


def test_training_is_compared_with_16_bits():
    lines = table.training([record()]).splitlines()
    assert lines[2] == "| small | `vq-4` | 2.500 | 1.515 | 0.50 | 500 | 0.62 |"
    assert lines[3] == "| small | bf16 | 2.500 | 1.500 | 1.00 | 800 | 1.00 |"
    assert "200 MB of bf16's 800 MB; if they took no memory, 0.75 of it would stay." in lines[5]
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
