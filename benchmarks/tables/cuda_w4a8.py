"""Table of the suite `cuda-w4a8`, from its record."""

from __future__ import annotations

from hf_vq.evaluation.text_tables import markdown_table

from .limits import Rows, pick
from .ranges import ratios, span

WHOLE, GROUPED = "qoq-w4a8", "qoq-w4a8-g128"
_PEERS = ("bf16", "int8 x int8")
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
