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
    """Times of layers with groups, how many times as fast as its peers each is, and in a line how
    much whole rows differ."""
    ours = pick([row for row in rows if "speedup" in row], name=GROUPED)
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in ours))
    head = ["tokens"]
    for out_features, in_features in shapes:
        head += [f"{out_features} x {in_features}, us", *(f"x {peer}" for peer in _PEERS)]
    found: dict[int, list[str]] = {}
    for shape in shapes:
        for row in pick(ours, out_features=shape[0], in_features=shape[1]):
            found.setdefault(row["tokens"], []).extend(
                [f"{row['us']:.1f}", *(_ratio(row["speedup"].get(peer)) for peer in _PEERS)]
            )
    cells = [[f"{tokens:,}", *line] for tokens, line in found.items()]
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
    """Speedup over bfloat16 at the shapes of a Llama-3-8B, with the roofline."""
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
            single = [pick(rows, **{key: row[key] for key in _LAYER}, tokens=1) for row in found]
            known = [_ceiling(row, *one[:1]) for row, one in zip(found, single, strict=True)]
            ceilings = tuple(ceiling for ceiling in known if ceiling)
            yield Figure(f"{count(tokens)}, `{name}`", ratios, ceilings)


def _ceiling(row: dict[str, Any], one: dict[str, Any] | None = None) -> float:
    """Upper bound of the speedup: quantizing the input, then the longer of reading codes and tensor
    cores at their full rate. `one`: the same layer for one token. 0 = not known."""
    if "tensor_us" not in row:
        return float(row["speedup"]["bf16"] / row["of_reading"]) if "of_reading" in row else 0.0
    reading = one["us"] * one["of_reading"] if one else 0.0
    least = row["rounding_us"] + max(reading, row["tensor_us"])
    return float(row["speedup"]["bf16"] * row["us"] / least)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
