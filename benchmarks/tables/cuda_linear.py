"""Tables of the suite `cuda-linear`, from its record. Ranges are over the sizes of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from .ranges import ratios, span

_Rows = Sequence[dict[str, Any]]
_INT8, _BESIDE = ", int8", "vq-4"


def speedups(rows: _Rows) -> str:
    """Speedup of a linear layer over bfloat16, by the number of tokens."""
    rows = [row for row in rows if row["what"] == "linear"]
    tokens = sorted({row["tokens"] for row in rows})
    dense = {_case(row): row["us"] for row in rows if row["name"] == "bf16"}
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        line = []
        for count in tokens:
            here = [row for row in rows if (row["name"], row["tokens"]) == (name, count)]
            if name == "bf16":
                line.append(span((row["us"] for row in here), "{:.0f}".format))
            else:
                line.append(ratios(_faster(row, dense[_case(row)]) for row in here))
        label = {"bf16": "bf16, us", "int4 tinygemm": "int4 tinygemm"}.get(name, f"`{name}`")
        cells.append([label, *line])
    return markdown_table(["tokens", *map(str, tokens)], cells)


def int8(rows: _Rows) -> str:
    """The same with 8-bit inputs, and one scheme with 16 bits."""
    plain = {row["name"].removesuffix(_INT8) for row in rows if row["name"].endswith(_INT8)}
    shown = [row for row in rows if row["name"] not in plain - {_BESIDE}]
    return speedups(shown)


def _case(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["tokens"], row["out_features"], row["in_features"]


def _faster(row: dict[str, Any], dense_us: float) -> float:
    return float(row["speedup"]["bf16"] if "speedup" in row else dense_us / row["us"])


def mechanisms(rows: _Rows) -> str:
    """The time of one token without each mechanism, in multiples of the chosen plan's."""
    rows = [row for row in rows if row["what"] == "mechanism"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = []
    for plan in dict.fromkeys(row["plan"] for row in rows):
        line = ["the chosen plan, us" if plan == "chosen" else plan]
        for name in names:
            here = [row for row in rows if (row["name"], row["plan"]) == (name, plan)]
            if plan == "chosen":
                line.append(span((row["us"] for row in here), "{:.1f}".format))
            else:
                line.append(ratios(row["times chosen"] for row in here))
        cells.append(line)
    return markdown_table(["without, or instead", *(f"`{name}`" for name in names)], cells)
