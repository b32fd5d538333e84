"""Tables of the suites `cpu-linear`, `cpu-w4a8`, `cpu-attention` and `cpu-generate`, from their
records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

_Rows = Sequence[dict[str, Any]]
_PEERS = {
    "read": "only reading",
    "int4": "torch int4 (groups of 128)",
    "bf16": "torch bfloat16",
    "fp32": "torch float32",
    "q4_K": "llama.cpp Q4_K",
    "aqlm": "package `aqlm`, 2 codebooks of 8 bits",
}
_WHOLE, _GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_W4A8_PEERS = ("int8 x int8", "bf16")
_PARTS = {"ms_layers": "- its linear layers alone", "ms_rest": "- with layers that do nothing"}


def linear(rows: _Rows) -> str:
    """One token through a linear layer on the CPU, one thread, against PyTorch."""
    rows = [row for row in rows if row["threads"] == 1 and row["name"] != "arithmetic"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    head = ["weights"]
    for out_features, in_features in shapes:
        head += [f"{out_features} x {in_features}, us", "x int4", "x bf16"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = []
    for name in names:
        line = [_PEERS.get(name, f"`{name}`")]
        for shape in shapes:
            (row,) = (
                r
                for r in rows
                if r["name"] == name and (r["out_features"], r["in_features"]) == shape
            )
            faster = row.get("speedup", {})
            time = f"{row['us']:.0f}"
            if "us_cached" in row:
                time += f" ({row['us_cached']:.0f})"
            line += [time, *(_ratio(faster.get(peer)) for peer in ("int4", "bf16"))]
        cells.append(line)
    return markdown_table(head, cells)


def w4a8(rows: _Rows) -> str:
    """Linear layers of 4-bit weights and 8-bit inputs on the CPU, one thread, against PyTorch."""
    ours = [row for row in rows if row["threads"] == 1 and "speedup" in row]
    grouped = [row for row in ours if row["name"] == _GROUPED]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in ours))
    head = ["tokens"]
    for out_features, in_features in shapes:
        head += [f"{out_features} x {in_features}, us", *(f"x {peer}" for peer in _W4A8_PEERS)]
    found: dict[int, list[str]] = {}
    for shape in shapes:
        for row in grouped:
            if (row["out_features"], row["in_features"]) == shape:
                found.setdefault(row["tokens"], []).extend(
                    [f"{row['us']:.0f}", *(_ratio(row["speedup"][peer]) for peer in _W4A8_PEERS)]
                )
    keys = ("out_features", "in_features", "tokens")
    whole = {tuple(row[k] for k in keys): row["us"] for row in ours if row["name"] == _WHOLE}
    times = [whole[tuple(row[k] for k in keys)] / row["us"] for row in grouped]
    table = markdown_table(head, [[str(tokens), *line] for tokens, line in found.items()])
    said = f"takes {min(times):.2f} to {max(times):.2f} times as long."
    return f"{table}\n\n`{_GROUPED}`; `{_WHOLE}` {said}"


def attention(rows: _Rows) -> str:
    """One token's attention on the CPU, one thread, per key/value head."""
    steps = [row for row in rows if row["what"] == "step" and row["name"] != "arithmetic"]
    first = steps[0]["threads"]
    groups = sorted({row["group"] for row in steps})
    head = ["KV cache"]
    for group in groups:
        head += [
            f"us, {group} query heads",
            "x bmm fp32",
            "x SDPA fp32",
            "x SDPA bf16",
            "x ORT int8",
        ]
    peers = ("torch bmm fp32", "torch SDPA fp32", "torch SDPA bf16", "onnxruntime int8")
    names = [row["name"] for row in steps if row["group"] == groups[0] and row["threads"] == first]
    cells = []
    for name in names:
        line = [_PEERS.get(name, name)]
        for group in groups:
            (row,) = (
                r for r in steps if (r["name"], r["group"], r["threads"]) == (name, group, first)
            )
            faster = row.get("speedup", {})
            line += [f"{row['us']:.0f}", *(_ratio(faster.get(peer)) for peer in peers)]
        cells.append(line)
    return markdown_table(head, cells)


def generate(rows: _Rows) -> str:
    """Milliseconds a token of generate, one thread; below ours, parts that were timed alone."""
    columns = list(dict.fromkeys((row["kv_heads"], row["context"]) for row in rows))
    head = ["ms a token"]
    head += [f"{heads} kv heads, context {context:,}" for heads, context in columns]
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        for part, label in (("ms", name), *_PARTS.items()):
            by_column = {(r["kv_heads"], r["context"]): r[part] for r in own if part in r}
            if by_column:
                times = (f"{by_column[c]:.0f}" if c in by_column else "-" for c in columns)
                cells.append([label, *times])
    return markdown_table(head, cells)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def calibrate(rows: _Rows) -> str:
    """Seconds of calibrating a small model."""
    cells = [[f"`{row['name']}`", str(row["threads"]), f"{row['seconds']:.0f}"] for row in rows]
    return markdown_table(["weights", "threads", "seconds"], cells)
