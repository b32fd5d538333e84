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
from .passkey import DEPTHS
from .suite import row_name
from .weights import BESIDE

SUITE = "quality-models"
CHAT = "chat-models"  # records of rows on chat text
PASSKEYS = "passkey-models"
_Records = Sequence[dict[str, Any]]
_Rows = Sequence[Sequence[dict[str, Any]]]  # of each record
_INT8 = "-int8"  # ends the name of a row with inputs of 8 bits
_DEFAULT = "-activations"  # ends the name of a row that is made as `VQConfig()` makes it
_NO_WINDOW = "-window-0"
_FRONT = {
    "weights": ("vq-4-activations", "vq-3-activations", "nf4-g64", "hqq-4-g64"),
    "kv": ("u4", "u3", "kivi-4-g32"),
}
_BITS = {"weights": "bits_per_weight", "kv": "bits_per_element"}
_KINDS = {"weights": "weights", "kv": "KV cache"}
_PEERS = {"nf4-g64": "NF4 g64", "kivi-4-g32": "KIVI-4 g32", "kivi-2-g32": "KIVI-2 g32"}
_PEERS["exact"] = "uncoded"
_PEERS |= {f"hqq-{bits}-g64": f"HQQ int{bits} g64" for bits in (4, 3, 2)}


def weights(records: _Records) -> str:
    """KL divergence and perplexity of quantized weights; then where they come from."""
    settings = _shared(records, "text", "text_tokens", "text_context")
    read = f"{settings['text_tokens']:,} tokens in contexts of {settings['text_context']:,}"
    how = sources(_of_rows(records, _scored(records, "weights")))
    return f"{_table(records, 'weights', read)} {how}"


def front(records: _Records) -> str:
    """KL divergence of the weights and caches that README.md shows; the machine and revisions."""
    settings = _shared(records, "text", "text_tokens", "text_context", "kv_passages", "window")
    lines, shown = [], [list[dict[str, Any]]() for _ in records]
    for what, names in _FRONT.items():
        found = _found(records, what)
        for name in names:
            rows = [each.get(name) for each in found]
            measured = [row for row in rows if row]
            if not measured:
                continue
            for kept, row in zip(shown, rows, strict=True):
                kept += [row] if row else []
            bits = [row[_BITS[what]] for row in measured]
            label = _PEERS.get(name, f"`{name.removesuffix(_DEFAULT)}`")
            cells = [_cell(row) if row else "-" for row in rows]
            lines.append([f"{_KINDS[what]} {label}", span(bits, "{:.2f}".format), *cells])
    head = ["", "bits", *(record["settings"]["model"] for record in records)]
    read = f"{settings['text_tokens']:,} tokens in contexts of {settings['text_context']}"
    read += f"; caches: {settings['kv_passages']} passages, the newest {settings['window']} exact"
    how = f"On {settings['text']}: {read}. {_at(records, shown)}"
    return f"{markdown_table(head, lines)}\n\n{how}"


def chat(records: _Records) -> str:
    """KL divergence of quantized weights on the answers that each model gave; the machine and
    revision."""
    settings = _shared(records, "prompts_text", "chat_tokens", "chat_context")
    read = f"{settings['chat_tokens']:,} tokens in contexts of {settings['chat_context']}"
    rows = _scored(records, "weights", "chat")
    return f"{_table(records, 'weights', read, 'chat')} {_at(records, rows)}"


