"""The two tables of speed in README.md, each a few rows of a record that a page shows whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

_Rows = Sequence[dict[str, Any]]
_CPU = {
    "vq-4 + u4": "`vq-4` + `u4`",
    "turboquant-4 + nomad-u4": "`turboquant-4` + `nomad-u4`",
    "bf16 eager": "Transformers, bf16",
    "llama.cpp Q4_0, f16 cache": "llama.cpp Q4_0, f16 cache",
    "llama.cpp Q4_0, q4_0 cache, flash": "llama.cpp Q4_0, q4_0 cache, flash",
}


def gpu(rows: _Rows) -> str:
    """Bytes and tokens a second of a generated token, from the record of `cuda-generate`."""
    head = ["weights", "KV cache", "GB of weights per token", "tokens/s"]
    head.append("tokens/s, `hf_vq.capture`")
    found = {(row["name"], row["cache"]): row for row in rows}
    cells = []
    for name, cache in (("bf16", "bf16"), ("vq-4", "u4"), ("vq-2", "u4")):
        row = found[name, cache]
        cells.append(
            [_code(name), _code(cache), f"{row['gigabytes']:.1f}",
             f"{row['tokens_per_second']:.0f}", f"{1e3 / row['captured_ms']:.0f}"]
        )  # fmt: skip
    return markdown_table(head, cells)


def cpu(rows: _Rows) -> str:
    """Milliseconds of a generated token, from the record of `cpu-generate`."""
    columns = list(dict.fromkeys((row["kv_heads"], row["context"]) for row in rows))
    found = {(row["name"], (row["kv_heads"], row["context"])): row["ms"] for row in rows}
    head = [
        "ms a token",
        *(f"{heads} kv heads, context {context:,}" for heads, context in columns),
    ]
    cells = [
        [label, *(f"{found[name, at]:.0f}" if (name, at) in found else "-" for at in columns)]
        for name, label in _CPU.items()
    ]
    return markdown_table(head, cells)


def _code(name: str) -> str:
    return name if name == "bf16" else f"`{name}`"
