"""Tables of the suite `quality-models`: a column for each model that has a record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from hf_vq.errors import VQError
from hf_vq.evaluation.text_tables import markdown_table, significant

from ...tables.provenance import DIGITS, sources, standard_errors
from ...tables.ranges import span
from .suite import row_name
from .weights import BESIDE

SUITE = "quality-models"
_Records = Sequence[dict[str, Any]]
_Rows = Sequence[Sequence[dict[str, Any]]]  # of each record
_INT8 = "-int8"  # ends the name of a row with inputs of 8 bits
_DEFAULT = "-activations"  # ends the name of a row that is made as `VQConfig()` makes it
_NO_WINDOW = "-window-0"
_PEERS = {"nf4-g64": "NF4 g64", "kivi-4-g32": "KIVI-4 g32", "kivi-2-g32": "KIVI-2 g32"}
_PEERS |= {f"hqq-{bits}-g64": f"HQQ int{bits} g64" for bits in (4, 3, 2)}


def weights(records: _Records) -> str:
    """KL divergence and perplexity of quantized weights; then where they come from."""
    settings = _shared(records, "text", "text_tokens", "text_context")
    read = f"{settings['text_tokens']:,} tokens in contexts of {settings['text_context']:,}"
    how = sources(_of_rows(records, _scored(records, "weights")))
    return f"{_table(records, 'weights', 'bits_per_weight', read)} {how}"


def embeddings(records: _Records) -> str:
    """Size and KL divergence of the models whose embeddings were measured."""
    measured: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        rows = [row for row in record["results"]["rows"] if row.get("on") == "text"]
        rows = [row for row in rows if "megabytes" in row]
        coded = [row for row in rows if row["what"] == "embeddings"]
        dense = [row for row in rows if row_name(row) == f"weights:{BESIDE}"]
        if coded:
            measured[record["settings"]["model"]] = [*dense, *coded]
    if not measured:
        return "Not measured: `python -m benchmarks quality-models .. --rows 'embeddings:*'`."
    lines = []
    for model, rows in measured.items():
        for row in rows:
            name = f"`{row['name']}`" if row["what"] == "embeddings" else "dense, float32"
            of = "" if len(measured) == 1 else f"{model}: "
            lines.append([of + name, f"{row['megabytes']:.1f}", significant(row["kld"])])
    table = markdown_table(["embedding", "MB in all", "KL divergence"], lines)
    which = f"{', '.join(measured)}, `{BESIDE}`, `activations=None`"
    return f"{table}\n\n{which}; see [above](#quality)."


def int8(records: _Records) -> str:
    """KL divergence of models with inputs of 16 and of 8 bits."""
    settings = _shared(records, "text", "text_tokens", "text_context")
    lines, compared = [], []
    for record in records:
        rows = {row["name"]: row for row in record["results"]["rows"]}
        compared.append(list[dict[str, Any]]())
        for name, row in rows.items():
            exact = rows.get(name.removesuffix(_INT8))
            if name.endswith(_INT8) and exact is not None:
                share = f"{100 * row['int8_share']:.0f} %"
                cells = [significant(one["kld"]) for one in (exact, row)]
                scheme = name.removesuffix(_INT8).removesuffix(_DEFAULT)
                lines.append([record["settings"]["model"], f"`{scheme}`", share, *cells])
                compared[-1] += [exact, row]
    head = ["model", "weights", "in 8 bits", "KL divergence, 16 bits", "8 bits"]
    read = f"{settings['text_tokens']:,} tokens in contexts of {settings['text_context']:,}"
    how = sources(_of_rows(records, compared))
    return f"{markdown_table(head, lines)}\n\nOn {settings['text']}: {read}. {how}"


def caches(records: _Records) -> str:
    """KL divergence of KV caches, on another page."""
    settings = _shared(records, "text", "kv_passages", "kv_prompt", "kv_scored", "sinks", "window")
    lengths = f"{settings['kv_scored']} tokens behind prompts of {settings['kv_prompt']}"
    read = f"{settings['kv_passages']} passages of {lengths}, {settings['sinks']} sinks"
    table = _table(records, "kv", "bits_per_element", f"{read}, window {settings['window']}")
    if "` behind " in table:
        more = _shared(records, "kv_long_passages")["kv_long_passages"]
        table += f" Behind longer prompts: {more} passages."
    rows = [row for each in _scored(records, "kv") for row in each]
    revisions = sorted({row["revision"][:DIGITS] for row in rows})
    return f"{table} Measured with the [weights](weights.md#quality), at {', '.join(revisions)}."


def _table(records: _Records, what: str, bits: str, read: str) -> str:
    """A line for each row that two models have, or the only one; what was scored; how exact it is.

    Args:
        what: of the rows that are shown.
        bits: key of their stored bits.
        read: what was scored.
    """
    found = _found(records, what)
    times = _times(found)
    names = _shown(times, records)
    head = ["KV cache" if what == "kv" else "weights", "bits"]
    head += [record["settings"]["model"] for record in records]
    cells = [
        [
            _label(name, times),
            span((rows[name][bits] for rows in found if name in rows), "{:.2f}".format),
            *(_cell(rows[name]) if name in rows else "-" for rows in found),
        ]
        for name in names
    ]
    errors = standard_errors([row for rows in _scored(records, what) for row in rows])
    text = records[0]["settings"]["text"]
    return f"{markdown_table(head, cells)}\n\nOn {text}: {read}. {errors}"


def _found(records: _Records, what: str) -> list[dict[str, dict[str, Any]]]:
    """Rows of one kind of each record, by name."""
    return [
        {
            row_name(row).partition(":")[2]: row
            for row in record["results"]["rows"]
            if row["what"] == what and row.get("on", "text") == "text" and "failed" not in row
            if not row["name"].endswith(_INT8)
        }
        for record in records
    ]


def _times(found: Sequence[dict[str, dict[str, Any]]]) -> Counter[str]:
    """Count the models that have each row, in the order of the longest record."""
    longest_first = sorted(found, key=len, reverse=True)
    return Counter(name for rows in longest_first for name in rows)


def _shown(times: Counter[str], records: _Records) -> list[str]:
    """Rows that two models have, or the only one."""
    return [name for name, count in times.items() if count > 1 or len(records) == 1]


def _scored(records: _Records, what: str) -> list[list[dict[str, Any]]]:
    """Rows of each record that a table of one kind shows."""
    found = _found(records, what)
    names = _shown(_times(found), records)
    return [[rows[name] for name in names if name in rows] for rows in found]


def _shared(records: _Records, *keys: str) -> dict[str, Any]:
    """Settings of all records.

    Raises:
        VQError: they differ in one of `keys`, so that no sentence is true of all columns.
    """
    for key in keys:
        if len({record["settings"][key] for record in records}) > 1:
            raise VQError(f"the records of {SUITE} differ in {key}: measure all models alike.")
    settings: dict[str, Any] = records[0]["settings"]
    return settings


def _of_rows(records: _Records, shown: _Rows) -> list[dict[str, Any]]:
    """Records that have rows of `shown`: at the revision of these, without a date if that is not
    the record's; with two dots for the names of rows in its command, as the table shows them, and
    without options that only rows have which not all records have."""
    changed = []
    for record, rows in zip(records, shown, strict=True):
        if not rows:
            continue
        revision = " and ".join(sorted({row["revision"] for row in rows}))
        command = re.sub(r" --rows( [a-z][^ ]*)+", " --rows ..", record["command"])
        changed.append({
            **record,
            "revision": revision,
            "date": record["date"] if revision == record["revision"] else "",
            "command": re.sub(r" --(calibration|calibration-tokens|ggml) [^ ]+", "", command),
        })  # fmt: skip
    return changed


def _cell(row: dict[str, Any]) -> str:
    shown = significant(row["kld"])
    if row["what"] == "kv":
        return shown  # perplexity hardly changes
    return f"{shown}, {row['change']:+.{0 if row['change'] > 10 else 1}f} %"


def _label(name: str, names: Collection[str]) -> str:
    if f"{name}{_DEFAULT}" in names:
        return f"`{name}`, `activations=None`"
    if "@" in name:
        cache, _, tokens = name.partition("@")
        return f"{_label(cache, names)} behind {int(tokens):,}"
    if name.endswith(_NO_WINDOW):
        return f"`{name.removesuffix(_NO_WINDOW)}`, window 0"
    return _PEERS.get(name, f"`{name.removesuffix(_DEFAULT)}`")
