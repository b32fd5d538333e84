"""Tables of the suite `quality-models`: a column for each model that has a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table, significant

from .provenance import source, standard_errors
from .ranges import span

SUITE = "quality-models"
_Records = Sequence[dict[str, Any]]
_DEFAULT = "-activations"  # ends the name of a row that is made as `VQConfig()` makes it
_PEERS = {"nf4-g64": "NF4 g64", "kivi-4-g32": "KIVI-4 g32", "kivi-2-g32": "KIVI-2 g32"}
_PEERS |= {f"hqq-{bits}-g64": f"HQQ int{bits} g64" for bits in (4, 3, 2)}


def weights(records: _Records) -> str:
    """KL divergence and perplexity of quantized weights."""
    settings = records[0]["settings"]
    read = f"{settings['text_tokens']:,} tokens in contexts of {settings['text_context']:,}"
    return _table(records, "weights", "bits_per_weight", read)


def caches(records: _Records) -> str:
    """The same of KV caches."""
    settings = records[0]["settings"]
    lengths = f"{settings['kv_scored']} tokens behind prompts of {settings['kv_prompt']}"
    read = f"{settings['kv_passages']} passages of {lengths}, {settings['sinks']} sinks"
    return _table(records, "kv", "bits_per_element", f"{read}, window {settings['window']}")


def _table(records: _Records, what: str, bits: str, read: str) -> str:
    """A line for each row that all models have, and what was read by which runs.

    Args:
        what: of the rows that are shown.
        bits: key of their stored bits.
        read: what was scored.
    """
    found = [
        {
            row["name"]: row
            for row in record["results"]["rows"]
            if row["what"] == what and row.get("on", "text") == "text" and "failed" not in row
        }
        for record in records
    ]
    names = [name for name in found[0] if all(name in rows for rows in found)]
    head = ["KV cache" if what == "kv" else "weights", "bits"]
    head += [record["settings"]["model"] for record in records]
    cells = [
        [
            _label(name, names),
            span((rows[name][bits] for rows in found), "{:.2f}".format),
            *(_cell(rows[name]) for rows in found),
        ]
        for name in names
    ]
    sources = " ".join(dict.fromkeys(map(source, records)))
    errors = standard_errors([rows[name] for rows in found for name in names])
    text = records[0]["settings"]["text"]
    return f"{markdown_table(head, cells)}\n\nOn {text}: {read}. {errors} {sources}"


def _cell(row: dict[str, Any]) -> str:
    return f"{significant(row['kld'])}, {row['change']:+.{0 if row['change'] > 10 else 1}f} %"


def _label(name: str, names: Sequence[str]) -> str:
    if f"{name}{_DEFAULT}" in names:
        return f"`{name}`, `activations=None`"
    return _PEERS.get(name, f"`{name.removesuffix(_DEFAULT)}`")
