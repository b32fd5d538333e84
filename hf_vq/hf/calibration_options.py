"""Calibration options of `VQConfig`: names, defaults, checks, and the schemes a layer may get.

The calibration itself is in `hf_vq/calibration`, a layer above this one.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.utils import logging

from ..errors import VQCalibrationError, VQConfigError, shown
from ..formats.catalog import LinearScheme, linear_scheme, scheme_name, weight_scheme
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme

if TYPE_CHECKING:
    from .config import VQConfig

logger = logging.get_logger("hf_vq")

OWN_WORDS = "model"
"""Value of `text` that means: calibrate on text that the model generates."""

AUTO = "auto"
"""Value of `activations` that means: OWN_WORDS where the model can run once, else None."""

RANDOM = "random"
"""Value of `activations` that means: read random tokens."""

TOKEN_IDS = "token ids"
"""What a record calls tokens that were given as such."""

SHIPPED = "default"
"""Value of `text` that means: calibrate on the text that is shipped with the package."""

TOKENS, CPU_TOKENS = 1 << 17, 1 << 14
"""Default of `tokens`: on a GPU, and on a CPU, where more take hours."""

MIN_CONTEXT = 16
"""Smallest `context`, in tokens of a sequence."""

EQUIVALENT_TRANSFORMS = ("rotate", "smooth_attention", "smooth_outputs", "reorder")
"""Equivalent transforms: they change the weights before rounding, not the model's outputs."""

TRANSFORMS = (*EQUIVALENT_TRANSFORMS, "clip", "feedback")
"""All transforms. `clip` searches clipping ranges by output error, `feedback` feeds rounding errors
back as GPTQ does (`fit/qoq_calibrated.py`)."""

TOKENS = 1 << 17
"""Tokens to calibrate on, unless `tokens` says so."""

_TEXTS = (".txt", ".md", ".rst", ".json", ".jsonl", ".csv", ".xml", ".html")  # suffixes of files

FINETUNE = ("block", "model")

CANDIDATES = ("vq-2", "vq-3", "vq-4")
"""Default of `candidates`."""

MOST_BITS = 16
"""Largest `target_bits`."""

_ADVISE = {False: 3.5, True: 2.5}  # bits per weight, without and with activations
_advised: set[str] = set()


def checked_transforms(given: object, scheme: QoQScheme) -> dict[str, bool]:
    """Complete `calibration["transforms"]`: a bool for each name of TRANSFORMS.

    Defaults are those of DeepCompressor's recipes for QServe: all on, except `reorder` where one
    scale covers a whole row.

    Raises:
        VQConfigError: `given` is not a dict of these names and booleans.
    """
    usual = {name: name != "reorder" or scheme.group > 0 for name in TRANSFORMS}
    if given is None:
        return usual
    example = 'Write e.g. {"rotate": False}.'
    if not isinstance(given, dict) or not all(isinstance(on, bool) for on in given.values()):
        raise VQConfigError(
            "calibration['transforms'] must be a dict of names and true or false; got "
            f"{shown(given)}. {example}"
        )
    if unknown := sorted(map(str, set(given) - set(TRANSFORMS))):
        raise VQConfigError(
            f"calibration['transforms'] has no {', '.join(map(repr, unknown))}. Known: "
            f"{', '.join(TRANSFORMS)}."
        )
    return {**usual, **given}


def choices(config: VQConfig, layer: str) -> list[LinearScheme]:
    """List the candidate schemes of a layer; empty if `config` chooses no schemes."""
    if layer in (config.layers or {}) and config.target_bits is not None:
        return [config.scheme_of(layer)]
    return [weight_scheme(name) for name in config.candidates or ()]