def passkeys(records: _Records) -> str:
    """Found passkeys by cache and length of the prompt; the machine and revision."""
    rows_of = [
        [r for r in record["results"]["rows"] if r["what"] == "passkey" and "failed" not in r]
        for record in records
    ]
    found: dict[str, dict[str, dict[int, float]]] = {}  # by cache, model, tokens
    for record, rows in zip(records, rows_of, strict=True):
        for row in rows:
            of_model = found.setdefault(row["name"], {})
            of_model.setdefault(record["settings"]["model"], {})[row["length"]] = row["found"]
    models = [record["settings"]["model"] for record in records]
    lengths = sorted({n for row in found.values() for of_model in row.values() for n in of_model})

    def cell(shares: dict[int, float]) -> str:
        return " / ".join(f"{shares[n]:.0f}" if n in shares else "-" for n in lengths)

    lines = [
        [_PEERS.get(name, f"`{name}`"), *(cell(by_model.get(model, {})) for model in models)]
        for name, by_model in found.items()
        if len(by_model) > 1 or len(records) == 1
    ]
    head = " / ".join(f"{n:,}" for n in lengths)
    caption = f"Passkeys found, percent of {DEPTHS}, in prompts of {head} tokens."
    return f"{markdown_table(['KV cache', *models], lines)}\n\n{caption} {_at(records, rows_of)}"


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
    how = f"{read}. {_at(records, compared)}"
    return f"{markdown_table(head, lines)}\n\nOn {settings['text']}: {how}"


def caches(records: _Records) -> str:
    """KL divergence of KV caches, on another page."""
    settings = _shared(records, "text", "kv_passages", "kv_prompt", "kv_scored", "sinks", "window")
    lengths = f"{settings['kv_scored']} tokens behind prompts of {settings['kv_prompt']}"
    read = f"{settings['kv_passages']} passages of {lengths}, {settings['sinks']} sinks"
    read += f", window {settings['window']}"
    table = _table(records, "kv", read)
    if "` behind " in table:
        more = _shared(records, "kv_long_passages")["kv_long_passages"]
        table += f" Behind longer prompts: {more} passages."
    rows = [row for each in _scored(records, "kv") for row in each]
    revisions = sorted({row["revision"][:DIGITS] for row in rows})
    return f"{table} Measured with the [weights](weights.md#quality), at {', '.join(revisions)}."


def _table(
    records: _Records,
    what: str,
    read: str,
    on: str = "text",
) -> str:
    """A line for each row that two models have, or the only one; what was scored; how exact it is.

    Args:
        what: of the rows that are shown.
        read: what was scored.
        on: which text: `text`, or `chat` for answers of the model itself.
    """
    found = _found(records, what, on)
    times = _times(found)
    names = _shown(times, records)
    head = ["KV cache" if what == "kv" else "weights", "bits"]
    head += [record["settings"]["model"] for record in records]
    cells = [
        [
            _label(name, times),
            span((rows[name][_BITS[what]] for rows in found if name in rows), "{:.2f}".format),
            *(_cell(rows[name]) if name in rows else "-" for rows in found),
        ]
        for name in names
    ]
    errors = standard_errors([row for rows in _scored(records, what, on) for row in rows])
    settings = records[0]["settings"]
    text = settings["text"]
    if on == "chat":
        text = f"each model's own answers to {settings['prompts_text']}"
    return f"{markdown_table(head, cells)}\n\nOn {text}: {read}. {errors}"


def _found(records: _Records, what: str, on: str = "text") -> list[dict[str, dict[str, Any]]]:
    """Rows of one kind of each record, by name."""
    return [
        {
            row_name(row).partition(":")[2]: row
            for row in record["results"]["rows"]
            if row["what"] == what and row.get("on", on) == on and "failed" not in row
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


def _scored(records: _Records, what: str, on: str = "text") -> list[list[dict[str, Any]]]:
    """Rows of each record that a table of one kind shows."""
    found = _found(records, what, on)
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


def _at(records: _Records, shown: _Rows) -> str:
    """Machines and revisions of rows, where another table of the page has the command."""
    machines = {m.get("gpu") or m["cpu"]: None for m in (record["machine"] for record in records)}
    revisions = sorted({row["revision"][:DIGITS] for rows in shown for row in rows})
    return f"{', '.join(machines)}, at {', '.join(revisions)}."


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
