"""Tables of the suite `cuda-w4a8`, from its record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .cuda import count
from .limits import Figure, Rows, limits_table, pick

WHOLE, GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_PEERS = ("bf16", "int8 x int8")
_TOKENS = (1, 64, 128, 256, 1024, 4096)
_SHAPES = ((6144, 4096), (14336, 4096))  # out_features, in_features
_LAYER = ("name", "out_features", "in_features")


def table(rows: Rows) -> str:
    """Times of every layer, and how many times as fast as its peers it is."""
    ours = [row for row in rows if "speedup" in row]
    cells = [
        [
            f"`{row['name']}`", f"{row['out_features']} x {row['in_features']}",
            str(row["tokens"]), f"{row['us']:.1f}",
            *(_ratio(row["speedup"].get(peer)) for peer in _PEERS), _ratio(row.get("of_reading")),
        ]
        for row in ours
    ]  # fmt: skip
    peers = [f"x {peer}" for peer in _PEERS]
    return markdown_table(["weights", "size", "tokens", "us", *peers, "of reading"], cells)


def limits(rows: Rows) -> str:
    """Times bfloat16 at the shapes of a Llama-3-8B, beside what reading and tensor cores allow."""
    return limits_table(_against_dense(rows))


def _against_dense(rows: Rows) -> Iterator[Figure]:
    for name in (WHOLE, GROUPED):
        for tokens in _TOKENS:
            found = [
                row
                for shape in _SHAPES
                for row in pick(rows, name=name, tokens=tokens, out_features=shape[0],
                                in_features=shape[1])
            ]  # fmt: skip
            ratios = tuple(row["speedup"]["bf16"] for row in found)
            alone = [pick(rows, **{key: row[key] for key in _LAYER}, tokens=1) for row in found]
            known = [_ceiling(row, *one[:1]) for row, one in zip(found, alone, strict=True)]
            ceilings = tuple(ceiling for ceiling in known if ceiling)
            yield Figure(f"{count(tokens)}, `{name}`", ratios, ceilings)


def _ceiling(row: dict[str, Any], one: dict[str, Any] | None = None) -> float:
    """Of the ratio, if nothing took time but rounding, and then what takes longer, reading codes or
    tensor cores at their full rate; `one`: the same layer for one token. 0 = not known."""
    if "tensor_us" not in row:
        return float(row["speedup"]["bf16"] / row["of_reading"]) if "of_reading" in row else 0.0
    reading = one["us"] * one["of_reading"] if one else 0.0
    least = row["rounding_us"] + max(reading, row["tensor_us"])
    return float(row["speedup"]["bf16"] * row["us"] / least)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