def check_calibration(calibration: object) -> dict[str, Any] | None:
    """Check the calibration options and fill in defaults; None stays None."""
    if calibration is None:
        return None
    given = {"text": calibration} if isinstance(calibration, (str, os.PathLike)) else calibration
    if not isinstance(given, dict):
        raise VQConfigError(
            f"calibration must be a text file, a data set, 'model' or a dict; got {shown(given)}."
        )
    known = ("text", "tokens", "context", "damping", "finetune", "move_codes", "transforms",
             "device", "resume")  # fmt: skip
    if unknown := sorted(map(str, set(given) - set(known))):
        raise VQConfigError(
            f"calibration has no option {', '.join(map(repr, unknown))}. Known: {', '.join(known)}."
        )
    found = {"tokens": None, "context": None, **given}
    for name in ("text", "device", "resume"):
        if name in found or name == "text":
            found[name] = _check_name(f"calibration[{name!r}]", found.get(name))
    if found["tokens"] is not None:
        check_int("calibration['tokens']", found["tokens"], MIN_CONTEXT, 2**31)
    if found["context"] is not None:
        check_int("calibration['context']", found["context"], MIN_CONTEXT, 2**31)
    if found.get("finetune") is None:
        found.pop("finetune", None)
    elif found["finetune"] not in FINETUNE:
        raise VQConfigError(
            f"calibration['finetune'] must be 'block' or 'model'; got {shown(found['finetune'])}."
        )
    if "move_codes" in found and (
        not isinstance(found["move_codes"], bool) or "finetune" not in found
    ):
        raise VQConfigError(
            "calibration['move_codes'] must be true or false, together with 'finetune'; got "
            f"{shown(found['move_codes'])}."
        )
    if (damping := found.get("damping")) is None:
        found.pop("damping", None)
    elif isinstance(damping, bool) or not isinstance(damping, (int, float)) or not 0 < damping <= 1:
        raise VQConfigError(
            f"calibration['damping'] must be above 0 and at most 1; got {shown(damping)}."
        )
    return found


def with_transforms(
    options: dict[str, Any], schemes: list[LinearScheme], recorded: bool
) -> dict[str, Any]:
    """Complete `transforms` if a layer may get a QoQ scheme, else check that there are none.

    Args:
        recorded: the model is already quantized; transforms that it does not name were not made.
    """
    found, given = dict(options), options.get("transforms")
    scheme = next((scheme for scheme in schemes if isinstance(scheme, QoQScheme)), None)
    if scheme is not None:
        if "finetune" in options:
            raise VQConfigError(
                f"calibration['finetune'] moves codebooks, and {scheme.spec()} has none: leave it "
                "out."
            )
        if recorded and given is None:
            return found
        return {**found, "transforms": checked_transforms(given, scheme)}
    if given is not None:
        raise VQConfigError(
            "calibration['transforms'] need a QoQ scheme: give them with a scheme such as "
            "'qoq-w4a8-g128'."
        )
    found.pop("transforms", None)
    return found


def reads_activations(scheme: LinearScheme) -> bool:
    """True for a scheme that rotates, and whose codebook no weight decides: `activations` help."""
    return (
        isinstance(scheme, VQScheme)
        and scheme.codebook == "universal"
        and scheme.rotation != "none"
    )


def check_activations(activations: object) -> str | list[Any] | None:
    """Check `activations`; token ids become lists, so that a config is JSON.

    Raises:
        VQConfigError: it is neither a name nor integers [tokens] or [sequences, tokens].
    """
    if activations is None:
        return None
    if isinstance(activations, (str, os.PathLike)):
        return _check_name("activations", activations)
    given = activations.tolist() if isinstance(activations, Tensor) else activations
    listed = list(given) if isinstance(given, (list, tuple)) else []
    nested = all(isinstance(row, (list, tuple)) for row in listed)
    rows = [list(row) for row in listed] if nested else [listed]
    tokens = [token for row in rows for token in row]
    whole = all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    if not whole or len({*map(len, rows)}) > 1 or len(tokens) < MIN_CONTEXT:
        raise VQConfigError(
            f"activations must be {AUTO!r}, {OWN_WORDS!r}, {RANDOM!r}, a text file, a data set, "
            f"None, or token ids [tokens] or [sequences, tokens], {MIN_CONTEXT} at least; got "
            f"{shown(activations)}."
        )
    return rows


def leave_out_activations(config: VQConfig, why: str | None = None, *, once: bool = False) -> None:
    """Quantize without data, say why (`once` in a process), and advise calibration where that loses
    much quality."""
    config.activations = None
    advise_calibration(config)
    if why:
        say = logger.warning_once if once else logger.warning
        say("hf_vq: the layers are quantized without activations: %s.", why)


