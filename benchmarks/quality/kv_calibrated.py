"""Suite `quality-kv-calibrated`: what calibration gives a KV cache, measured as in `quality-kv`.

The mean of the keys is calibrated in every row of a universal or `learned-*` scheme, so that rows
of as many bits differ in what is learned besides. `mean 3 bits` has the schemes that `allocate_kv`
chooses for each layer. QServe's cache is measured without a window, before SmoothAttention is
folded into the model and after; CQ's codebooks of 2 bits with Fisher weights (without: in
`quality-kv`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq.cache.codebooks import KVCodebooks
from hf_vq.calibration.equivalent_transforms.smooth_attention import smooth_attention
from hf_vq.calibration.kv_allocation import allocate_kv
from hf_vq.calibration.kv_codebooks import calibrate_kv
from hf_vq.calibration.text import read_text
from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward
from hf_vq.evaluation.text import read_sequences, text_facts
from hf_vq.formats.catalog import of_layer

from . import baselines
from .banded import RoundTrip
from .kv import SINKS, Candidate, measured, round_trip, stored_bits

CALIBRATION_TOKENS = 8192
ALLOCATION_TOKENS = 4096
TARGET_BITS = 3
ALLOCATED = f"mean {TARGET_BITS} bits"
FISHER = ", Fisher weights"
QSERVE, SMOOTHED = "QServe KV4", "QServe KV4, SmoothAttention"
WINDOW, NO_WINDOW = ("window",), ("no window",)
# name -> cases
ROWS: dict[str, Sequence[str]] = {
    "u4": WINDOW,
    "learned-4": WINDOW,
    "u3": WINDOW,
    ALLOCATED: WINDOW,
    "u2": WINDOW,
    "learned-2": WINDOW,
    f"cq-2{FISHER}": WINDOW,
    "cq-1": WINDOW,
    QSERVE: NO_WINDOW,
    SMOOTHED: NO_WINDOW,
}
SCHEMES = tuple(ROWS)


def run(
    model_dir: str,
    text: str | Path,
    *,
    calibration: str | Path,
    tokens: int = 16384,
    context: int = 2048,
    schemes: Sequence[str] = SCHEMES,
    with_baselines: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure; `report` gets each row when it is known.

    Args:
        calibration: text to learn from; not `text`.
        schemes: names of rows.
        with_baselines: QServe's rows too.

    Returns:
        (settings, results) of the record.
    """
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=context, tokens=tokens)
    model = load_model(model_dir, dtype=torch.float32)
    reference = Reference(model_forward(model), sequences)
    results: dict[str, Any] = {"perplexity": reference.perplexity, "rows": []}
    calibrated = _Calibrated(model, read_text(calibration), tokenizer, min(tokens, context))
    for name in schemes:
        if name in (QSERVE, SMOOTHED) and not with_baselines:
            continue
        one = calibrated.candidate(name)
        cached = calibrated.smoothed() if name == SMOOTHED else model
        for row in measured(one, cached, reference):
            results["rows"].append(row)
            report(row)
    facts = text_facts(calibration)
    settings = {
        "model": Path(model_dir).name,
        **text_facts(text),
        "tokens": sequences.numel(),
        "context": context,
        "sinks": SINKS,
        "dtype": "float32",
        "calibration_text": facts["text"],
        "calibration_text_sha256": facts["text_sha256"],
        "calibration_tokens": CALIBRATION_TOKENS,
        "allocation_tokens": ALLOCATION_TOKENS,
        **calibrated.settings,
    }
    return settings, results


class _Calibrated:
    """KV codebooks learned for a model from a text, one row after the other.

    Attributes:
        settings: settings of the calibration, for the record.
    """

    def __init__(self, model: Any, text: str, tokenizer: Any, context: int) -> None:
        self.model, self.text, self.tokenizer = model, text, tokenizer
        self.options: dict[str, Any] = {"context": context, "progress": False}
        self.settings: dict[str, Any] = {}
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        self.head_dim = head_dim or config.hidden_size // config.num_attention_heads

    def candidate(self, name: str) -> Candidate:
        """Simulation that the row `name` measures."""
        if name in (QSERVE, SMOOTHED):
            bits = 4 + 32 / self.head_dim
            return Candidate(name, "baseline", bits, self._qserve, self._qserve, cases=ROWS[name])
        books = self._codebooks(name)
        layers = range(len(books))
        schemes = [of_layer(books.scheme, layer) for layer in layers]
        keys = [
            round_trip(
                s.key, centre=s.centre_keys, codebooks=books.keys, means=books.means,
                config=self.model.config,
            )
            for s in schemes
        ]  # fmt: skip
        values = [round_trip(s.value, centre=False, codebooks=books.values) for s in schemes]
        bits = [
            stored_bits(part, self.head_dim, side[layer])
            for layer in layers
            for part, side in (
                (schemes[layer].key, books.keys),
                (schemes[layer].value, books.values),
            )
        ]
        mean_bits = sum(bits) / len(bits)
        return Candidate(
            name, "calibrated", mean_bits, _each(keys), _each(values), cases=ROWS[name]
        )

    def _codebooks(self, name: str) -> KVCodebooks:
        arguments = self.model, self.text, self.tokenizer
        if name == ALLOCATED:
            found = allocate_kv(
                *arguments, target_bits=TARGET_BITS, tokens=ALLOCATION_TOKENS, **self.options
            )
            chosen = [of_layer(found.scheme, layer) for layer in range(len(found))]
            self.settings["allocation"] = [[s.key.notation(), s.value.notation()] for s in chosen]
            self.settings["sensitivity"] = found.sensitivity
            return found
        return calibrate_kv(
            self.model, name.removesuffix(FISHER), *arguments[1:], tokens=CALIBRATION_TOKENS,
            fisher=name.endswith(FISHER), **self.options,
        )  # fmt: skip

    def smoothed(self) -> Any:
        """The model with SmoothAttention."""
        model = copy.deepcopy(self.model)
        smooth_attention(
            model, self.text, self.tokenizer, tokens=CALIBRATION_TOKENS, **self.options
        )
        return model

    def _qserve(self, x: Tensor, layer: int) -> Tensor:
        return baselines.asymmetric(x, 4, self.head_dim)


def _each(of_layers: Sequence[RoundTrip]) -> RoundTrip:
    return lambda x, layer: of_layers[layer](x, layer)
