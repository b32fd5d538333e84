"""Tables of the suite `cuda-linear`, from its record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

_Rows = Sequence[dict[str, Any]]


def few(rows: _Rows) -> str:
    """Few tokens through a linear layer on a GPU: how many times faster than bfloat16."""
    return _speedups(rows, (1, 16, 32, 64))


def many(rows: _Rows) -> str:
    """The same for many tokens."""
    return _speedups(rows, (128, 1024, 2048, 4096))


def _speedups(rows: _Rows, tokens: Sequence[int]) -> str:
    rows = [row for row in rows if row["what"] == "linear"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    found = {
        (row["name"], (row["out_features"], row["in_features"]), row["tokens"]): row for row in rows
    }
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "bf16"]
    head = ["weights", *(f"{n} x {k}, {' / '.join(map(str, tokens))}" for n, k in shapes)]
    cells = [["bf16, us", *(_joined(f"{found['bf16', shape, m]['us']:.1f}" for m in tokens)
                            for shape in shapes)]]  # fmt: skip
    for name in names:
        ratios = [
            _joined(_ratio(found[name, shape, m], found["bf16", shape, m]) for m in tokens)
            for shape in shapes
        ]
        cells.append([f"`{name}`" if name != "int4 tinygemm" else name, *ratios])
    return markdown_table(head, cells)


def _ratio(row: dict[str, Any], dense: dict[str, Any]) -> str:
    return f"{row['speedup']['bf16'] if 'speedup' in row else dense['us'] / row['us']:.2f}"


def _joined(cells: Iterable[str]) -> str:
    return " / ".join(cells)


def of_reading(rows: _Rows) -> str:
    """One token against a kernel that only reads: microseconds of both, and their ratio."""
    rows = [row for row in rows if "of_reading" in row]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    cells = []
    for name in dict.fromkeys(row["name"] for row in rows):
        found = {(row["out_features"], row["in_features"]): row
                 for row in rows if row["name"] == name}  # fmt: skip
        cells.append([f"`{name}`", *(
            f"{found[shape]['read_us']:.1f} / {found[shape]['us']:.1f}, "
            f"{found[shape]['of_reading']:.0%}"
            for shape in shapes
        )])  # fmt: skip
    head = ["reading alone / ours, us", *(f"{n} x {k}" for n, k in shapes)]
    return markdown_table(head, cells)


def mechanisms(rows: _Rows) -> str:
    """What one token takes without each mechanism, in multiples of the chosen plan."""
    rows = [row for row in rows if row["what"] == "mechanism"]
    shapes = list(dict.fromkeys((row["out_features"], row["in_features"]) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    head = ["without, or instead", *(f"`{name}`" for name in names)]
    cells = []
    for plan in dict.fromkeys(row["plan"] for row in rows):
        line = [f"us of the chosen plan at {_joined(f'{n} x {k}' for n, k in shapes)}"
                if plan == "chosen" else plan]  # fmt: skip
        for name in names:
            found = {(row["out_features"], row["in_features"]): row for row in rows
                     if (row["name"], row["plan"]) == (name, plan)}  # fmt: skip
            key, digits = ("us", 1) if plan == "chosen" else ("times chosen", 2)
            shown = [f"{found[s][key]:.{digits}f}" if s in found else "-" for s in shapes]
            line.append(_joined(shown) if found else "-")
        cells.append(line)
    return markdown_table(head, cells)


def host(rows: _Rows) -> str:
    """Microseconds of the host for one eager call of a layer."""
    rows = [row for row in rows if row["what"] == "host"]
    head = ["us of the host", *(row["name"] for row in rows)]
    cells = [["a call", *(f"{row['us']:.1f}" for row in rows)]]
    return markdown_table(head, cells)
