"""Tables of the records of `make fuzz`, `scripts/fuzz/soak.py`, `scripts/sweep_attention_cuda.py`,
`scripts/sanitize_cuda`, `scripts/time_digests.py` and `scripts/check_architectures`."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from typing import Any

from hf_vq.evaluation.text_tables import markdown_table

from ..records import read_record
from .provenance import source

SUBJECTS = {
    "checkpoints": "checkpoints",
    "own_checks": "checkpoints, hf_vq's checks alone",
    "caches": "cache files",
    "codebooks": "KV codebooks",
    "published": "published checkpoints",
    "pickles": "pickles",
    "c_api": "C API problems",
    "sequences": "cache sequences",
    "kills": "kills",
    "threads": "threads",
    "numerics": "numbers",
}
"""What is attacked, by the names of `scripts/fuzz`."""


def campaign() -> str:
    """Tries of every fuzzing subject, and what was found."""
    record = read_record("fuzz")
    if record is None:
        return 'Not measured yet: `make fuzz SECONDS=36000 ARGS="--out RECORD"`.'
    found = record["results"]["rows"]
    names = dict.fromkeys(row["name"] for row in found)
    rows = []
    for name in names:
        some = [row for row in found if row["name"] == name]
        faults = sum(row[key] for row in some for key in ("crashes", "hangs", "findings"))
        rows.append(
            [SUBJECTS.get(name, name), f"{sum(row['tried'] for row in some):,}", str(faults)]
        )
    head = ["attacked", "tries", "crashes, hangs, wrong results"]
    return f"{markdown_table(head, rows)}\n\n{source(record)}"


def soak() -> str:
    """Models and memory of long runs, without and with a GPU: of several processes, those
    of the one whose memory grew most."""
    records = [record for name in ("soak", "soak-cuda") if (record := read_record(name))]
    if not records:
        return "Not measured yet: `python scripts/fuzz/soak.py --out RECORD`."
    head = ["memory", "processes", "models", "hours", "begin, MB", "end, MB",
            "kept by safetensors, MB"]  # fmt: skip
    kinds = ("rss", "process"), ("gpu", "tensors on the GPU"), ("gpu_driver", "GPU")
    rows = []
    for record in records:
        every = record["results"]["rows"]
        for kind, name in kinds:
            if f"{kind}_begin" not in every[0]:
                continue
            begin, end = f"{kind}_begin", f"{kind}_end"
            grown = [(row[end] - row[begin], row[end]) for row in every]
            worst = every[grown.index(max(grown))]
            kept = worst.get(f"{kind}_kept_by_safetensors")
            rows.append([
                name, str(len(every)), f"{worst['rounds']:,}",
                f"{worst['seconds'] / 3600:.2f}", f"{worst[begin] / 1e6:.1f}",
                f"{worst[end] / 1e6:.1f}", "-" if kept is None else f"{kept / 1e6:.1f}",
            ])  # fmt: skip
    return f"{markdown_table(head, rows)}\n\n{' '.join(map(source, records))}"


def sweep() -> str:
    """Attention over caches on a GPU: what was compared, and schemes with a fault."""
    record = read_record("cuda-attention-sweep")
    if record is None:
        return "Not measured yet: `python scripts/sweep_attention_cuda.py --out RECORD`."
    found, calls = record["results"], record["settings"]["calls"]
    schemes = found["schemes"]
    shown = {f"all {len(schemes)} schemes": list(schemes.values())}
    shown |= {
        f"of them `{name}`": [row]
        for name, row in schemes.items()
        if row["not_finite"] or row["wrong"] or row["calls_that_differ"]
    }
    keys = ("points", "heads", "not_finite", "wrong", "calls_that_differ")
    rows = [
        [name, *(f"{sum(row[key] for row in some):,}" for key in keys)]
        for name, some in shown.items()
    ]
    head = ["cache", "problems", "heads", "not finite", "wrong", "calls with other bits"]
    done, total = found["points"], record["settings"]["points_of_the_grid"]
    some = "all" if done == total else f"{done:,}, drawn at random, of the"
    what = f"{some} {total:,} problems of the grid, {calls} calls each.".capitalize()
    return f"{markdown_table(head, rows)}\n\n{what} {source(record)}"


def sanitizers() -> str:
    """CUDA kernels under compute-sanitizer: what ran, what was reported, and what was left out."""
    record = read_record("cuda-sanitizers")
    if record is None:
        return (
            "Not measured yet: `python scripts/sanitize_cuda --kernels buckets --tools memcheck "
            "racecheck initcheck --out RECORD`."
        )
    rows = []
    for tool in dict.fromkeys(row["tool"] for row in record["results"]["rows"]):
        of_tool = [row for row in record["results"]["rows"] if row["tool"] == tool]
        left: Counter[str] = Counter()
        for row in of_tool:
            left.update(row["left"])
        sums = (sum(row[key] for row in of_tool) for key in ("kernels", "problems", "errors"))
        why = ", ".join(f"{count:,} ({why})" for why, count in sorted(left.items())) or "0"
        rows.append([tool, *(f"{count:,}" for count in sums), why])
    head = ["tool", "kernels", "problems", "errors", "left out"]
    notes = [f"{count:,} times: {note}." for note, count in record["results"]["notes"].items()]
    what = f"Compute-sanitizer: {record['settings']['sanitizer'].partition(' (')[0]}."
    earlier: dict[str, list[str]] = {}
    for run in record["settings"]["runs"]:
        earlier.setdefault(run["gpu"] or "", []).append(run["revision"][:7])
    parts = [
        " on ".join(filter(None, (", ".join(dict.fromkeys(revisions)), gpu)))
        for gpu, revisions in earlier.items()
    ]
    notes += [f"In part at {'; '.join(parts)}."] if parts else []
    return f"{markdown_table(head, rows)}\n\n{' '.join([what, *notes, source(record)])}"


def digests() -> str:
    """Cost of digest verification in a load."""
    record = read_record("digests")
    if record is None:
        return "Not measured yet: `python scripts/time_digests.py --out RECORD`."
    rows = [
        [
            row["device"], f"{row['bytes'] / 1e9:.2f}", f"{row['seconds_without']:.2f}",
            f"{row['seconds_with']:.2f}", f"{row['seconds_to_read']:.2f}",
        ]
        for row in record["results"]["rows"]
    ]  # fmt: skip
    head = ["loaded to", "GB", "`HF_VQ_VERIFY=0`, s", "with digests, s", "reading every byte, s"]
    return f"{markdown_table(head, rows)}\n\n{source(record)}"


def architectures() -> str:
    """Counts of classes of Transformers that run, and names of those that do not, with reasons."""
    record = read_record("architectures")
    if record is None:
        return "Not measured yet: `python scripts/check_architectures --out RECORD`."
    rows = record["results"]["rows"]
    count = Counter(row["outcome"].partition(":")[0] for row in rows)
    seen = [
        any("pixel" in name or "patch" in name for name in row["inputs"])
        for row in rows
        if "inputs" in row and "AutoModelForImageTextToText" in row["auto"]
    ]
    sentences = [
        f"Of {len(rows)} classes, {count['run']} run, {count['no linear layer']} have no linear",
        f"layer. {_others(rows)} {sum(seen)} of {len(seen)} `ImageTextToText` ran with an image.",
        source(record),
    ]
    return " ".join(sentences)


def _others(rows: list[dict[str, Any]]) -> str:
    """The classes that do not run, by the reason."""
    why: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] in ("run", "no linear layer"):
            continue
        reason = row.get("why") or row.get("not run", "")
        library = re.search(r"requires the (\w+) library", reason)
        reason = f"needs {library[1]}" if library else reason.rpartition("Error: ")[2]
        reason = textwrap.shorten(reason, 60, placeholder=" ..")
        outcome = "" if row["outcome"] == "not built" else f"{row['outcome']}: "
        why.setdefault(outcome + reason, []).append(f"`{row['class']}`")
    shown = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in why.items())
    return f"Not: {shown}." if shown else "None fails."
