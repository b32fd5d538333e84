"""Tables of the README and the docs, written from the records and the catalogue.

A table stands between two marks and is never typed by hand:

    <!-- results:quality-weights -->
    ...
    <!-- /results:quality-weights -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_vq import env
from hf_vq.errors import VQError
from hf_vq.evaluation import demo, report
from hf_vq.evaluation.text_tables import markdown_table, significant
from hf_vq.formats.catalog import KV_SCHEMES, WEIGHT_SCHEMES
from hf_vq.formats.scheme import VQScheme

from ..cpu import load as cpu_load
from ..cuda import w4a8_block as cuda_w4a8_block
from ..fine_tuning import table as fine_tuning
from ..quality.models import table as models
from ..records import read_record, read_records
from ..serving import serve, vllm_engine
from . import (
    api,
    cpu,
    cpu_limits,
    cuda,
    cuda_limits,
    cuda_linear,
    cuda_w4a8,
    front,
    kv,
    passes,
    reliability,
)
from .provenance import source, standard_errors

_BLOCK = re.compile(
    r"(?P<open><!-- (?P<name>api|env|(?:results|schemes):[\w-]+) -->\n)(?P<body>.*?)"
    r"(?P<close><!-- /(?P=name) -->)",
    re.DOTALL,
)
HEAD_DIM = 128  # at which the bits of KV schemes are stated
_IN_RECORD = ("turboquant-4", "turboquant-3", "turboquant-2", "gptvq-2-int7", "vq-4 + KV u4")
_BESIDE_LEARNED = ("u4", "u2")  # in the table of learned caches
_KEYS_ONLY = "NoMAD d_sub 1, keys only"  # the only one that is shown of those of the paper
_ON_REAL_MODELS = ("`vq-4`", "`vq-3`", "`vq-2`", "NF4 g64")  # in docs/weights.md


def update(text: str) -> str:
    """A Markdown text with every marked table made anew.

    Raises:
        VQError: a mark has no table of that name, or its record is missing.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise VQError(f"no table {name!r}; there are: {', '.join(TABLES)}.")
        return f"{match['open']}{TABLES[name]()}\n{match['close']}"

    return _BLOCK.sub(replace, text)


def marked(text: str) -> list[str]:
    """Names of the tables that a text holds."""
    return [match["name"] for match in _BLOCK.finditer(text)]


def pages(root: Path) -> list[Path]:
    """The Markdown pages of a checkout that may hold tables."""
    found = root / "README.md", *sorted((root / "docs").rglob("*.md"))
    return [path for path in found if path.is_file()]


def write(root: Path, check: bool = False) -> list[str]:
    """Write the tables of a checkout, and the picture of the comparison with other libraries.

    Args:
        check: change nothing.

    Returns:
        the names of the files that were not current.
    """
    old = []
    for page in pages(root):
        before = page.read_text(encoding="utf-8")
        after = update(before)
        if after != before:
            old.append(page.name)
            if not check:
                page.write_text(after, encoding="utf-8")
    record, picture = read_record("compare"), root / "docs" / "compare.svg"
    if record is not None and picture.parent.is_dir():
        rows = record["results"]["rows"]
        if report.drawn_from(picture) != report.digest(rows):
            old.append(picture.name)
            if not check:
                report.plot(rows, picture, report.title(record["settings"]))
    return old


def weights_table(suite: str = "quality-weights", seconds: bool = False) -> str:
    """Quality of weight schemes, or of fine-tuned ones.

    Args:
        seconds: also the time to quantize.
    """
    if read_record(suite) is None:
        return (
            f"Not measured: `python -m benchmarks {suite} MODEL_DIR --text TEXT --calibration T`."
        )
    record = _record(suite)
    found = [
        row
        for row in record["results"]["rows"]
        if row["name"] not in _IN_RECORD and _label(row) not in _ON_REAL_MODELS
    ]
    head = ["weights", "bits", "KL divergence", "perplexity, %", *["seconds"] * seconds]
    rows = [
        [
            _label(row),
            f"{row['bits_per_weight']:.3f}",
            significant(row["kld"]),
            f"{row['change']:+.1f}",
            *[significant(row["quantize_seconds"], 2)] * seconds,
        ]
        for row in found
    ]
    original = f"The original's perplexity is {record['results']['perplexity']:.2f}."
    return f"{markdown_table(head, rows)}\n\n{original} {standard_errors(found)} {source(record)}"


