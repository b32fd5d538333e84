"""Suite `quality-qoq`: what QoQ costs in quality, and what each of its transforms brings.

Weights of 4 bits and activations of 8, `from_pretrained(..., VQConfig(scheme, calibration=...))` in
float32: rounded to nearest, with each transform alone, with all of them, and with all but rotation.
Then with QServe's KV cache: every key and value is read back from 4 bits, the query's own
token too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq.calibration.equivalent_transforms.smooth_attention import smooth_attention
from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.storage import model_storage
from hf_vq.evaluation.text import read_sequences, text_facts
from hf_vq.hf.calibration_options import TRANSFORMS
from hf_vq.hf.config import VQConfig

from . import baselines
from .banded import Simulation, simulate

SCHEMES = ("qoq-w4a8-g128", "qoq-w4a8")
DETAILED = "qoq-w4a8-g128"  # of which each transform is measured
CACHE, CACHE_BITS = "qserve-kv4", 4
CALIBRATION_TOKENS = 1 << 14
BATCH = 4  # sequences per forward
# What changes the model's weights; SmoothAttention changes its keys alone.
CHANGING = tuple(name for name in TRANSFORMS if name != "smooth_attention")
LEFT_OUT = ("rotate",)  # of all, too: what it brings depends on how weights are rounded


@dataclass(frozen=True)
class Step:
    """One model to measure, with and without a cache.

    Args:
        name: of its row.
        scheme: scheme of its weights; None leaves them unchanged.
        transforms: those that are on; None is round to nearest, without calibration.
        plain: whether it is measured without a cache.
        cached: whether it is measured with one.
    """

    name: str
    scheme: str | None
    transforms: tuple[str, ...] | None
    plain: bool = True
    cached: bool = False


def steps(schemes: Sequence[str]) -> Iterator[Step]:
    """All models, in the order of their rows."""
    for scheme in schemes:
        detailed = scheme == DETAILED
        usual = tuple(t for t in TRANSFORMS if t != "reorder" or detailed)
        yield Step(f"{scheme}, round to nearest", scheme, None)
        for one in CHANGING if detailed else ():
            yield Step(f"{scheme}, {one} alone", scheme, (one,))
        yield Step(f"{scheme}, all", scheme, usual, cached=detailed)
        for one in LEFT_OUT if detailed else ():
            left = tuple(t for t in usual if t != one)
            yield Step(f"{scheme}, all but {one}", scheme, left)
    yield Step("original", None, (), plain=False, cached=True)
    yield Step("original, smooth_attention", None, ("smooth_attention",), False, cached=True)


def run(
    model_dir: str,
    text: str | Path,
    *,
    calibration: str | Path,
    tokens: int = 8192,
    context: int = 1024,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    take_up: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda settings: (),
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Args:
        calibration: UTF-8 text that is calibrated on.
        schemes: of SCHEMES.
        with_baselines: also the original's weights with the cache.
        take_up: given the settings, the rows of a run with the same that was stopped.

    Returns:
        (settings, results) of the record.
    """
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=context, tokens=tokens)
    settings: dict[str, Any] = {"model": Path(model_dir).name, **text_facts(text)}
    settings |= {"tokens": sequences.numel(), "context": context, "dtype": "float32"}
    settings |= {f"calibration_{k}": fact for k, fact in text_facts(calibration).items()}
    settings["calibration_tokens"] = CALIBRATION_TOKENS
    load = partial(load_model, model_dir, dtype=torch.float32)
    reference = Reference(model_forward(load()), sequences)
    read = {"text": calibration, "tokens": CALIBRATION_TOKENS, "context": context}
    learned_from = read_sequences(
        tokenizer, calibration, context=context, tokens=CALIBRATION_TOKENS
    )
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    kept = {row["name"]: row for row in take_up(settings)}
    for step in steps(schemes):
        if step.scheme is None and not with_baselines:
            continue
        names = [step.name] * step.plain + [f"{step.name}, KV {CACHE}"] * step.cached
        found = [kept[name] for name in names if name in kept]
        if len(found) != len(names):
            found = list(_rows(step, load, read, learned_from, reference))
        for row in found:
            results["rows"].append(row)
            report(row)
    return settings, results


def _rows(
    step: Step,
    load: Callable[..., Any],
    read: dict[str, Any],
    learned_from: Tensor,
    reference: Reference,
) -> Iterator[dict[str, Any]]:
    start, bits = time.perf_counter(), 16.0
    if step.scheme is None:
        model = load()
        if step.transforms:
            smooth_attention(model, learned_from, tokens=learned_from.numel(), progress=False)
    else:
        options = None
        if step.transforms is not None:
            on = {name: name in step.transforms for name in TRANSFORMS}
            options = {**read, "transforms": on}
        model = load(config=VQConfig(step.scheme, calibration=options))
        bits = model_storage(model).bits_per_weight
    about = {
        "scheme": step.scheme,
        "kind": "scheme" if step.transforms is None else "calibrated",
        "transforms": None if step.transforms is None else list(step.transforms),
        "bits_per_weight": bits,
        "quantize_seconds": time.perf_counter() - start,
    }
    if step.plain:
        found = score(model_forward(model), reference, BATCH).to_dict()
        yield {"name": step.name, **about, "cache": None, **found}
    if step.cached:

        def stored(x: Tensor, layer: int) -> Tensor:
            return baselines.asymmetric(x, CACHE_BITS, x.shape[-1])

        with simulate(model, Simulation(stored, stored, window=0, sinks=0)):
            found = score(model_forward(model), reference).to_dict()
        yield {"name": f"{step.name}, KV {CACHE}", **about, "cache": CACHE, **found}
