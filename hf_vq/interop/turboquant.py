"""Folders of the project `turboquant-model`, which are no checkpoints of Transformers.

    turboquant_config.json       how layers are stored
    config.json                  of the model; says nothing of codes, so that Transformers loads
                                 random numbers
    model.safetensors            A_B.indices, A_B.norms, .. of the layer A.B; one codebook
    non_quantized.safetensors    everything else by its own name, buffers too

Embeddings of integers become dense again, as that project's forward computes them: bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VQConfigError, VQFormatError, shown
from ..formats.published import TurboquantLayout
from ..formats.published.layout import CURE
from ..hf.checkpoint.headers import Checkpoint

CONFIG = "turboquant_config.json"
CODED, DENSE = "model.safetensors", "non_quantized.safetensors"
_KNOWN = frozenset({
    "bit_width", "group_size", "seed", "skip_embeddings", "skip_lm_head", "residual_bit_width",
    "residual_seed", "rotation", "rotation_strategy", "norm_codec", "entropy_coding",
    "cpu_offload_pass2", "embedding_quant", "embedding_group_size",
})  # fmt: skip
_OTHER = {  # names of tensors that end so, and what they are
    "indices_ec": "codes that are entropy-coded (entropy_coding)",
    "norms.row_scale": "norms that are factored (norm_codec)",
}
_EMBEDDING = ("qe_mode", "qe_meta", "weight_int8", "weight_packed", "weight_scale", "weight_min")


def described(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The `quantization_config` that turboquant_config.json stands for, with every field and the
    numbers of the model's `layers`.

    Raises:
        VQConfigError: it has fields that are not known.
    """
    if unknown := sorted(map(str, set(config) - _KNOWN - {"quant_method"})):
        raise VQConfigError(
            f"{CONFIG} has fields that hf_vq does not know: {', '.join(unknown)}. hf_vq reads what "
            "version 0.1.0 of turboquant-model writes."
        )
    # Defaults of the fields that files before version 0.1.0 lack.
    complete = {"rotation": "qr", "rotation_strategy": "different", **config}
    skipped = [part for part in ("embed", "lm_head") if complete.get(_skip(part)) is True]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(part in name.lower() for part in skipped)
    ]
    layers = {name: number for number, name in enumerate(linear)}
    return {**complete, "layers": layers}


def _skip(part: str) -> str:
    return "skip_embeddings" if part == "embed" else "skip_lm_head"


class TurboquantFolder(Checkpoint):
    """The tensors of such a folder, by names that belong to the model.

    Args:
        folder: of the checkpoint.
        config: its `described` description.
        model: empty.

    Raises:
        VQConfigError: a variant that hf_vq does not read.
        VQFormatError: a file is missing or damaged, or a tensor belongs to no layer.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], model: nn.Module) -> None:
        if not (folder / DENSE).is_file():
            raise VQFormatError(
                f"{folder} lacks {DENSE}: hf_vq reads what turboquant-model saves as safetensors. "
                f"{CURE}"
            )
        super().__init__([str(folder / CODED), str(folder / DENSE)])
        self._embeddings: dict[str, dict[str, str]] = {}
        modules = dict(model.named_modules())
        owners = {name.replace(".", "_"): name for name in modules if name}
        coded, dense = (
            [entry for entry in self.entries.values() if entry.file == file] for file in self.files
        )
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # Buffers are computed by the model.
        found = {entry.name: entry for entry in dense if entry.name in parameters}
        for entry in coded:
            if entry.name == "codebook":
                continue
            owner, dot, suffix = entry.name.partition(".")
            if why := _OTHER.get(suffix.removeprefix("pass2_")):
                raise VQConfigError(f"{entry.name}: {why} are not read by hf_vq.")
            if not dot or owner not in owners:
                raise VQFormatError(f"{entry.name} belongs to no layer of the model. {CURE}")
            name = owners[owner]
            if suffix in _EMBEDDING:
                self._embeddings.setdefault(f"{name}.weight", {})[suffix] = entry.name
                continue
            found[f"{name}.{suffix}"] = entry
            if suffix == TurboquantLayout.codes and "codebook" in self.entries:
                found[f"{name}.codebook"] = self.entries["codebook"]
        self._check_layers(config, found)
        for name, parts in self._embeddings.items():
            codes = "weight_packed" if "weight_packed" in parts else "weight_int8"
            if codes not in parts:
                raise VQFormatError(f"the checkpoint lacks the codes of {name}. {CURE}")
            entry = self.entries[parts[codes]]
            *rows, columns = entry.shape or (0,)
            shape = (*rows, columns * (2 if codes == "weight_packed" else 1))
            found[name] = replace(entry, name=name, dtype="BF16", shape=shape)
        self._stored, self.entries = dict(self.entries), found

    @staticmethod
    def _check_layers(config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Seeds of layers count linear layers: those of the model must be those that were."""
        suffix = f".{TurboquantLayout.codes}"
        coded = {name.removesuffix(suffix) for name in found if name.endswith(suffix)}
        if config["rotation_strategy"] == "per_layer" and coded != set(config["layers"]):
            other = ", ".join(sorted(coded ^ set(config["layers"]))[:3])
            raise VQConfigError(
                f"rotation_strategy 'per_layer' needs codes of all linear layers: {other} differ. "
                "Which seeds the layers have cannot be known."
            )

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        if name in self._embeddings:
            return self._embedding(self._embeddings[name], name)
        return self._tensor(self.entries[name].name)

    def _tensor(self, stored: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._stored[stored].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(stored)
            return tensor

    def _embedding(self, parts: Mapping[str, str], name: str) -> Tensor:
        try:
            mode = bytes(self._tensor(parts["qe_mode"]).tolist()).decode("ascii", "replace")
            if mode == "int8":
                scale = self._tensor(parts["weight_scale"])[:, None]
                return (self._tensor(parts["weight_int8"]).float() * scale).bfloat16()
            if mode != "int4":
                raise VQConfigError(f"{name}: embeddings of {shown(mode)} are not known to hf_vq.")
            packed = self._tensor(parts["weight_packed"])
            scale, least = (self._tensor(parts[f"weight_{part}"]) for part in ("scale", "min"))
        except KeyError as error:
            raise VQFormatError(f"the checkpoint lacks {error} of {name}. {CURE}") from None
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).half()
        grouped = codes.unflatten(1, (scale.shape[1], -1))
        return (grouped * scale[..., None] - least[..., None]).flatten(1).bfloat16()