def qoq_table() -> str:
    """Quality of QoQ, and the gain of its transforms."""
    if read_record("quality-qoq") is None:
        return (
            "Not measured: `python -m benchmarks quality-qoq MODEL_DIR --text TEXT "
            "--calibration TEXT`."
        )
    record = _record("quality-qoq")
    head = ["weights and activations", "KV cache", "bits", "KL divergence", "perplexity, %"]
    rows = [
        [
            row["name"].partition(", KV ")[0],
            "16 bits" if row["cache"] is None else f"`{row['cache']}`",
            f"{row['bits_per_weight']:.3f}",
            significant(row["kld"]),
            f"{row['change']:+.2f}",
        ]
        for row in record["results"]["rows"]
        if not row["name"].endswith(" alone")
    ]
    errors = standard_errors(record["results"]["rows"])
    return f"{markdown_table(head, rows)}\n\n{errors} {source(record)}"


def learned_kv_table() -> str:
    """Quality of learned KV codebooks, and of what needs none."""
    record, by_name = _kv_cases()
    head = ["KV cache", "bits", "KLD, window 64", "99th percentile", "KLD, no window"]
    rows = []
    for name, cases in by_name.items():
        learned = "shifted" not in cases and not name.startswith("NoMAD")
        if not (learned or name in (*_BESIDE_LEARNED, _KEYS_ONLY)):
            continue
        row = [_label(cases["window"]), f"{cases['window']['bits_per_element']:.3f}"]
        row += [_cell(cases, "window", "kld"), _cell(cases, "window", "kld_p99")]
        row.append(_cell(cases, "no window", "kld"))
        rows.append(row)
    return markdown_table(head, rows) + "\n\n" + source(record)


def _kv_cases() -> tuple[dict[str, Any], dict[str, dict[str, dict[str, Any]]]]:
    """The record of `quality-kv`, and its rows by name and case."""
    record = _record("quality-kv")
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record["results"]["rows"]:
        by_name.setdefault(row["name"], {})[row["case"]] = row
    return record, by_name


def models_table(
    table: Callable[[list[dict[str, Any]]], str], suite: str = models.SUITE, text: str = "--text",
    name: str | None = None,
) -> str:  # fmt: skip
    """Real models, from the records of all of them, whose names begin with `name`."""
    records = read_records(name or suite)
    if not records:
        return f"Not measured: `python -m benchmarks {suite} MODEL_DIR {text} TEXT`."
    return table(records)


def passes_table() -> str:
    """Quality with a residual pass, and without it."""
    record = _record("quality-passes")
    return passes.quality(record["results"]["rows"]) + "\n\n" + source(record)


def demo_table() -> str:
    """Output of `make demo`."""
    record = _record("demo")
    return markdown_table(*demo.cells(record["results"]["rows"])) + "\n\n" + source(record)


def weight_schemes_table() -> str:
    """The catalogue of weight schemes."""
    head = ["scheme", "VQ<x, y, z>", "codebook", "bits"]
    rows = []
    # turboquant-1 to -8 differ in one number, -1+1 to -4+4 in two: one line for all of them.
    alike = [
        [name for name in WEIGHT_SCHEMES if re.fullmatch(pattern, name)]
        for pattern in (r"turboquant-\d", r"turboquant-\d\+\d")
    ]
    last_of = {names[0]: names[-1] for names in alike}
    others = {name for names in alike for name in names[1:]}
    for name, s in WEIGHT_SCHEMES.items():
        if name in others:
            continue
        shown, notation, bits = name, s.notation(), f"{s.bits():g}"
        if name in last_of:
            last = WEIGHT_SCHEMES[last_of[name]]
            shown, bits = f"{name}` … `{last_of[name]}", f"{bits} … {last.bits():g}"
            notation = f"{notation}` … `{last.notation()}"
        rows.append([f"`{shown}`", f"`{notation}`", _codebook(s), bits])
    rotations: dict[str, list[str]] = {}
    for s in WEIGHT_SCHEMES.values():
        kind = "universal" if s.codebook == "universal" else "learned"
        rotations.setdefault(_rotation(s), []).append(kind)
    said = "; ".join(f"{' and '.join(dict.fromkeys(of))}: {how}" for how, of in rotations.items())
    return f"{markdown_table(head, rows)}\n\nRotation, by codebook: {said}."


