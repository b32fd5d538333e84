"""Suite `quality-passes`: what two passes cost in quality, and the first one alone.

As `quality-weights` measures schemes; a row `first pass of S` is the model that was saved with S,
and loaded without its second pass.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.storage import model_storage
from hf_vq.evaluation.text import read_sequences, text_facts
from hf_vq.hf.config import VQConfig

from .weights import BATCH

SCHEMES = ("turboquant-4+4", "turboquant-4+2", "turboquant-8")


def run(
    model_dir: str,
    text: str | Path,
    *,
    tokens: int = 32768,
    context: int = 1024,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known. There are no baselines.

    Returns:
        (settings, results) of the record.
    """
    sequences = read_sequences(load_tokenizer(model_dir), text, context=context, tokens=tokens)
    settings: dict[str, Any] = {"model": Path(model_dir).name, **text_facts(text)}
    settings |= {"tokens": sequences.numel(), "context": context, "dtype": "float32"}
    original = load_model(model_dir, dtype=torch.float32)
    reference = Reference(model_forward(original), sequences)
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    for name in schemes:
        for row in _rows(model_dir, name, reference):
            results["rows"].append(row)
            report(row)
    return settings, results


def _rows(model_dir: str, name: str, reference: Reference) -> Iterator[dict[str, Any]]:
    model = load_model(model_dir, dtype=torch.float32, config=VQConfig(name, activations=None))
    yield _row(name, model, reference)
    if model.config.quantization_config.vq_scheme.two_passes:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            with warnings.catch_warnings():  # of Transformers: the rest of the config is the file's
                warnings.simplefilter("ignore", UserWarning)
                first = load_model(folder, dtype=torch.float32, config=VQConfig(pass2="absent"))
            yield _row(f"first pass of {name}", first, reference)


def _row(name: str, model: Any, reference: Reference) -> dict[str, Any]:
    found = score(model_forward(model), reference, BATCH).to_dict()
    bits = model_storage(model).bits_per_weight
    return {"name": name, "kind": "scheme", "bits_per_weight": bits, **found}
