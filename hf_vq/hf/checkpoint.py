"""Reading a saved model before Transformers does: headers, shared tensors, and what is missing.

Transformers fills a parameter that a file lacks with random numbers and a warning. Codes that are
missing or of a wrong shape must stop the load instead, so every file's header is read first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import VQFormatError
from ..formats.scheme import VQScheme
from ..formats.shared import universal_tensor
from ..formats.tensors import TensorSpec, validate_tensor
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.replace import vq_modules
from ..nn.stored import digest
from ..transforms import qr_matrix

CURE = "Download or copy the checkpoint again, or quantize the model again."
_DTYPES = {"U8": torch.uint8, "F16": torch.float16}


@dataclass(frozen=True)
class Entry:
    """One tensor in a header: its file, shape and dtype (None: not one that hf_vq stores)."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Checkpoint:
    """The tensors of a list of safetensors files, by name.

    Raises:
        VQFormatError: a file is missing, truncated or not a safetensors file.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.files = list(files)
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - safe_open has no __iter__
                        part = opened.get_slice(name)
                        dtype = _DTYPES.get(part.get_dtype())
                        self.entries[name] = Entry(file, tuple(part.get_shape()), dtype)
            except (SafetensorError, OSError) as error:
                raise VQFormatError(
                    f"{file} is truncated or corrupted ({error}). {CURE}"
                ) from error

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        with safe_open(self.entries[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def find(self, suffix: str) -> str | None:
        """The name that is `suffix`, or ends with it after a dot (a prefix may have been added)."""
        return next(
            (name for name in self.entries if name == suffix or name.endswith(f".{suffix}")), None
        )

    def shared(
        self, needed: Mapping[str, TensorSpec], provenance: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """The tensors that layers share, by name.

        Raises:
            VQFormatError: one is missing, wrong, or not the one that config.json records.
        """
        found = {}
        for name, spec in needed.items():
            stored = self.find(name)
            if stored is None:
                where = ", ".join(self.files)
                raise VQFormatError(f"{where} lacks {name}, which every layer needs. {CURE}")
            where = self.entries[stored].file
            found[name] = self.read(stored)
            validate_tensor(name, found[name], spec, where)
            check_recorded({name: found[name]}, provenance, where)
        return found


def check_recorded(
    shared: Mapping[str, Tensor], provenance: Mapping[str, Any], where: str = "hf_vq"
) -> None:
    """Compare shared tensors with the hashes in config.json.

    Raises:
        VQFormatError: one differs.
    """
    recorded = provenance.get("codebooks", {})
    for name, tensor in shared.items():
        if name in recorded and digest(tensor) != recorded[name]:
            raise VQFormatError(
                f"{where}: {name} is not the one that config.json records "
                f"({recorded[name]}). {CURE}"
            )


def shared_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Name and spec of the tensors that the VQ modules of a model share."""
    return {
        spec.shared_name: spec
        for module in vq_modules(model).values()
        for spec in module.specs.values()
        if spec.shared_name is not None
    }


def packaged(specs: Mapping[str, TensorSpec], scheme: VQScheme) -> dict[str, Tensor]:
    """The same shared tensors, from the package instead of a checkpoint."""
    tensors = {}
    for name in specs:
        if name.startswith("vq_rotation.qr"):
            block, seed = name.removeprefix("vq_rotation.qr").split("_seed")
            tensors[name] = qr_matrix(int(block), int(seed))
        else:
            tensors[name] = universal_tensor(scheme, refined=name.endswith("_nested"))
    return tensors


def verify(model: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str]) -> None:
    """Check that every stored tensor of every VQ module is in the checkpoint and right.

    Args:
        rename: name in a file -> name in the model, as Transformers will rename it.

    Raises:
        VQFormatError: names the first tensor that is missing, wrong or not finite.
    """
    available = {rename(name): name for name in checkpoint.entries}
    for prefix, module in vq_modules(model).items():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}"
            if name not in available:
                raise missing(name, ", ".join(checkpoint.files))
            stored = available[name]
            entry = checkpoint.entries[stored]
            where = f"{entry.file}: {stored}"
            spec = module.specs.get(attribute)
            if spec is None:
                _check_shape(entry, parameter, where)
                continue
            if entry.shape != spec.shape or entry.dtype != spec.dtype:
                shown = "of another type" if entry.dtype is None else str(entry.dtype)
                raise VQFormatError(
                    f"{where} is {shown} {list(entry.shape)}, expected {spec.dtype} "
                    f"{list(spec.shape)}: it does not fit config.json. {CURE}"
                )
            if spec.dtype.is_floating_point:
                validate_tensor(attribute, checkpoint.read(stored), spec, where)


def _check_shape(entry: Entry, parameter: Tensor, where: str) -> None:
    if entry.shape != tuple(parameter.shape):
        raise VQFormatError(
            f"{where} has shape {list(entry.shape)}, expected {list(parameter.shape)}. {CURE}"
        )


def missing(name: str, where: str) -> VQFormatError:
    """The error of a stored tensor that is nowhere."""
    return VQFormatError(
        f"{where} lacks {name}: the layer would be filled with random numbers. {CURE}"
    )


def check_loaded(model: nn.Module, unloaded: Iterable[str], pre_quantized: bool) -> None:
    """Stop when the loader found no tensor for a parameter of a VQ module.

    Raises:
        VQFormatError: names the parameter.
    """
    modules = vq_modules(model)
    for name in sorted(unloaded):
        prefix, _, attribute = name.rpartition(".")
        module = modules.get(prefix)
        if module is None or attribute not in module._parameters:
            continue
        if pre_quantized:
            raise missing(name, "the checkpoint")
        raise VQFormatError(
            f"the checkpoint lacks {prefix}, so there is nothing to quantize. To start from random "
            f"weights there, add it to VQConfig(modules_to_not_convert=[{prefix!r}])."
        )


def check_values(model: nn.Module) -> None:
    """Check the stored float tensors of a loaded model that are in memory.

    Raises:
        VQFormatError: names the first that is wrong or not finite.
    """
    for prefix, module in vq_modules(model).items():
        for attribute, spec in module.specs.items():
            tensor: Tensor = getattr(module, attribute)
            validate_tensor(attribute, tensor, spec, prefix)


def storage(model: nn.Module) -> tuple[int, int]:
    """Bits stored for the weights of VQ modules, shared tensors counted once, and the weights."""
    modules: list[VQLinear | VQExperts] = list(vq_modules(model).values())
    shared = shared_specs(model).values()
    bits = sum(module.stored_bits() for module in modules)
    bits += sum(8 * spec.dtype.itemsize * torch.Size(spec.shape).numel() for spec in shared)
    return bits, sum(module.weight_count() for module in modules)
