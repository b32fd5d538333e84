"""Tables and plot of a comparison, made from the rows of its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import VQError
from .text_tables import significant

PICTURE = """![KL divergence and perplexity against stored bits](compare.svg)

Filled circles are calibrated, hollow ones are not, grey are other libraries.

"""
_SHOWN = 90  # characters of a reason
_TITLES = {"weights": "weights", "cache": "KV cache"}
_PEER_MARKERS = "sD^vPX"
_DIGEST = "hf_vq record "


def tables(
    rows: Sequence[dict[str, Any]], draw: Callable[[Sequence[str], Sequence[Sequence[str]]], str]
) -> str:
    """A table of weights and one of caches, as far as there are rows.

    Args:
        rows: of `Comparison.rows`.
        draw: `show.text_table` or `show.markdown_table`.
    """
    parts = [
        draw(*cells(some, what))
        for what in _TITLES
        if (some := [row for row in rows if row["what"] == what])
    ]
    return "\n\n".join(parts)


def cells(rows: Sequence[dict[str, Any]], what: str) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table of weights or of caches; a row that failed gives its reason."""
    cache = what == "cache"
    head = [_TITLES[what], "bits", "KL divergence", "99th percentile", "top-1 %", "perplexity, %"]
    head += ["worst layer's logits"] if cache else ["seconds"]
    measured = [row for row in rows if "failed" not in row]
    depths = [at["depth"] for at in measured[0]["recall"]] if cache and measured else []
    head += [f"recall, depth {depth:.0%}" for depth in depths]
    found = []
    for row in rows:
        if "failed" in row:
            reason = row["failed"][:_SHOWN] + "..." * (len(row["failed"]) > _SHOWN)
            found.append([f"{row['label']} ({reason})", *["-"] * (len(head) - 1)])
            continue
        line = [
            row["label"],
            f"{row['bits']:.3f}",
            f"{significant(row['kld'])} ± {significant(row['kld_se'], 1)}",
            significant(row["kld_p99"]),
            f"{row['top1']:.1f}",
            f"{row['change']:+.2f}",
        ]
        line.append(f"{row['correlation']:.4f}" if cache else significant(row["seconds"], 2))
        shown = [at["recall"] for at in row["recall"]] if cache else []
        found.append([*line, *("-" if at is None else f"{100 * at:.1f} %" for at in shown)])
    return head, found


def title(settings: dict[str, Any]) -> str:
    """Title of a plot, from a record's settings."""
    return "{model}, {tokens:,} tokens of {text}, context {context:,}, {dtype}".format(**settings)


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """Identifies the rows that a picture was drawn from."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def drawn_from(picture: Path) -> str | None:
    """The `digest` of the rows behind a picture, None if it is none of ours."""
    if not picture.is_file():
        return None
    _, found, rest = picture.read_text(encoding="utf-8", errors="replace").partition(_DIGEST)
    return rest[:16] if found else None


def check_plot(path: str | Path) -> None:
    """Check that a picture can be drawn and in this format, before hours of measuring.

    Raises:
        VQError: matplotlib is not installed, or does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise VQError('a plot needs matplotlib: pip install "hf-vq[plot]".') from None
    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in known:
        raise VQError(f"cannot draw {path}: use one of the suffixes {', '.join(sorted(known))}.")


def plot(rows: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Save `figure`; a .png or .svg says which rows it was drawn from (`drawn_from`).

    Raises:
        VQError: as `check_plot` and `figure`, or the file cannot be written.
    """
    check_plot(path)
    import matplotlib as mpl

    suffix = Path(path).suffix
    metadata: dict[str, Any] = {}
    if suffix in (".svg", ".png"):
        metadata["Description"] = _DIGEST + digest(rows)
    if suffix == ".svg":
        metadata["Date"] = None
    # Equal rows give equal files, with their texts as text.
    with mpl.rc_context({"svg.hashsalt": "hf_vq", "svg.fonttype": "none"}):
        try:
            figure(rows, title).savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise VQError(f"cannot write {path}: {error.strerror}.") from None


def figure(rows: Sequence[dict[str, Any]], title: str = "") -> Any:
    """KL divergence (above) and perplexity (below) against stored bits, both on logarithmic axes.

    Lines join what differs in bits only. Filled circles are calibrated, hollow ones are not; grey
    are other libraries.

    Returns:
        A figure of matplotlib.

    Raises:
        VQError: nothing was measured.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if "failed" not in row]
    kinds = [what for what in _TITLES if any(row["what"] == what for row in measured)]
    if not kinds:
        raise VQError("nothing was measured, so there is nothing to draw.")
    drawn = Figure(figsize=(5.5 * len(kinds), 7), layout="constrained")
    axes = drawn.subplots(2, len(kinds), squeeze=False, sharex="col")
    for column, what in enumerate(kinds):
        lines = _lines([row for row in measured if row["what"] == what])
        for axis, key in zip(axes[:, column], ("kld", "perplexity"), strict=True):
            for name, found, look in lines:
                points = [(row["bits"], max(row[key], 1e-7)) for row in found]
                axis.plot(*zip(*points, strict=True), label=name, **look)
            axis.set_yscale("log")
            if key == "perplexity":
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("{x:.4g}")
            axis.grid(alpha=0.3, which="both")
        axes[0, column].set_title(_TITLES[what])
        axes[0, column].legend(fontsize=7, ncols=2)
        number = "weight" if what == "weights" else "coded number"
        axes[1, column].set_xlabel(f"stored bits of a {number}")
    axes[0, 0].set_ylabel("KL divergence (nats a token)")
    axes[1, 0].set_ylabel("perplexity")
    drawn.suptitle(title, fontsize=10)
    return drawn


def _lines(
    rows: Sequence[dict[str, Any]],
) -> list[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(name, rows in the order of bits, look) of every family."""
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault((row["kind"], _family(row)), []).append(row)
    colors: dict[str, str] = {}
    markers: dict[str, str] = {}
    found = []
    for (kind, family), members in families.items():
        look: dict[str, Any] = {"linewidth": 1, "markersize": 5}
        if kind == "peer":
            marker = markers.setdefault(family, _PEER_MARKERS[len(markers) % len(_PEER_MARKERS)])
            look |= {"color": "0.45", "marker": marker, "linestyle": ":"}
        else:
            look |= {"color": colors.setdefault(family, f"C{len(colors)}"), "marker": "o"}
            if kind == "scheme":
                look |= {"markerfacecolor": "white", "linestyle": "--"}
        members.sort(key=lambda row: row["bits"])
        ends = list(dict.fromkeys(row["name"] for row in (members[0], members[-1])))
        name = " … ".join(ends) + ", calibrated" * (kind == "calibrated")
        found.append((name, members, look))
    return found


def _family(row: dict[str, Any]) -> str:
    """`vq-4` and `vq-2` are one family; `u4` and `u2` are."""
    return str(row["name"]).rstrip("0123456789").rstrip("-")
