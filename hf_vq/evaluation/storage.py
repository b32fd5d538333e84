"""Stored bits, measured from the tensors of a model or from the headers of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import VQConfigError, VQError, VQFormatError, VQSchemeError
from ..formats.catalog import LinearScheme
from ..formats.packing import packed_size
from ..formats.published import Layout
from ..formats.qoq import QoQScheme
from ..hf.checkpoint.headers import Entry, read_header, shared_bytes
from ..nn.embedding import VQEmbedding
from ..nn.replace import vq_modules
from .load import check_model, first_line

SHARED = ("vq_codebook.", "vq_rotation.")  # tensors that all layers share: once per checkpoint


@dataclass
class Kind:
    """All layers of one kind, e.g. every `self_attn.q_proj`."""

    name: str
    layers: int = 0
    weights: int = 0
    nbytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, without the tensors that all layers share."""
        return 8 * self.nbytes / max(self.weights, 1)


@dataclass
class Storage:
    """Stored sizes of a model.

    Args:
        quantized: quantized layers by kind.
        kept: tensors in the model's dtype by kind (embeddings, norms, biases, skipped layers).
        shared_bytes: codebooks and rotations that all layers share.
    """

    quantized: dict[str, Kind]
    kept: dict[str, Kind]
    shared_bytes: int = 0

    @property
    def weights(self) -> int:
        """Quantized weights."""
        return sum(kind.weights for kind in self.quantized.values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight, everything that it needs included."""
        nbytes = sum(kind.nbytes for kind in self.quantized.values()) + self.shared_bytes
        if self.weights:
            return 8 * nbytes / self.weights
        return self.bits_per_parameter

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per parameter of the whole model, embeddings included."""
        count = self.weights + sum(kind.weights for kind in self.kept.values())
        return 8 * self.nbytes / max(count, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        kinds = (*self.quantized.values(), *self.kept.values())
        return self.shared_bytes + sum(kind.nbytes for kind in kinds)


def kind_of(name: str) -> str:
    """The kind of a layer: `model.layers.3.mlp.up_proj` is a `mlp.up_proj`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    return ".".join(parts[-2:])


def model_storage(model: Any) -> Storage:
    """Measure a model in memory (one that is loaded or just quantized)."""
    storage = Storage({}, {}, shared_bytes(model))
    stored: set[int] = set()
    for name, module in vq_modules(model).items():
        kind = storage.quantized.setdefault(kind_of(name), Kind(kind_of(name)))
        kind.layers += 1
        kind.weights += module.weight_count()
        kind.nbytes += module.stored_bits() // 8
        stored |= {id(getattr(module, attribute)) for attribute in module.specs}
    for name, module in model.named_modules():
        if isinstance(module, VQEmbedding):
            parts = list(module.parameters())
            weights = module.num_embeddings * module.embedding_dim
            _keep(storage, f"{name}.weight", weights, sum(t.numel() * t.itemsize for t in parts))
            stored |= set(map(id, parts))
    for name, parameter in model.named_parameters():
        if id(parameter) not in stored:
            _keep(storage, name, parameter.numel(), parameter.numel() * parameter.element_size())
    return storage


def file_storage(
    entries: Iterable[Entry],
    scheme_of: Callable[[str], LinearScheme] | None,
    layouts: Mapping[str, Layout] | None = None,
) -> Storage:
    """Measure a checkpoint from its headers.

    Args:
        scheme_of: the scheme of a layer by name, as its config.json says; None: not quantized.
        layouts: those of layers that no scheme stores, by name.

    Raises:
        VQFormatError: the codes of a layer do not fit the scheme.
    """
    named = {entry.name: entry for entry in entries}
    storage = Storage({}, {})
    for layer, layout in (layouts or {}).items():
        _count_published(storage, named, layer, layout)
    owners = _owners(named) if scheme_of is not None else {}
    for name, entry in named.items():
        layer, part = owners.get(name, ("", ""))
        if name.startswith(SHARED):
            storage.shared_bytes += entry.nbytes
        elif not layer:
            _keep(storage, *_row_part(entry, named), entry.nbytes)
        else:
            kind = storage.quantized.setdefault(kind_of(layer), Kind(kind_of(layer)))
            kind.nbytes += entry.nbytes
            if part == "codes":
                assert scheme_of is not None
                kind.layers += 1
                scheme = scheme_of(layer)
                kind.weights += _weight_count(entry, named[_scale_of(name)], scheme)
    return storage


def _row_part(entry: Entry, named: Mapping[str, Entry]) -> tuple[str, int]:
    """Name and weights of a dense tensor, or of what belongs to an embedding of codes: that all
    counts as its `weight`."""
    owner, _, key = entry.name.rpartition(".")
    signs = named.get(f"{owner}.signs")
    if signs is None or f"{owner}.like" not in named:
        return entry.name, entry.elements
    weights = entry.shape[0] * 8 * signs.elements if key == "weight" else 0
    return f"{owner}.weight", weights


def read_headers(model: str) -> list[Entry]:
    """Every tensor of a model directory or Hub repository, from the headers of its files.

    Raises:
        VQError: there are no safetensors files, or they cannot be read.
    """
    check_model(model)
    folder = Path(model)
    if not folder.is_dir():
        return _hub_headers(model)
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    )
    paths = [folder / file for file in files] or [folder / "model.safetensors"]
    return [entry for path in paths for entry in read_header(str(path))]


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a model directory or Hub repository.

    Raises:
        VQError: there is none, or it is not JSON.
    """
    check_model(model)
    path = Path(model) / "config.json"
    try:
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, "config.json"))
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        place = "" if Path(model).exists() else "There is no such folder, and of the Hub: "
        raise VQError(
            f"cannot read the config.json of {model}. {place}{first_line(error)}"
        ) from None
    return config


