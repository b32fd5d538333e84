"""Suite `cpu-calibrate`: minutes that calibrating a small model takes on a CPU.

A Llama of the shape of tinybooks-17m, with random weights on random tokens: the time depends on
shapes alone. The whole calibration is measured, after the model is loaded and the text tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig

from ..cuda.calibrate import calibrated

SCHEMES = ("vq-2",)
SEQUENCES, CONTEXT = 64, 1024


def tinybooks_17m(layers: int = 8) -> LlamaConfig:
    """Its shape."""
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1024,
        vocab_size=8192,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def run(
    *,
    threads: Sequence[int] = (1, 2),
    rounds: int = 1,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calibrate with each number of threads; `report` gets each row when it is known.

    Args:
        rounds: of which the fastest counts.

    Returns:
        (settings, results) of the record.
    """
    rows, before = [], torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for name in SCHEMES:
                found = [
                    calibrated(tinybooks_17m(), name, "cpu", SEQUENCES, CONTEXT)
                    for _ in range(rounds)
                ]
                row = {"name": name, "threads": count, "seconds": min(r["seconds"] for r in found)}
                rows.append(row)
                report(row)
    finally:
        torch.set_num_threads(before)
    settings = {"sequences": SEQUENCES, "context": CONTEXT, "dtype": "bfloat16", "rounds": rounds}
    return settings, {"rows": rows}
