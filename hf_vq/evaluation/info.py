"""`hf-vq info`: contents of a checkpoint, from its config and the headers of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import VQFormatError
from ..formats.catalog import LinearScheme, linear_scheme, scheme_name
from ..hf.checkpoint import by_layer
from ..hf.config import QUANT_METHODS, VQConfig
from .storage import Kind, file_storage, kind_of, read_config, read_headers
from .text_tables import significant, text_table


def describe(model: str) -> dict[str, Any]:
    """Collect the facts that `hf-vq info` shows, as JSON types.

    Raises:
        VQError: the model cannot be read.
        VQFormatError: its config and its files contradict each other.
    """
    config = read_config(model)
    quantization = config.get("quantization_config") or {}
    is_vq = isinstance(quantization, dict) and quantization.get("quant_method") in QUANT_METHODS
    stored = VQConfig.from_dict(quantization) if is_vq else None
    scheme = None if stored is None else stored.vq_scheme
    layouts = {} if stored is None else stored.published_layouts
    storage = file_storage(
        read_headers(model), None if stored is None else _finder(stored), layouts
    )
    if scheme is not None and not storage.weights:
        raise VQFormatError(
            f"the config.json of {model} says scheme {scheme.spec()}, but no file holds codes; "
            "download or save the model again."
        )
    provenance = whole_provenance(model, quantization.get("provenance") or {}) if is_vq else {}
    errors = provenance.pop("relative_error", {})
    calibration = {**(quantization.get("calibration") or {}), **provenance.pop("calibration", {})}
    output_errors = calibration.pop("output_error", {})
    if calibration:
        provenance["calibration"] = calibration
    shown = ", ".join(sorted({layout.name() for layout in layouts.values()}))
    if scheme is not None and not layouts:
        shown = scheme_name(scheme) or scheme.spec()
    return {
        "model_type": config.get("model_type"),
        "quant_method": quantization.get("quant_method") if quantization else None,
        "scheme": None if scheme is None else shown,
        "spec": None if scheme is None else shown if layouts else scheme.spec(),
        "activation_aware": stored is not None and any(s.is_scaled for s in stored.schemes()),
        "layers": quantization.get("layers") if is_vq else None,
        "format_version": quantization.get("format_version") if is_vq else None,
        "bits_per_weight": round(storage.bits_per_weight, 4),
        "bits_per_parameter": round(storage.bits_per_parameter, 4),
        "bytes": storage.nbytes,
        "shared_bytes": storage.shared_bytes,
        "quantized": [_kind(kind) for kind in storage.quantized.values()],
        "kept": [_kind(kind) for kind in storage.kept.values()],
        "modules_to_not_convert": quantization.get("modules_to_not_convert") if is_vq else None,
        "relative_error": mean_errors(errors),
        "output_error": mean_errors(output_errors),
        "provenance": provenance,
    }


def whole_provenance(model: str, stored: dict[str, Any]) -> dict[str, Any]:
    """The provenance of a model directory or Hub repository, with that of single layers.

    Args:
        stored: what config.json has.
    """
    if by_layer.DIGEST not in stored:
        return dict(stored)
    path: Path | None = Path(model) / by_layer.FILE
    if not Path(model).is_dir():
        from huggingface_hub import errors, hf_hub_download

        try:
            path = Path(hf_hub_download(model, by_layer.FILE))
        except (errors.HfHubHTTPError, OSError):
            path = None
    return by_layer.joined(stored, path)


def _finder(config: VQConfig) -> Callable[[str], LinearScheme]:
    """The scheme of a layer by name; of experts, the tensors are counted one by one."""
    return lambda layer: config.stored_scheme(layer, layer.rpartition(".")[0])


def show(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"model type        {found['model_type']}"]
    if found["scheme"] is None:
        lines.append(f"quantization      {found['quant_method'] or 'none'}")
    else:
        lines += [
            f"scheme            {found['scheme']}  ({found['spec']})",
            *(["inputs            scaled: activation-aware"] if found["activation_aware"] else []),
            f"format version    {found['format_version']}",
            f"bits per weight   {found['bits_per_weight']:.4g} (quantized layers)",
        ]
    lines += [
        f"bits/parameter    {found['bits_per_parameter']:.4g} (whole model)",
        f"size              {found['bytes'] / 1e6:.2f} MB",
    ]
    if found["layers"]:
        counts = Counter(map(linear_scheme, found["layers"].values()))
        others = (f"{scheme_name(s) or s.spec()} in {n}" for s, n in counts.most_common())
        lines.append(f"layers            {', '.join(others)}, the others as above")
    if found["modules_to_not_convert"]:
        lines.append(f"skipped           {', '.join(found['modules_to_not_convert'])}")
    lines += [f"{key:<17} {value}" for key, value in found["provenance"].items()]
    return "\n".join([*lines, "", kinds_table(found)])


def summary(found: dict[str, Any], config: VQConfig) -> str:
    """One line on a model that was just quantized as `config` says."""
    what = config.scheme_name
    if config.layers or config.target_bits is not None:
        what = ", ".join(dict.fromkeys(scheme_name(s) or s.spec() for s in config.schemes()))
    if config.target_bits is not None:
        what += f" for {config.target_bits:g} bits"
    return (
        f"{what}: {found['bits_per_weight']:.3f} bits per quantized weight, "
        f"{found['bits_per_parameter']:.3f} per parameter, {found['bytes'] / 1e6:.2f} MB"
    )


def kinds_table(found: dict[str, Any]) -> str:
    """One line per kind of layer: how many, weights, stored bits, and the error of quantizing."""
    columns = {"relative error": found["relative_error"], "of outputs": found["output_error"]}
    shown = {column: errors for column, errors in columns.items() if errors}
    rows = []
    for quantized, kinds in ((True, found["quantized"]), (False, found["kept"])):
        for kind in kinds:
            errors = [errors.get(kind["name"]) for errors in shown.values()]
            rows.append(
                [
                    kind["name"],
                    str(kind["layers"]),
                    f"{kind['weights']:,}",
                    f"{kind['bits_per_weight']:.3f}",
                    *(significant(error) if quantized else "-" for error in errors),
                ]
            )
    return text_table(["layers", "count", "weights", "bits", *shown], rows)


def mean_errors(errors: dict[str, Any]) -> dict[str, float]:
    """Mean relative error per kind of layer, of the errors per layer."""
    grouped: dict[str, list[float]] = {}
    for layer, error in errors.items():
        if isinstance(error, (int, float)):
            grouped.setdefault(kind_of(layer), []).append(float(error))
    return {kind: sum(values) / len(values) for kind, values in grouped.items()}


def _kind(kind: Kind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "layers": kind.layers,
        "weights": kind.weights,
        "bits_per_weight": round(kind.bits_per_weight, 4),
    }