def check_original(model: str) -> None:
    """Raise if a model is quantized already.

    Raises:
        VQConfigError: it is.
        VQError: it has no config.json.
    """
    found = (read_config(model).get("quantization_config") or {}).get("quant_method")
    if found:
        raise VQConfigError(f"{model} is quantized already ({found}); quantize the original model.")


def _hub_headers(model: str) -> list[Entry]:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    try:
        metadata = get_safetensors_metadata(model)
    except (OSError, ValueError, HfHubHTTPError, NotASafetensorsRepoError) as error:
        raise VQError(f"cannot read the files of {model}: {first_line(error)}") from None
    return [
        Entry(name, str(getattr(tensor.dtype, "value", tensor.dtype)), tuple(tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    ]


def _owners(named: dict[str, Entry]) -> dict[str, tuple[str, str]]:
    """(layer, part) of every tensor of a quantized layer."""
    found: dict[str, tuple[str, str]] = {}
    for name, entry in named.items():
        if _scale_of(name) not in named or entry.dtype != "U8":
            continue
        layer, _, last = name.rpartition(".")
        prefix = f"{layer}.vq_" if last == "weight" else name.removesuffix("codes")
        owner = layer if last == "weight" else name.removesuffix("_codes").replace(".vq_", ".")
        found[name] = (owner, "codes")
        for other in named:
            if other != name and other.startswith(prefix):
                found.setdefault(other, (owner, "part"))
    return found


def _scale_of(codes: str) -> str:
    """The name of the scales that belong to codes: `x.weight` or `x.vq_<param>_codes`."""
    if codes.endswith(".weight"):
        return codes.removesuffix("weight") + "vq_scale"
    return re.sub(r"(\.vq_\w+)_codes$", r"\1_scale", codes) if codes.endswith("_codes") else ""


def _weight_count(codes: Entry, scale: Entry, scheme: LinearScheme) -> int:
    """Weights behind codes [..., out, bytes] and scales [..., out, groups].

    The bytes of a row are rounded up, so several lengths can fit them; the groups decide. QoQ's
    rows may have no groups: then one of odd length counts a weight too many.
    """
    if isinstance(scheme, QoQScheme):
        return 2 * codes.elements
    stream = codes.shape[-1] // scheme.streams
    longest = 8 * stream // scheme.entry_bits
    for vectors in range(longest, max(longest - 8, 0), -1):
        length = vectors * scheme.vector_size
        try:
            fits = scheme.group(length) * scale.shape[-1] == length
        except VQSchemeError:
            continue
        if fits and packed_size(vectors, scheme.entry_bits) == stream:
            return codes.elements // codes.shape[-1] * length
    raise VQFormatError(
        f"{codes.name} {list(codes.shape)} and its scales {list(scale.shape)} do not fit the "
        f"scheme {scheme.spec()} of config.json; download the model again."
    )


def _count_published(storage: Storage, named: dict[str, Entry], layer: str, layout: Layout) -> None:
    """Count a layer of a published layout, and take its tensors out of `named`."""
    names = {"codes": f"{layer}.weight"}
    keys = [layout.key(suffix) for suffix in layout.suffixes]
    names |= {key: f"{layer}.vq_{key}" for key in keys if f"{layer}.vq_{key}" in named}
    if names["codes"] not in named:
        return
    found = {key: named.pop(name) for key, name in names.items()}
    rows, columns = layout.size({key: entry.shape for key, entry in found.items()})
    kind = storage.quantized.setdefault(kind_of(layer), Kind(kind_of(layer)))
    kind.layers += 1
    kind.weights += rows * columns
    kind.nbytes += sum(entry.nbytes for entry in found.values())


def _keep(storage: Storage, name: str, elements: int, nbytes: int) -> None:
    layer = name.removesuffix(".weight").removesuffix(".bias")
    kind = storage.kept.setdefault(kind_of(layer), Kind(kind_of(layer)))
    kind.layers += 1
    kind.weights += elements
    kind.nbytes += nbytes
