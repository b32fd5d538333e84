"""The lines under a table: what was run, on which machine, and when; how exact it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DIGITS = 7  # of a revision
# Suites were part of the package until 2026-11-23: records of that time name them there.
_OLD, _NEW = "python -m hf_vq.bench ", "python -m benchmarks "


def source(record: dict[str, Any]) -> str:
    """`Measured by COMMAND; MACHINE; DATE at REVISION.`; of quality, with model, tokens, context.

    Versions are in the record, and not repeated under every table.
    """
    return sources([record])


def sources(records: Sequence[dict[str, Any]]) -> str:
    """`source` of several records; those that differ in the date and the revision only share a
    sentence."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(_how(record), []).append(_when(record))
    return " ".join(
        f"Measured by {how}; {', '.join(dict.fromkeys(when))}." for how, when in found.items()
    )


def _how(record: dict[str, Any]) -> str:
    machine, settings = record["machine"], record["settings"]
    parts = [f"`{record['command'].replace(_OLD, _NEW)}`"]
    if {"model", "tokens", "context"} <= settings.keys():
        tokens = f"{settings['tokens']:,} tokens"
        parts.append(f"{settings['model']}, {tokens}, context {settings['context']}")
    return "; ".join([*parts, machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"])


def standard_errors(rows: Sequence[dict[str, Any]]) -> str:
    """The standard errors of KL divergences, in parts of them."""
    parts = [100 * row["kld_se"] / row["kld"] for row in rows if row["kld"] > 0]
    return f"Standard errors of KLD: {min(parts):.1f} to {max(parts):.1f} %."


def _when(record: dict[str, Any]) -> str:
    """The date, and the revisions that were measured, where they are known."""
    revisions = " and ".join(each[:DIGITS] for each in (record["revision"] or "").split(" and "))
    return " ".join([record["date"], f"at {revisions}" if revisions else ""]).strip()
