"""Tables of the suite `cuda-w4a8`, from its record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from ..bars import Bar, Rows, bars_table, pick
from .cuda import count

WHOLE, GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_PEERS = ("bf16", "int8 x int8")
_BARS = {1: 2.2, 64: 1.3, 128: 1.3, 256: 1.3, 1024: 1.0, 4096: 1.0}  # tokens: times bfloat16
_SHAPES = ((6144, 4096), (14336, 4096))  # that bars are of
_LAYER = ("name", "out_features", "in_features")
_SLOWER = 0.15  # groups, at most


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


def bars(rows: Rows) -> str:
    """What was asked for, and what was measured."""
    return bars_table([*_against_dense(rows), *_groups(rows)], "ceiling")


def _against_dense(rows: Rows) -> Iterator[Bar]:
    for name in (WHOLE, GROUPED):
        for tokens, least in _BARS.items():
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
            yield Bar(f"{count(tokens)}, `{name}`", least, ratios, ceilings)


def _ceiling(row: dict[str, Any], one: dict[str, Any] | None = None) -> float:
    """Of the ratio, if nothing took time but rounding, and then what takes longer, reading codes or
    tensor cores at their full rate; `one`: the same layer for one token. 0 = not known."""
    if "tensor_us" not in row:
        return float(row["speedup"]["bf16"] / row["of_reading"]) if "of_reading" in row else 0.0
    reading = one["us"] * one["of_reading"] if one else 0.0
    least = row["rounding_us"] + max(reading, row["tensor_us"])
    return float(row["speedup"]["bf16"] * row["us"] / least)


def _groups(rows: Rows) -> Iterator[Bar]:
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        pairs = zip(
            pick(rows, name=WHOLE, tokens=tokens), pick(rows, name=GROUPED, tokens=tokens),
            strict=True,
        )  # fmt: skip
        more = tuple(grouped["us"] / whole["us"] - 1 for whole, grouped in pairs)
        label = f"{count(tokens)}, groups of 128, more time than without"
        yield Bar(label, _SLOWER, more, most=True, unit="%")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