def kv_schemes_table() -> str:
    """The catalogue of KV cache schemes."""
    head = ["scheme", "keys / values", "codebook", "keys centred", f"bits (head_dim {HEAD_DIM})"]
    rows = []
    for name, scheme in KV_SCHEMES.items():
        bits = (scheme.key.bits(HEAD_DIM) + scheme.value.bits(HEAD_DIM)) / 2
        codebooks = [_codebook(scheme.key), _codebook(scheme.value)]
        if codebooks[0] == codebooks[1]:
            del codebooks[1]
        rows.append(
            [
                f"`{name}`",
                " / ".join(
                    dict.fromkeys([f"`{scheme.key.notation()}`", f"`{scheme.value.notation()}`"])
                ),
                " / ".join(codebooks),
                "yes" if scheme.centre_keys else "no",
                f"{bits:g}",
            ]
        )
    return markdown_table(head, rows)


def compare_table(what: str) -> str:
    """Weights or caches of `hf-vq eval --compare`."""
    if read_record("compare") is None:
        return "Not measured yet: `hf-vq eval MODEL --compare --text TEXT --calibration TEXT`."
    record = _record("compare")
    rows = [row for row in record["results"]["rows"] if row["what"] == what]
    shown = [row for row in rows if "failed" not in row]
    missing = ", ".join(row["label"] for row in rows if "failed" in row)
    notes = f"{standard_errors(shown)} " + (f"Not measured: {missing}. " if missing else "")
    if what == "weights":  # the picture has them all
        return f"{report.PICTURE}{notes}{source(record)}"
    head = ["KV cache", "bits", "KL divergence", "99th percentile", "worst layer's logits"]
    cells = [
        [row["label"], f"{row['bits']:.3f}", significant(row["kld"]), significant(row["kld_p99"]),
         f"{row['correlation']:.4f}", f"{min(at['recall'] for at in row['recall']):.1%}"]
        for row in shown
    ]  # fmt: skip
    return f"{markdown_table([*head, 'least recall'], cells)}\n\n{notes}{source(record)}"


def _timed_table(suite: str, table: Callable[[list[dict[str, Any]]], str]) -> str:
    if read_record(suite) is None:
        return f"Not measured yet: `python -m benchmarks {suite}`."
    record = _record(suite)
    return table(record["results"]["rows"]) + "\n\n" + source(record)


def _table_of(suite: str, table: Callable[[list[dict[str, Any]]], str]) -> str:
    """A further table of a record whose source stands under another table of the page."""
    return table(_record(suite)["results"]["rows"])


def cpu_attention_table() -> str:
    """One token's attention on a CPU, with AVX-512 and with AVX2."""
    both = [_record(suite) for suite in ("cpu-attention", "cpu-attention-avx2")]
    table = cpu.attention(*(record["results"]["rows"] for record in both))
    return "\n\n".join([table, *map(source, both)])


