"""Tables of the suites `cpu-linear`, `cpu-w4a8`, `cpu-attention` and `cpu-models`, from their
records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .provenance import sources
from .ranges import percents, span

_Rows = Sequence[dict[str, Any]]
_PEERS = {
    "read": "only reading",
    "int4": "torch int4 (groups of 128)",
    "bf16": "torch bfloat16",
    "fp32": "torch float32",
    "q4_K": "llama.cpp Q4_K",
    "aqlm": "package `aqlm`, 2 codebooks of 8 bits",
}
_SCALAR = re.compile(r"turboquant-(\d)(?:\+(\d))?")
_WHOLE, _GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_W4A8_PEERS = ("int8 x int8", "bf16")


def linear(rows: _Rows) -> str:
    """One token through a linear layer on the CPU, one thread, against PyTorch.

    Of codes of single weights those of 4 bits; `scalars` has all.
    """
    rows = [
        row for row in rows
        if row["threads"] == 1 and row["name"] != "arithmetic"
        and (row["name"] == "turboquant-4" or not _SCALAR.fullmatch(row["name"]))
    ]  # fmt: skip
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    head = ["weights", *(f"{n} x {k}, us" for n, k in shapes), "x int4", "x bf16", "of the limit"]
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        here = [row for row in rows if row["name"] == name]
        us = {(row["out_features"], row["in_features"]): row["us"] for row in here}
        cells.append([
            _PEERS.get(name, f"`{name}`"), *(f"{us[shape]:.0f}" for shape in shapes),
            *(_range(row["speedup"][peer] for row in here if peer in row.get("speedup", ()))
              for peer in ("int4", "bf16")),
            percents(busy(row) for row in here if "us_cached" in row),
        ])  # fmt: skip
    return markdown_table(head, cells)


def scalars(rows: _Rows) -> str:
    """The same of codes of single weights, by the bits of both passes: speedups over bfloat16."""
    lines: dict[str, dict[int, list[float]]] = {"one pass": {}, "two nested passes": {}}
    for row in rows:
        found = _SCALAR.fullmatch(row["name"])
        if found and row["threads"] == 1:
            first, second = (int(bits or 0) for bits in found.groups())
            line = lines["two nested passes" if second else "one pass"]
            line.setdefault(first + second, []).append(row["speedup"]["bf16"])
    bits = range(1, 9)
    cells = [[name, *(_range(line.get(n, ())) for n in bits)] for name, line in lines.items()]
    return markdown_table(["bits, x bf16", *map(str, bits)], cells)


def busy(row: dict[str, Any]) -> float:
    """The share of its time that a kernel needs to read its codes, or to compute on them; 0 where
    neither is known."""
    return max(row.get("of_bandwidth", 0.0), row.get("us_cached", 0.0) / row["us"])


def _range(values: Iterable[float]) -> str:
    return span(values, "{:.1f}".format)


def w4a8(rows: _Rows) -> str:
    """Linear layers of 4-bit weights and 8-bit inputs on the CPU, one thread, against PyTorch, over
    all sizes."""
    ours = [row for row in rows if row["threads"] == 1 and "speedup" in row]
    grouped = [row for row in ours if row["name"] == _GROUPED]
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in grouped):
        here = [row for row in grouped if row["tokens"] == tokens]
        times = span((row["us"] for row in here), "{:.0f}".format)
        faster = (_range(row["speedup"][peer] for row in here) for peer in _W4A8_PEERS)
        cells.append([str(tokens), times, *faster])
    keys = ("out_features", "in_features", "tokens")
    whole = {tuple(row[k] for k in keys): row["us"] for row in ours if row["name"] == _WHOLE}
    slower = [whole[tuple(row[k] for k in keys)] / row["us"] for row in grouped]
    table = markdown_table(["tokens", "us", *(f"x {peer}" for peer in _W4A8_PEERS)], cells)
    said = f"takes {min(slower):.2f} to {max(slower):.2f} times as long."
    return f"{table}\n\n`{_GROUPED}`; `{_WHOLE}` {said}"


def attention(rows: _Rows, avx2: _Rows) -> str:
    """Microseconds of one token's attention, one thread, per key/value head.

    Args:
        rows: of the suite with the instructions of the processor.
        avx2: of the suite with AVX2 alone.
    """
    runs = [_steps(rows), _steps(avx2)]
    cells = []
    for name in dict.fromkeys(name for name, _ in runs[0]):
        line = [_PEERS.get(name, name)]
        for steps in runs:
            for group in sorted({group for _, group in steps}):
                line.append(f"{steps[name, group]['us']:.0f}")
        cells.append(line)
    head = ["KV cache"]
    for label, steps in zip(("", "AVX2, "), runs, strict=True):
        for group in sorted({group for _, group in steps}):
            head.append(f"{label}{group} query head{'s' * (group > 1)}")
    return markdown_table(head, cells)


def _steps(rows: _Rows) -> dict[tuple[str, int], dict[str, Any]]:
    """Whole steps by name and number of query heads, of the least number of threads."""
    steps = [row for row in rows if row["what"] == "step" and row["name"] != "arithmetic"]
    first = steps[0]["threads"]
    return {(row["name"], row["group"]): row for row in steps if row["threads"] == first}


def models(records: Sequence[dict[str, Any]]) -> str:
    """Generated tokens of real models by one thread, from the records of all of them.

    Columns: milliseconds a token, behind so many in the cache; tokens per second of a prompt.
    """
    head, columns = ["one thread"], []
    for record in records:
        rows = [row for row in record["results"]["rows"] if row["threads"] == 1]
        depths = list(dict.fromkeys(row["depth"] for row in rows))
        settings = record["settings"]
        head += [f"{settings['model']} {settings['isa']} {depth:,}" for depth in depths]
        head += ["prompt"]
        found = {(row["name"], row["depth"]): row for row in rows}
        columns += [(found, depth, "ms") for depth in depths]
        columns += [(found, depths[0], "prompt_tokens_per_second")]
    names = dict.fromkeys(name for found, _, _ in columns for name, _ in found)
    cells = [
        [name, *(_shown(found, name, depth, key) for found, depth, key in columns)]
        for name in names
    ]
    return f"{markdown_table(head, cells)}\n\n{sources(records)}"


def _shown(found: dict[Any, dict[str, Any]], name: str, depth: int, key: str) -> str:
    row = found.get((name, depth), {})
    return f"{row[key]:.3g}" if key in row else "-"


def calibrate(rows: _Rows) -> str:
    """Seconds of calibrating a small model."""
    cells = [[f"`{row['name']}`", str(row["threads"]), f"{row['seconds']:.0f}"] for row in rows]
    return markdown_table(["weights", "threads", "seconds"], cells)
