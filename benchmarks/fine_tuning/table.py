"""Tables of the suite `finetune`, from the records of all models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

from ..tables.provenance import sources

DENSE = "bf16"  # what the others are compared with


def training(records: Sequence[dict[str, Any]]) -> str:
    """Loss, time and memory of each method."""
    head = ["model", "weights", "loss before", "after", "times bf16's CPU time",
            "MB above imports", "times bf16's"]  # fmt: skip
    lines = []
    for record in records:
        rows = {row["name"]: row for row in record["results"]["rows"]}
        dense = rows[DENSE]
        for name, row in rows.items():
            lines.append(
                [
                    record["settings"]["model"],
                    name if name == DENSE else f"`{name}`",
                    f"{row['loss_before']:.3f}",
                    f"{row['loss_after']:.3f}",
                    f"{row['cpu_seconds'] / dense['cpu_seconds']:.2f}",
                    f"{above(row) / 1e6:.0f}",
                    f"{above(row) / above(dense):.2f}",
                ]
            )
    return "\n\n".join([markdown_table(head, lines), *map(_floor, records), sources(records)])


def above(row: dict[str, Any]) -> int:
    """Bytes at the peak of training above those of the imports."""
    difference: int = row["peak_bytes"] - row["imports_bytes"]
    return difference


def _floor(record: dict[str, Any]) -> str:
    """The part of memory that no quantizer of linear layers takes away."""
    settings, rows = record["settings"], record["results"]["rows"]
    dense = next(row for row in rows if row["name"] == DENSE)
    weights, whole = dense["weights_bytes"], above(dense)
    return (
        f"{settings['model']}: {settings['steps']} steps of {settings['sequence']} tokens, rank "
        f"{settings['rank']}. The linear weights are {weights / 1e6:.0f} MB of bf16's "
        f"{whole / 1e6:.0f} MB: without any, {1 - weights / whole:.2f} would stay."
    )


def merging(records: Sequence[dict[str, Any]]) -> str:
    """KL divergence that merging adds, next to that of the scheme."""
    head = ["model", "scheme", "KLD of the codes from the original", "KLD of merging",
            "CPU s of merging"]  # fmt: skip
    lines = [
        [
            record["settings"]["model"],
            f"`{row['name']}`",
            significant(row["scheme_kld"]),
            significant(row["merged_kld"]),
            f"{row['merge_cpu_seconds']:.0f}",
        ]
        for record in records
        for row in record["results"]["rows"]
        if "merged_kld" in row
    ]
    return markdown_table(head, lines)
