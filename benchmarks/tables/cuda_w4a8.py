"""Tables of the suite `cuda-w4a8`, from its record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .cuda import count
from .limits import Figure, Rows, limits_table, pick
from .ranges import ratios, span

WHOLE, GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_PEERS = ("bf16", "int8 x int8")
_TOKENS = (1, 64, 128, 256, 1024, 4096)
_SHAPES = ((6144, 4096), (14336, 4096))  # out_features, in_features
_LAYER = ("name", "out_features", "in_features")


def table(rows: Rows) -> str:
    """Times of layers with groups, how many times as fast as its peers they are, both over all
    sizes, and in a line how much whole rows differ."""
    ours = pick([row for row in rows if "speedup" in row], name=GROUPED)
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in ours):
        here = pick(ours, tokens=tokens)
        times = span((row["us"] for row in here), "{:.1f}".format)
        faster = (
            ratios(row["speedup"][peer] for row in here if row["speedup"].get(peer) is not None)
            for peer in _PEERS
        )
        cells.append([f"{tokens:,}", times, *faster])
    head = ["tokens", "us", *(f"x {peer}" for peer in _PEERS)]
    return f"{markdown_table(head, cells)}\n\n{_whole_rows(rows, ours)}"


def _whole_rows(rows: Rows, grouped: Rows) -> str:
    """Time of layers without groups relative to layers with groups."""
    times = [
        pick(rows, **{key: row[key] for key in _LAYER[1:]}, name=WHOLE, tokens=row["tokens"])[0][
            "us"
        ]
        / row["us"]
        for row in grouped
    ]
    reading = [row["of_reading"] for row in grouped if "of_reading" in row]
    return (
        f"`{GROUPED}`; `{WHOLE}` takes {min(times):.2f} to {max(times):.2f} times as long. One "
        f"token takes {1 / max(reading):.2f} to {1 / min(reading):.2f} times as long as reading "
        "the codes."
    )


def limits(rows: Rows) -> str:
    """Speedup over bfloat16 of layers with groups, shapes of a Llama-3-8B, with the roofline."""
    return limits_table(_against_dense(rows))


def _against_dense(rows: Rows) -> Iterator[Figure]:
    for tokens in _TOKENS:
        found = [
            row
            for shape in _SHAPES
            for row in pick(rows, name=GROUPED, tokens=tokens, out_features=shape[0],
                            in_features=shape[1])
        ]  # fmt: skip
        faster = tuple(row["speedup"]["bf16"] for row in found)
        single = [pick(rows, **{key: row[key] for key in _LAYER}, tokens=1) for row in found]
        known = [_ceiling(row, *one[:1]) for row, one in zip(found, single, strict=True)]
        yield Figure(count(tokens), faster, tuple(ceiling for ceiling in known if ceiling))


def _ceiling(row: dict[str, Any], one: dict[str, Any] | None = None) -> float:
    """Upper bound of the speedup: quantizing the input, then the longer of reading codes and tensor
    cores at their full rate. `one`: the same layer for one token. 0 = not known."""
    if "tensor_us" not in row:
        return float(row["speedup"]["bf16"] / row["of_reading"]) if "of_reading" in row else 0.0
    reading = one["us"] * one["of_reading"] if one else 0.0
    least = row["rounding_us"] + max(reading, row["tensor_us"])
    return float(row["speedup"]["bf16"] * row["us"] / least)
