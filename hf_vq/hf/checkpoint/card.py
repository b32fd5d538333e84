"""The model card that is saved with a quantized model."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from jinja2 import Environment, StrictUndefined, Template

from ...formats.catalog import scheme_name
from ...nn.replace import vq_modules
from ...paths import card_template
from ..calibration_options import OWN_WORDS, RANDOM
from .headers import storage

CARD = "README.md"
_MARKER = "<!-- Written by hf_vq. Delete this line to keep your own text: hf_vq then leaves it. -->"
_TASKS = {
    "ForCausalLM": "text-generation", "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask", "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}  # fmt: skip
"""The Hub's name of what a model is for, by the end of its class's name, where that says it."""

_TOKENIZER = "tokenizer_config.json"
_TAGS = ["hf_vq", "vq", "vector-quantization"]


def is_ours(text: str) -> bool:
    """True if hf_vq wrote the card and its marker line is still there."""
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
    """Names of classes in the order of the search; cached, as `dir(transformers)` takes 0.5 s+."""
    autos = [name for name in dir(transformers) if name.startswith("AutoModel")]
    # Many models appear under ForPreTraining once more.
    return sorted(autos, key=lambda name: (name == "AutoModelForPreTraining", name))


def model_card(model: Any, folder: Path | None = None) -> str:
    """The text of a quantized model's `README.md`: how it was made and loads, what was measured.

    Its words are those of `model_cards/template.md.j2`.

    Args:
        folder: where the model is saved: it may hold a tokenizer.
    """
    config = model.config.quantization_config
    provenance = config.provenance or {}
    base = provenance.get("base_model")
    bits, weights = storage(model)
    tags = list(dict.fromkeys([*_TAGS, *(model.model_tags or [])]))
    evaluation = provenance.get("evaluation")
    data = ModelCardData(base_model=base, library_name="transformers", tags=tags)
    if evaluation:
        # The Hub shows it next to a model; by its specification, results need a name.
        data.model_name = f"{evaluation['model']} ({config.scheme_name})"
        data.eval_results = _results(evaluation)
    if task := next((t for end, t in _TASKS.items() if type(model).__name__.endswith(end)), None):
        data.pipeline_tag = task
    for key, value in _facts(model).items():
        data[key] = value
    if base:
        data["base_model_relation"] = "quantized"
    errors = {name: 100 * e for name, e in provenance.get("relative_error", {}).items()}
    # A source that is a folder is on no Hub: the name that it was measured by, else its class.
    name, kind = base or (evaluation or {}).get("model"), type(model).__name__
    return _template().render(
        metadata=data.to_yaml(),
        marker=_MARKER,
        name=name or kind,
        source=f"[{base}](https://huggingface.co/{base})" if base else name or f"a `{kind}`",
        loader=loading_class(model),
        chats=data.pipeline_tag == "text-generation" and _has_chat_template(model, folder),
        schemes=_schemes(model),
        bits_per_weight=bits / weights,
        weights=weights,
        megabytes=bits / 8e6,
        errors=errors,
        mean_error=sum(errors.values()) / len(errors) if errors else 0.0,
        activations=_activations(provenance),
        calibration=_calibration(config),
        version=provenance.get("hf_vq", ""),
        evaluation=evaluation,
    )


def _facts(model: Any) -> dict[str, Any]:
    """License and language, from the card of the folder that a model was loaded from."""
    card = Path(getattr(model.config, "name_or_path", None) or "") / CARD
    try:
        found = ModelCard.load(card).data if card.is_file() else ModelCardData()
    except Exception:  # somebody wrote it: YAML that cannot be parsed, another encoding, ..
        return {}
    known = {key: found.get(key) for key in ("license", "license_name", "license_link", "language")}
    return {key: value for key, value in known.items() if value}


def _has_chat_template(model: Any, folder: Path | None) -> bool:
    """True if the tokenizer of a model has one: in the folder of it, or of what it was loaded from,
    or in the cache of the Hub."""
    source = getattr(model.config, "name_or_path", None) or ""
    folders = [place for place in (folder, Path(source)) if place is not None and place.is_dir()]
    found = {
        name: [place / name for place in folders] for name in ("chat_template.jinja", _TOKENIZER)
    }
    if source and not Path(source).exists():
        commit = getattr(model.config, "_commit_hash", None)
        for name, paths in found.items():
            with contextlib.suppress(HFValidationError):  # a folder that is gone
                cached = try_to_load_from_cache(source, name, revision=commit)
                paths += [Path(cached)] if isinstance(cached, str) else []
    template, tokenizer = found.values()
    if any(path.is_file() for path in template):
        return True
    texts = (
        path.read_text(encoding="utf-8", errors="replace") for path in tokenizer if path.is_file()
    )
    return any('"chat_template": ' in text for text in texts)


@functools.cache
def _template() -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string(card_template().read_text(encoding="utf-8"))


def _schemes(model: Any) -> str:
    """The schemes of a model's layers, and how many have each where there are several."""
    config = model.config.quantization_config
    if config.layouts:
        return f"as published: {config.scheme_name}"
    counts = Counter(module.scheme for module in vq_modules(model).values())
    shown = {
        s: f"`{scheme_name(s) or s.spec()}`, {s.notation()}"
        + (", activation-aware" if s.is_scaled else "")
        for s in counts
    }
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


def _activations(provenance: dict[str, Any]) -> str | None:
    """The tokens that the layers' inputs are of, and how many tensors know them if some do not;
    None where none were read, or none helped."""
    facts, count = provenance.get("activations"), len(provenance.get("relative_error", {}))
    if not facts or not facts.get("layers", count):  # older files do not say how many
        return None
    words, text = {OWN_WORDS: "that the model wrote", RANDOM: "drawn at random"}, facts["text"]
    tokens = f"{facts['tokens']:,} tokens {words.get(text, f'of `{text}`')}"
    fell_back = "failed" in facts or ("layers" in facts and facts["fallbacks"])
    return f"{tokens}, in {facts['layers']} of {count} tensors" if fell_back else tokens


def _calibration(config: Any) -> dict[str, Any] | None:
    """Facts about the calibration for the card; None if the model was not calibrated."""
    facts = (config.provenance or {}).get("calibration")
    if not facts:
        return None
    options, errors = config.calibration, facts.get("output_error", {}).values()
    own = options["text"] == OWN_WORDS
    return {
        "text": "text that the model generates" if own else f"`{options['text']}`",
        "tokens": options["tokens"],
        "mean_error": 100 * sum(errors) / max(1, len(errors)),
    }