TABLES: dict[str, Callable[[], str]] = {
    "results:readme-gpu": partial(_timed_table, "cuda-generate", front.gpu),
    "results:readme-cpu": partial(_timed_table, "cpu-generate", front.cpu),
    "results:readme-quality": partial(models_table, models.front),
    "results:quality-weights": weights_table,
    "results:quality-qoq": qoq_table,
    "results:quality-finetune": partial(weights_table, "quality-finetune", seconds=True),
    "results:quality-kv-learned": learned_kv_table,
    "results:quality-models-weights": partial(models_table, models.weights),
    "results:quality-models-chat": partial(models_table, models.chat, name=models.CHAT),
    "results:quality-models-passkeys": partial(models_table, models.passkeys, name=models.PASSKEYS),
    "results:quality-models-embeddings": partial(models_table, models.embeddings),
    "results:quality-models-int8": partial(models_table, models.int8),
    "results:quality-models-kv": partial(models_table, models.caches),
    "results:finetune": partial(models_table, fine_tuning.training, "finetune", "--data"),
    "results:finetune-merge": partial(models_table, fine_tuning.merging, "finetune", "--data"),
    "results:demo": demo_table,
    "results:compare-weights": lambda: compare_table("weights"),
    "results:compare-kv": lambda: compare_table("cache"),
    "results:cpu-linear": partial(_timed_table, "cpu-linear", cpu.linear),
    "results:cpu-scalars": partial(_table_of, "cpu-linear", cpu.scalars),
    "results:cpu-w4a8": partial(_timed_table, "cpu-w4a8", cpu.w4a8),
    "results:cpu-load": partial(_timed_table, "cpu-load", cpu_load.table),
    "results:cpu-attention": cpu_attention_table,
    "results:cpu-models": lambda: cpu.models(read_records("cpu-models")),
    "results:cpu-calibrate": partial(_timed_table, "cpu-calibrate", cpu.calibrate),
    "results:cpu-limits": lambda: cpu_limits.table(_records(cpu_limits.SUITES)),
    "results:cuda-limits": lambda: cuda_limits.linear_table(_records(cuda_limits.LINEAR_SUITES)),
    "results:quality-passes": passes_table,
    "results:cuda-passes": lambda: _timed_table("cuda-passes", passes.kernels),
    "results:cuda-offload": lambda: _timed_table("cuda-offload", passes.offload),
    "results:cuda-linear": partial(_timed_table, "cuda-linear", cuda_linear.speedups),
    "results:cuda-int8": partial(_timed_table, "cuda-int8", cuda_linear.int8),
    "results:cuda-mechanisms": partial(_timed_table, "cuda-linear", cuda_linear.mechanisms),
    "results:cuda-peers": lambda: _timed_table("cuda-peers", cuda.peers),
    "results:cuda-paper-mechanisms": lambda: _timed_table("cuda-mechanisms", cuda.rungs),
    "results:cuda-generate": lambda: _timed_table("cuda-generate", cuda.generate),
    "results:cuda-quantize": lambda: _timed_table("cuda-quantize", cuda.quantize),
    "results:cuda-calibrate": lambda: _timed_table("cuda-calibrate", cuda.calibrate),
    "results:cuda-crossover": lambda: _timed_table("cuda-crossover", cuda.crossover),
    "results:cuda-w4a8": partial(_timed_table, "cuda-w4a8", cuda_w4a8.table),
    "results:cuda-w4a8-block": partial(_timed_table, "cuda-w4a8-block", cuda_w4a8_block.table),
    "results:serve": partial(_timed_table, "serve", serve.table),
    "results:serve-vllm": partial(_timed_table, "serve-vllm", vllm_engine.table),
    "results:cuda-attention-short": partial(_table_of, "cuda-attention", kv.short),
    "results:cuda-rotary": partial(_table_of, "cuda-attention", kv.rotary),
    "results:cuda-store": partial(_table_of, "cuda-attention", kv.store),
    **{f"results:{name}": partial(_timed_table, *of) for name, of in kv.TABLES.items()},
    "results:fuzz": reliability.campaign,
    "results:soak": reliability.soak,
    "results:sweep": reliability.sweep,
    "results:digests": reliability.digests,
    "results:sanitizers": reliability.sanitizers,
    "results:architectures": reliability.architectures,
    "schemes:weights": weight_schemes_table,
    "schemes:kv": kv_schemes_table,
    "env": env.table,
    "api": api.reference,
}


def _record(suite: str) -> dict[str, Any]:
    record = read_record(suite)
    if record is None:
        raise VQError(f"no record of {suite}: run `python -m benchmarks {suite}` first.")
    if not record.get("complete", True):
        raise VQError(f"the record of {suite} is of a run that did not end: run it again.")
    return record


def _records(suites: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {suite: _record(suite) for suite in suites}


def _label(row: dict[str, Any]) -> str:
    how = {"calibrated": ", calibrated", "block": ", fine-tuned by block",
           "model": ", fine-tuned as a whole"}  # fmt: skip
    return (
        row["name"] if row["kind"] == "baseline" else f"`{row['name']}`{how.get(row['kind'], '')}"
    )


def _cell(cases: dict[str, dict[str, Any]], case: str, key: str) -> str:
    return significant(cases[case][key]) if case in cases else "-"


def _codebook(scheme: VQScheme) -> str:
    if scheme.lattice:
        return "universal (E8P)"
    integers = f", integers of {scheme.codebook_bits} bits" if scheme.largest_entry else ""
    learned = {
        "tensor": f"learned per tensor{integers}",
        "channel_group": "learned per channel group",
        "integers": "integers, scale and zero",
    }
    if scheme.codebook == "tile":
        return f"learned per {scheme.tile[0]} x {scheme.tile[1]} tile"
    return learned.get(scheme.codebook, "universal")


def _rotation(scheme: VQScheme) -> str:
    if scheme.rotation == "none":
        return "none"
    return f"{scheme.rotation.replace('_', ' ')} {scheme.rotation_block or 'row'}"
