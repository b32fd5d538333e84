"""`VQConfig`: what a user asks for, and what `config.json` keeps as `quantization_config`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import patches
from ..errors import VQConfigError, shown
from ..fit.rows import SEARCHES
from ..formats import coded_rows, integers
from ..formats.catalog import LinearScheme, linear_scheme, scheme_name
from ..formats.published import Layout, layout_from_dict
from ..formats.qoq import QoQScheme
from ..formats.scheme import ACTIVATIONS_BITS, VQScheme
from ..nn.residual_offload import POLICIES
from ..nn.trained import check_trainable
from .calibration_options import (
    AUTO,
    CANDIDATES,
    OWN_WORDS,
    advise_calibration,
    candidate_below,
    check_activations,
    check_calibration,
    check_candidates,
    check_int,
    check_target,
    check_text,
    with_transforms,
)
from .checkpoint.by_layer import short
from .module_patterns import check_pattern, matches

QUANT_METHOD = "hf_vq"
"""The only word of a checkpoint that Transformers shows to people without the package."""

QUANT_METHODS = (QUANT_METHOD, "vq")
"""Methods that are read; "vq" is that of files from before 27 November 2026."""

FORMAT_VERSION = 5
"""The newest that is read. 1 has one scheme; 2 `layers` or `layouts`; 3 QoQ's format; 4 scaled
schemes; 5 embeddings of codes."""

_OF_BITS = ("turboquant-1", *CANDIDATES, *(f"turboquant-{bits}" for bits in (5, 6, 7, 8)))
_NOT_STORED = ("pass2", "trainable", "activations_bits")  # given when a model is loaded
_LARGEST_SEED = 2**31 - 1


class VQConfig(QuantizationConfigMixin):
    """Quantize the linear layers of a model to codes into codebooks.

        AutoModelForCausalLM.from_pretrained(model_id, quantization_config=VQConfig())

    Args:
        scheme: a name (`WEIGHT_SCHEMES` and `QOQ_SCHEMES` of `hf_vq.formats.catalog`), a spec
            string, a dict of fields, a `VQScheme` or a `QoQScheme`; None is `vq-4`.
        bits: 2, 3 or 4, short for the schemes `vq-2`, `vq-3` and `vq-4`; 1 and 5 to 8 for
            `turboquant-1` and so on.
        layers: other schemes for some layers, {entry: scheme}; an entry is one as in
            `modules_to_not_convert`, and the first that matches counts. Of a quantized model, the
            layers' full names and spec strings.
        target_bits: choose a scheme for every layer, so that this many bits are stored per weight
            on average and the model's predictions change least
            (`calibration/weight_allocation.py`). Needs calibration; None means "model" then.
            `layers` keep the schemes that are given.
        candidates: with `target_bits`, the schemes to choose from; None is `vq-2`, `vq-3`, `vq-4`.
        modules_to_not_convert: layers to leave dense, in addition to tied weights and the output
            head: a name, a part of one between dots (`"layers.0"`, `"down_proj"`), or a regular
            expression that matches from the start up to a dot.
        seed: seed of the rotations and of k-means.
        search: method that finds a group's scale: `search`, `least_squares` or `norm`.
        calibration: a text to calibrate on, for about half the loss: a UTF-8 file, a data set as
            `NAME[:CONFIG[:SPLIT]]` (needs the package `datasets`), `"default"` for a mixed text
            that comes with the package, or `"model"` for text that the model generates. Or a dict
            with the text as `text` and any of: `tokens`, number of tokens to run (None = 131,072,
            on a CPU 16,384); `context`, tokens of a sequence (None = 2048, or fewer, for 64 of
            them); `damping` of the Hessians (None = 0.01, and held-out tokens choose how far
            correlations are believed); `finetune`, "block" or "model", which trains scales,
            learned codebooks, norms and biases, and codes unless `move_codes` is false;
            `transforms` of QoQ, names and booleans (docs/qserve.md); `device` that computes the
            blocks, of which it holds one; `resume`, a folder for intermediate results, to continue
            after an interruption.
        activations: tokens whose inputs of layers say which weights matter (docs/weights.md):
            `"model"` for 2,048 to 4,096 tokens that the model writes, `"random"`, a text or data
            set as in `calibration`, or token ids [tokens] or [sequences, tokens]. The dense model
            is held in memory and runs once; without effect on schemes that learn codebooks or do
            not rotate, and on layers outside of the model's blocks. `"auto"` is `"model"` where
            the model can run once, and None with `calibration`; else one line of the log says why
            not. None quantizes each tensor without data as soon as it is read.
        activations_bits: 8 lets Hopper GPUs multiply integers where there are 65 tokens or more:
            prompts take less time, and some precision is lost (docs/cuda.md). 16 or None multiplies
            floats. Given like `pass2`, and not stored.
        pass2: placement of the second pass of two-pass schemes: `resident` (None), `offload`,
            `prefill_only` or `absent` (docs/turboquant.md), for all layers or as {entry: policy}.
            The first entry that matches counts; other layers are resident. It may be given with a
            quantized model, too, and is not stored.
        embeddings: store the embedding, too: as codes of `turboquant-2` to `turboquant-7`, or as
            integers: `int8`, with a scale for each row, or `int4`, with a scale and a minimum for
            each 32 numbers. An output head that is tied to it computes on the same codes; one that
            is not stays dense unless an entry of `layers` matches it and no other layer.
        trainable: what trains besides adapters: `scales`, or `scales` and learned `codebooks`
            (docs/fine_tuning.md). Given like `pass2`, and not stored.
        layouts: storage of layers that another project quantized and no scheme can store, by name;
            written by `hf_vq.adopt` and `hf-vq convert`.
        quant_method: `hf_vq`, or `vq` in older files.
        format_version: version of the storage format.
        provenance: written by hf_vq: versions, the error of every layer, hashes of the codebooks.

    Raises:
        VQConfigError: an argument is of a wrong type, out of range or unknown.
        VQSchemeError: an unknown scheme.
    """

    # Class attributes: an option becomes part of config.json only if it is set.
    layers: dict[str, str] | None = None
    target_bits: float | None = None
    candidates: list[str] | None = None
    layouts: dict[str, dict[str, Any]] | None = None
    activations: str | list[Any] | None = None
    activations_bits: int | None = None
    pass2: str | dict[str, str] | None = None
    embeddings: str | None = None
    trainable: list[str] | None = None
    one_file: bool = False  # diffusers saves config.json alone

    # config.json stores `__dict__`, and loading passes it back as these arguments.
    def __init__(
        self,
        scheme: str | dict[str, Any] | LinearScheme | None = None,
        *,
        bits: int | None = None,
        layers: dict[str, Any] | None = None,
        target_bits: float | None = None,
        candidates: list[Any] | None = None,
        modules_to_not_convert: list[str] | None = None,
        seed: int = 0,
        search: str = "search",
        calibration: str | dict[str, Any] | None = None,
        activations: Any = AUTO,
        activations_bits: int | None = None,
        pass2: str | dict[str, str] | None = None,
        embeddings: str | None = None,
        trainable: str | Sequence[str] | None = None,
        layouts: dict[str, dict[str, Any]] | None = None,
        quant_method: str = QUANT_METHOD,
        format_version: int = 1,
        provenance: dict[str, Any] | None = None,
        _stored: bool = False,
        **unknown: Any,
    ) -> None:
        patches.apply(patches.CONFIG)
        _check_version(format_version)
        if foreign := [name for name in unknown if name.startswith(("load_in_", "bnb_"))]:
            many = 8 if "load_in_8bit" in unknown else 4
            raise VQConfigError(
                f"{foreign[0]} is an argument of BitsAndBytesConfig. Write VQConfig(bits={many})."
            )
        if unknown:
            raise VQConfigError(
                f"VQConfig has no argument {', '.join(map(repr, sorted(unknown)))}. Known: scheme, "
                "bits, layers, target_bits, candidates, modules_to_not_convert, seed, search, "
                "calibration, activations, activations_bits, pass2, embeddings, trainable. If "
                "config.json holds it, a newer hf_vq wrote the file: pip install -U hf_vq."
            )
        if quant_method not in QUANT_METHODS:
            raise VQConfigError(
                f"quant_method must be {QUANT_METHOD!r}; got {shown(quant_method)}. "
                "The checkpoint belongs to another library."
            )
        if target_bits is not None:
            self.candidates = check_candidates(candidates)
            self.target_bits = check_target(target_bits, self.candidates, _stored)
            calibration = OWN_WORDS if calibration is None else calibration
            if scheme is None and bits is None:
                scheme = candidate_below(self.target_bits, self.candidates)
        elif candidates is not None:
            raise VQConfigError("candidates are what target_bits chooses from: give it too.")
        self.scheme = _check_scheme(scheme, bits).to_dict()
        # Entries of a file are compared as names, never as patterns: a regex can take hours.
        check_entry = _as_name if _stored else check_pattern
        self.modules_to_not_convert = _check_skips(modules_to_not_convert, check_entry)
        self.seed = check_int("seed", seed, 0, _LARGEST_SEED)
        if search not in SEARCHES:
            known = ", ".join(SEARCHES)
            raise VQConfigError(f"search must be one of {known}; got {shown(search)}.")
        self.search = search
        self.calibration = check_calibration(calibration)
        if provenance is None and not _stored:  # else it is the name of a text, kept as a record
            check_text((self.calibration or {}).get("text"))
            check_text(activations)
        # Calibrated or quantized already: only a file may still name activations.
        settled = calibration is not None or provenance is not None or bool(layouts)
        if settled and isinstance(activations, str) and activations == AUTO:
            activations = None
        if activations is not None and calibration is not None:
            raise VQConfigError(
                "calibration and activations both read the inputs of the layers, and calibration "
                "does more: leave activations out."
            )
        if not settled or (_stored and activations is not None):
            self.activations = check_activations(activations)
        self.quant_method = QUANT_METHOD
        self.format_version = format_version
        if layers is not None:
            self.use(_check_layers(layers, check_entry))
        if pass2 is not None:
            self.pass2 = _check_pass2(pass2)
        if activations_bits is not None:
            if type(activations_bits) is not int or activations_bits not in ACTIVATIONS_BITS:
                raise VQConfigError(
                    f"activations_bits must be 16 or 8; got {shown(activations_bits)}."
                )
            self.activations_bits = activations_bits
        if trainable is not None:
            self.trainable = check_trainable(trainable)
        if embeddings is not None:
            if embeddings not in (kinds := (*integers.KINDS, *coded_rows.KINDS)):
                known = ", ".join(map(repr, kinds))
                raise VQConfigError(f"embeddings must be one of {known}; got {shown(embeddings)}.")
            self.embeddings = embeddings
        if layouts:
            self.layouts = _check_layouts(layouts)
            self._raise_version(2)
        for one in self.schemes():
            if isinstance(one, VQScheme) and one.activations_bits != 16:
                raise VQConfigError(
                    f"a scheme says how weights are stored: write {one.with_activations(16).spec()}"
                    ", and activations_bits=8."
                )
        self._raise_version(1)
        if self.calibration is not None:
            recorded = provenance is not None
            self.calibration = with_transforms(self.calibration, self.schemes(), recorded)
        self.provenance = _check_provenance(provenance)
        if provenance is None and calibration is None:
            advise_calibration(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        patches.apply(patches.CONFIG)  # a config may come from another process
        self.__dict__.update(state)

    @property
    def vq_scheme(self) -> LinearScheme:
        """The scheme as an object."""
        return linear_scheme(self.scheme)

    @property
    def published_layouts(self) -> dict[str, Layout]:
        """The layouts as objects, by layer."""
        return {name: layout_from_dict(layout) for name, layout in (self.layouts or {}).items()}

    @property
    def scheme_name(self) -> str:
        """The scheme's name in the catalogue, else its spec string; or the names of the layouts."""
        if self.layouts:
            return ", ".join(sorted({one.name() for one in self.published_layouts.values()}))
        scheme = self.vq_scheme
        return scheme_name(scheme) or scheme.spec()

    def schemes(self) -> list[LinearScheme]:
        """Every scheme that may be used."""
        others = [*(self.layers or {}).values(), *(self.candidates or ())]
        return [self.vq_scheme, *map(linear_scheme, others)]

    def scheme_of(self, name: str) -> LinearScheme:
        """Scheme of a layer to quantize: by its name, by the first entry it matches, or default."""
        return self.asked_of(name) or self.vq_scheme

    def asked_of(self, name: str) -> LinearScheme | None:
        """Scheme that `layers` requests for a layer to quantize; None without an entry for it."""
        layers = self.layers or {}
        found = layers.get(name) or next((layers[e] for e in layers if matches(name, e)), None)
        return None if found is None else linear_scheme(found)

    def stored_scheme(self, *names: str) -> LinearScheme:
        """Scheme of a checkpoint's layer, by any of its names: `layers` has full names there."""
        layers = self.layers or {}
        found = next((layers[name] for name in names if name in layers), None)
        return self.vq_scheme if found is None else linear_scheme(found)

    def pass2_of(self, name: str) -> str:
        """Placement of a layer's second pass, one of the values of `pass2`."""
        if isinstance(self.pass2, dict):
            return next((p for entry, p in self.pass2.items() if matches(name, entry)), "resident")
        return self.pass2 or "resident"

    def leaves_out_second_passes(self) -> bool:
        """True if `pass2` requests `absent` for at least one layer."""
        values = self.pass2.values() if isinstance(self.pass2, dict) else (self.pass2,)
        return "absent" in values

    def get_loading_attributes(self) -> dict[str, Any]:
        """Options that apply when a config is passed for an already quantized model."""
        return {
            name: getattr(self, name) for name in _NOT_STORED if getattr(self, name) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """The config as stored: without `_NOT_STORED` and errors of single layers."""
        found: dict[str, Any] = super().to_dict()
        for name in _NOT_STORED:
            found.pop(name, None)
        if not found.pop("one_file", False) and self.provenance:
            found["provenance"] = short(found["provenance"])
        settled = self.calibration is not None or self.provenance is not None or bool(self.layouts)
        if self.activations == (None if settled else AUTO):  # older versions do not know it
            found.pop("activations", None)
        return found

    def use(self, layers: dict[str, str]) -> None:
        """Take a table of layers, by entry or name, and their spec strings."""
        self.layers = layers
        self._raise_version(2)

    def _raise_version(self, least: int) -> None:
        """Raise `format_version` so that versions that cannot read this config refuse it."""
        schemes = self.schemes()
        if self.embeddings in coded_rows.KINDS:
            least = 5
        elif any(scheme.is_scaled for scheme in schemes):
            least = 4
        elif any(isinstance(scheme, QoQScheme) for scheme in schemes):
            least = 3
        self.format_version = max(self.format_version, least)

    def get(self, key: str, default: Any = None) -> Any:
        """A field, as of a dict; `from_pretrained(config=model.config)` calls it."""
        return getattr(self, key, default)

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Make a config from `to_dict()`, as in config.json; its entries are names, not patterns.

        Raises:
            VQConfigError: `config_dict` is no dict or holds what is never stored, as `pass2`; or an
                argument is wrong as in the constructor.
        """
        if not isinstance(config_dict, dict):
            raise VQConfigError(f"quantization_config must be a dict; got {shown(config_dict)}.")
        if not all(isinstance(key, str) for key in config_dict):
            raise VQConfigError(
                f"the keys of quantization_config must be strings: {shown(config_dict)}."
            )
        for name in _NOT_STORED:
            if name in config_dict:
                raise VQConfigError(
                    f"quantization_config holds {name}, which is never stored. Delete it there and "
                    "give it when the model is loaded: "
                    f"from_pretrained(..., quantization_config=VQConfig({name}=...))."
                )
        return super().from_dict({**config_dict, "_stored": True}, return_unused_kwargs, **kwargs)


def quantization_of(model: Any) -> VQConfig:
    """The config of a quantized model: of one of Transformers in its config, else its own.

    Raises:
        VQConfigError: the model was not quantized as a whole; names the part that was.
    """
    found = _config_of(model)
    if found is None:
        part = quantized_part(model)
        cure = "give the whole" if part is None else f"give its part {part}"
        raise VQConfigError(f"hf_vq did not quantize this {type(model).__name__} itself: {cure}.")
    return found


def quantized_part(model: Any) -> str | None:
    """Name of the first module inside of a model that was quantized by itself; None if none was."""
    return next((n for n, part in model.named_modules() if n and _config_of(part)), None)


def _config_of(model: Any) -> VQConfig | None:
    found = vars(model).get("quantization_config")
    if found is None:
        found = getattr(getattr(model, "config", None), "quantization_config", None)
    return found if isinstance(found, VQConfig) else None


def with_loading_attributes(kinds: tuple[type, ...]) -> tuple[type, ...]:
    """Add VQConfig to the types whose `get_loading_attributes` Transformers reads (a patch)."""
    return (*kinds, VQConfig)


def _check_scheme(
    scheme: str | dict[str, Any] | LinearScheme | None, bits: int | None
) -> LinearScheme:
    if bits is None:
        return linear_scheme("vq-4" if scheme is None else scheme)
    if isinstance(bits, str) and (number := re.fullmatch(r"(?:int|fp)?(\d)[-_ ]?(?:bits?)?", bits)):
        raise VQConfigError(f"bits must be an integer: write bits={number[1]}; got {shown(bits)}.")
    short = linear_scheme(_OF_BITS[check_int("bits", bits, 1, len(_OF_BITS)) - 1])
    if scheme is not None and linear_scheme(scheme) != short:
        raise VQConfigError(f"VQConfig got both scheme={shown(scheme)} and bits={bits}: give one.")
    return short


def _check_version(version: object) -> None:
    if check_int("format_version", version, 1, 2**31) > FORMAT_VERSION:
        raise VQConfigError(
            f"format_version {version} is newer than this hf_vq reads ({FORMAT_VERSION}): "
            "pip install -U hf_vq."
        )


def _as_name(argument: str, entry: str) -> str:
    return entry


def _check_skips(skips: object, check_entry: Callable[[str, str], str]) -> list[str] | None:
    if skips is None:
        return None
    names: list[Any] = list(skips) if isinstance(skips, (list, tuple)) else [skips]
    for name in names:
        if isinstance(skips, str) or not isinstance(name, str) or not name:
            raise VQConfigError(
                f"modules_to_not_convert must be a list of names; got {shown(skips)}. "
                'Write e.g. ["lm_head"].'
            )
        check_entry("modules_to_not_convert", name)
    return names


def _check_layers(layers: object, check_entry: Callable[[str, str], str]) -> dict[str, str]:
    if not isinstance(layers, dict) or not all(isinstance(key, str) and key for key in layers):
        raise VQConfigError(
            f"layers must be a dict of names and schemes; got {shown(layers)}. "
            'Write e.g. {"down_proj": "vq-4"}.'
        )
    return {check_entry("layers", key): linear_scheme(s).spec() for key, s in layers.items()}


def _check_pass2(pass2: object) -> str | dict[str, str]:
    policies = list(pass2.values()) if isinstance(pass2, dict) else [pass2]
    known = ", ".join(map(repr, POLICIES))
    for policy in policies:
        if not isinstance(policy, str) or policy not in POLICIES:
            raise VQConfigError(f"pass2 must be one of {known}; got {shown(policy)}.")
    if isinstance(pass2, dict):
        return {check_pattern("pass2", str(entry)): policy for entry, policy in pass2.items()}
    assert isinstance(pass2, str)
    return pass2


def _check_layouts(layouts: object) -> dict[str, dict[str, Any]]:
    if not isinstance(layouts, dict):
        raise VQConfigError(f"layouts must be a dict by layer; got {shown(layouts)}.")
    return {str(name): layout_from_dict(layout).to_dict() for name, layout in layouts.items()}


def _check_provenance(provenance: object) -> dict[str, Any] | None:
    if provenance is None:
        return None
    if not isinstance(provenance, dict):
        raise VQConfigError(f"provenance must be a dict; got {shown(provenance)}.")
    for key in ("relative_error", "codebooks", "calibration", "evaluation"):
        if not isinstance(provenance.get(key, {}), dict):
            found = shown(provenance[key])
            raise VQConfigError(f"provenance[{key!r}] must be a dict; got {found}.")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(provenance, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise VQConfigError(f"provenance must be JSON: {error}.") from None
    return copied
