"""The model card that is saved with a quantized model."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCardData

from ..formats.catalog import scheme_name
from ..nn.replace import vq_modules
from .calibration.text import OWN_WORDS
from .checkpoint import storage

CARD = "README.md"
_MARKER = "<!-- Written by hf_vq. Delete this line to keep your own text: hf_vq then leaves it. -->"
_TAGS = ["hf_vq", "vq", "vector-quantization"]


def is_ours(text: str) -> bool:
    """Whether a card was written by hf_vq and not edited into a person's own."""
    return _MARKER in text


def loading_class(model: Any) -> str:
    """Name of the class in `transformers` that loads a saved `model`: an Auto class if one does."""
    kind = type(model)
    for name in _auto_classes():
        mapping = getattr(getattr(transformers, name), "_model_mapping", None)
        found = mapping.get(type(model.config), ()) if mapping is not None else ()
        if kind in (found if isinstance(found, tuple) else (found,)):
            return name
    if hasattr(transformers, kind.__name__):
        return kind.__name__
    return "AutoModelForCausalLM" if kind.__name__.endswith("ForCausalLM") else "AutoModel"


@functools.cache
def _auto_classes() -> list[str]:
    """Names in the order they are asked in. `dir(transformers)` takes most of a second."""
    autos = [name for name in dir(transformers) if name.startswith("AutoModel")]
    # Many models appear under ForPreTraining once more.
    return sorted(autos, key=lambda name: (name == "AutoModelForPreTraining", name))


def model_card(model: Any) -> str:
    """The text of a quantized model's `README.md`: how it was made and loads, what was measured."""
    config = model.config.quantization_config
    provenance = config.provenance or {}
    base = provenance.get("base_model")
    bits, weights = storage(model)
    tags = list(dict.fromkeys([*_TAGS, *(model.model_tags or [])]))
    evaluation = provenance.get("evaluation")
    data = ModelCardData(base_model=base, library_name="transformers", tags=tags)
    if evaluation:
        # What the Hub shows beside a model; by its specification, results need a name.
        data.model_name = f"{evaluation['model']} ({config.scheme_name})"
        data.eval_results = _results(evaluation)
    if base:
        data["base_model_relation"] = "quantized"
    errors: dict[str, float] = provenance.get("relative_error", {})
    name = base or "a Transformers model"
    source = f"[{base}](https://huggingface.co/{base})" if base else name
    loader = loading_class(model)
    rows = "\n".join(f"| `{layer}` | {100 * error:.3g} % |" for layer, error in errors.items())
    mean = 100 * sum(errors.values()) / len(errors) if errors else 0.0
    calibrated = _calibrated(config)
    return f"""---
{data.to_yaml()}
---
{_MARKER}

# {name}, quantized to {bits / weights:.2f} bits

The linear layers of {source} stored as indices into codebooks (vector quantization) by
[hf_vq](https://pypi.org/project/hf-vq), and computed on in that form.

```python
# pip install hf_vq
from transformers import {loader}

model = {loader}.from_pretrained("<this repository>")
```

| | |
|---|---|
| scheme | {_schemes(model)} |
| bits per weight, stored | {bits / weights:.3f} |
| quantized weights | {weights:,} |
| size of the quantized layers | {bits / 8e6:,.1f} MB |
| mean squared error of a layer, relative | {mean:.3g} % |
{calibrated}| hf_vq | {provenance.get("hf_vq", "")} |
{_measured(evaluation)}
<details><summary>Squared error of every layer, relative to its squared norm</summary>

| layer | error |
|---|---|
{rows}

</details>
"""


def _schemes(model: Any) -> str:
    """The schemes of a model's layers, and how many have each where there are several."""
    config = model.config.quantization_config
    if config.layouts:
        return f"as published: {config.scheme_name}"
    counts = Counter(module.scheme for module in vq_modules(model).values())
    shown = {s: f"`{scheme_name(s) or s.spec()}`, {s.notation()}" for s in counts}
    if len(counts) == 1:
        return next(iter(shown.values()))
    return "; ".join(f"{shown[s]}, in {count} layers" for s, count in counts.most_common())


def _results(evaluation: dict[str, Any]) -> list[EvalResult]:
    """The numbers of an evaluation as the Hub's model-index has them."""
    names = {"perplexity": "Perplexity", "kld": "KL divergence from the original (nats)"}
    names |= {"top1": "Top-1 agreement with the original (%)"}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=f"{evaluation['text']}, {evaluation['tokens']:,} tokens",
            metric_type=key,
            metric_name=name,
            metric_value=round(evaluation[key], 5),
        )
        for key, name in names.items()
    ]


def _measured(evaluation: dict[str, Any] | None) -> str:
    """The section about what was measured, if something was."""
    if not evaluation:
        return ""
    e = evaluation
    return f"""
## Measured against the original

| | |
|---|---|
| perplexity | {e["perplexity"]:.3f} ({e["change"]:+.2f} % ± {e["change_se"]:.2f}) |
| KL divergence, mean | {e["kld"]:.5f} ± {e["kld_se"]:.5f} nats |
| KL divergence, 99th percentile | {e["kld_p99"]:.4f} nats |
| top-1 agreement | {e["top1"]:.2f} % ± {e["top1_se"]:.2f} |

{e["tokens"]:,} tokens of {e["text"]} (SHA-256 {e["text_sha256"]}...), context {e["context"]:,},
by `hf-vq eval`, hf_vq {e["hf_vq"]}, on {e["date"]}.
"""


def _calibrated(config: Any) -> str:
    """Rows of the table about the calibration, if there was one."""
    facts = (config.provenance or {}).get("calibration")
    if not facts:
        return ""
    options, errors = config.calibration, facts["output_error"].values()
    own = options["text"] == OWN_WORDS
    text = "what the model writes by itself" if own else f"`{options['text']}`"
    mean = 100 * sum(errors) / max(1, len(errors))
    return (
        f"| calibrated on | {text}, {options['tokens']:,} tokens |\n"
        f"| mean squared error of a layer's outputs on it, relative | {mean:.3g} % |\n"
    )
