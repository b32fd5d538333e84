"""Tables of the suites `cuda-peers` and `cuda-generate`, from the rows of their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .show import markdown_table

_Rows = Sequence[dict[str, Any]]


def peers(rows: _Rows) -> str:
    """Microseconds of peers and of ours, and the latency that is saved, at every shape."""
    rows = [row for row in rows if row["peer"] != "bf16"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    found = {
        (row["name"], row["peer"], row["tokens"], row["out_features"], row["in_features"]): row
        for row in rows
    }
    head = ["peer", "weights", "tokens", *(f"{n} x {k}" for n, k in shapes)]
    cells = []
    for name, peer, tokens in dict.fromkeys((r["name"], r["peer"], r["tokens"]) for r in rows):
        line = [peer, f"`{name}`", str(tokens)]
        for shape in shapes:
            key = (name, peer, tokens, *shape)
            row = found[key]
            saved = 1 - 1 / row["speedup"]
            line.append(f"{row['us']:.1f} / {row['ours_us']:.1f}, {saved:.1%}")
        cells.append(line)
    return markdown_table(head, cells)


def generate(rows: _Rows) -> str:
    """Tokens a second of a Llama-3-8B, and how many times those of bfloat16."""
    head = ["weights", "GB a token", "x less", "tokens/s of `generate`", "x bf16",
            "compiled step, ms", "x bf16", "ceiling", "eager graph, ms", "x bf16"]  # fmt: skip
    cells = []
    for row in rows:
        faster = row.get("speedup", {})
        ratio = {key: f"{value:.2f}" for key, value in faster.items()}
        cells.append(
            [_name(row), f"{row['gigabytes']:.2f}", ratio.get("bytes", "-"),
             f"{row['tokens_per_second']:.0f}", ratio.get("generate_ms", "-"),
             f"{row['step_ms']:.2f}", ratio.get("step_ms", "-"),
             f"{row['ceiling']:.2f}" if "ceiling" in row else "-",
             f"{row['eager_graph_ms']:.2f}", ratio.get("eager_graph_ms", "-")]
        )  # fmt: skip
    return markdown_table(head, cells)


def steps(rows: _Rows) -> str:
    """Where the milliseconds of a compiled step go."""
    most = {part: max(row["parts_ms"][part] for row in rows) for part in rows[0]["parts_ms"]}
    parts = sorted((part for part in most if most[part]), key=lambda part: -most[part])
    cells = [[_name(row), *(f"{row['parts_ms'][part]:.3f}" for part in parts)] for row in rows]
    return markdown_table(["ms of a step", *parts], cells)


def _name(row: dict[str, Any]) -> str:
    return row["name"] if row["name"] == "bf16" else f"`{row['name']}`"
