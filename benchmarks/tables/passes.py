"""Tables of the suites `quality-passes`, `cuda-passes` and `cuda-offload`, from their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

from .ranges import ratios, span

_Rows = Sequence[dict[str, Any]]


def quality(rows: _Rows) -> str:
    """Quality of two passes, and of the first one alone."""
    head = ["weights", "bits per weight", "KLD", "99th percentile", "perplexity, %"]
    cells = []
    for row in rows:
        first = row["name"].removeprefix("first pass of ")
        name = f"`{first}`" if first == row["name"] else f"`{first}`, the first pass alone"
        cells.append([
            name, f"{row['bits_per_weight']:.3f}", significant(row["kld"]),
            significant(row["kld_p99"]), f"{row['change']:+.2f}",
        ])  # fmt: skip
    return markdown_table(head, cells)


def kernels(rows: _Rows) -> str:
    """Microseconds of two nested passes by the CUDA kernel, over all sizes, and how others compare
    with it."""
    cells = []
    for name, tokens in dict.fromkeys((row["name"], row["tokens"]) for row in rows):
        here = [row for row in rows if (row["name"], row["tokens"]) == (name, tokens)]
        us = span((row["cuda_us"] for row in here), "{:.1f}".format)
        faster = ratios(row["bf16_us"] / row["cuda_us"] for row in here)
        cells.append([f"`{name}`", str(tokens), us, faster])
    head = ["weights", "tokens", "us", "x bf16"]
    said = {"Triton": "triton_us", "cuTile": "cutile_us", "Reading the codes": "read_us"}
    lines = [
        f"{what} takes {min(times):.2f} to {max(times):.2f} times as long as this kernel."
        for what, key in said.items()
        if (times := [row[key] / row["cuda_us"] for row in rows if key in row])
    ]
    return f"{markdown_table(head, cells)}\n\n{' '.join(lines)}"


def offload(rows: _Rows) -> str:
    """Second passes in the CPU's memory against those on the GPU."""
    head = ["weights", "tokens", "resident, ms", "offloaded, ms", "copies alone, ms",
            "hidden", "equal logits"]  # fmt: skip
    cells = [
        [
            f"`{row['name']}`", f"{row['tokens']:,}", f"{row['resident_ms']:.2f}",
            f"{row['offload_ms']:.2f}", f"{row['copies_ms']:.2f}", f"{max(row['hidden'], 0.0):.0%}",
            "yes" if row["same_logits"] else "no",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(head, cells) + "\n\n" + "\n".join(_memory(rows))


def _memory(rows: _Rows) -> Iterator[str]:
    """Bytes copied, copy bandwidth, and memory left on the GPU."""
    for row in {row["name"]: row for row in rows}.values():
        yield (
            f"`{row['name']}`: {row['copied_mb']:,.0f} MB are copied at "
            f"{row['gb_per_second']:.1f} GB/s, one large copy has {row['bus_gb_per_second']:.1f}; "
            f"of {row['copied_mb']:,.0f} MB on the GPU {row['slots_mb']:,.0f} are left, two slots "
            f"of {row['largest_mb']:,.0f}."
        )