def advise_calibration(config: VQConfig) -> None:
    """Warn, once for each scheme, if a model loses much quality without calibration."""
    scheme, name = config.vq_scheme, config.scheme_name
    reads = config.activations is not None and reads_activations(scheme)
    if scheme.bits() < _ADVISE[reads] and name not in _advised:
        _advised.add(name)
        without = "calibration" if reads else "activations or calibration"
        warnings.warn(
            f"{name} loses much quality without {without}: hf-vq calibrate MODEL OUT --scheme "
            f"{name}, or VQConfig({name!r}, calibration={OWN_WORDS!r}). Or use more bits.",
            stacklevel=3,
        )


def check_text(source: object) -> None:
    """Raise if a text is named like a file, and there is none: a data set has another name.

    Raises:
        VQCalibrationError: there is no such file.
    """
    if not isinstance(source, (str, os.PathLike)):
        return
    path = Path(source)
    is_path = (
        path.is_absolute() or path.suffix in _TEXTS or os.fspath(source).startswith((".", "~"))
    )
    if is_path and not path.expanduser().exists():
        raise VQCalibrationError(
            f"the text {shown(str(path))} is no file. Give a UTF-8 file, {SHIPPED!r} for the text "
            f"of the package, {OWN_WORDS!r}, or a data set as NAME[:CONFIG[:SPLIT]], after pip "
            "install datasets."
        )


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return an integer argument that is in [low, high]; else raise VQConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise VQConfigError(f"{name} must be an integer in [{low}, {high}]; got {shown(value)}.")
    return value


def _check_name(name: str, value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise VQConfigError(f"{name} must be a name or a path; got {shown(value)}.")
    return text


def check_candidates(candidates: object) -> list[str]:
    """Check `candidates`; returns catalogue names, spec strings for schemes without a name."""
    given = list(CANDIDATES) if candidates is None else candidates
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise VQConfigError(
            f"candidates must be a list of two schemes or more; got {shown(candidates)}."
        )
    schemes = dict.fromkeys(linear_scheme(candidate) for candidate in given)
    learned = [
        candidate
        for candidate in schemes
        if isinstance(candidate, VQScheme) and candidate.codebook != "universal"
    ]
    if learned:  # costs are measured on some rows; a codebook learned from them would fit only them
        raise VQConfigError(
            f"{scheme_name(learned[0]) or learned[0].spec()} cannot be one of the candidates: it "
            "learns its codebooks, so its error cannot be measured on a sample of rows. Give it to "
            "layers by name: layers={...}."
        )
    element_wise = next((s for s in schemes if isinstance(s, QoQScheme)), None)
    if element_wise is not None:
        raise VQConfigError(
            f"{element_wise.spec()} cannot be one of the candidates: its layers round their inputs "
            "too, and that error is not measured. Give it to layers by name: layers={...}."
        )
    return [scheme_name(scheme) or scheme.spec() for scheme in schemes]


def check_target(target: object, candidates: list[str], stored: bool) -> float:
    """Check `target_bits` against the bits of the candidates; `stored`: it is one of a file."""
    least = min(linear_scheme(name).bits() for name in candidates)
    if isinstance(target, bool) or not isinstance(target, (int, float)):
        raise VQConfigError(f"target_bits must be a number; got {shown(target)}.")
    most = max(linear_scheme(name).bits() for name in candidates)
    if not least <= target <= MOST_BITS:
        raise VQConfigError(
            f"target_bits must be at least {least:g}, the least that {', '.join(candidates)} "
            f"store, and at most {MOST_BITS}; got {shown(target)}. Give other candidates."
        )
    if target >= most and not stored:
        top = max(candidates, key=lambda name: linear_scheme(name).bits())
        raise VQConfigError(
            f"target_bits={target:g} leaves nothing to choose: {top} has the most bits of the "
            f"candidates, {most:g}. Write VQConfig({top!r}), or give candidates with more."
        )
    return float(target)


def candidate_below(target: float, candidates: list[str]) -> str:
    """The candidate with the most bits within the target."""
    within = [name for name in candidates if linear_scheme(name).bits() <= target]
    return max(within, key=lambda name: linear_scheme(name).bits())
