"""QServe's own files: `torch.save` of a state dict, without a `quantization_config`.

A pickle can run any program. Only tensors are loaded (`torch.load(weights_only=True)`); a file with
anything else is refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import VQFormatError, shown
from ..formats.published import QoqLayout
from ..hf.checkpoint.headers import DTYPES, Checkpoint, Entry

NAMES = ("pytorch_model.bin", "quant_model.pt")
_OF_SERVING = (".kv_scale_quant_orig", ".rotary_emb.inv_freq")  # not of the model
_NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class PickledCheckpoint(Checkpoint):
    """The tensors of files that `torch.save` wrote, by name; mapped, not read, where they can be.

    Raises:
        VQFormatError: a file is damaged, or holds more than named tensors.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self.files = list(files)
        self._tensors: dict[str, Tensor] = {}
        self.entries = {}
        for file in self.files:
            for name, tensor in load_tensors(file).items():
                if name.endswith(_OF_SERVING):
                    continue
                dtype = _NAMES_OF_DTYPES[tensor.dtype]
                self.entries[name] = Entry(name, dtype, tuple(tensor.shape), file)
                self._tensors[name] = tensor

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU; its memory is nobody else's."""
        return self._tensors[name].contiguous().clone()


def load_tensors(file: str) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote.

    Raises:
        VQFormatError: it is damaged, or holds more than named tensors, or fewer numbers than a
            tensor has.
    """
    try:
        found = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as error:  # a stream of nonsense may raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise VQFormatError(
            f"{file} is damaged, or holds more than tensors, which could run a program: {reason}. "
            "Nothing of it was run. Download the checkpoint again, or from somebody you trust."
        ) from None
    if not isinstance(found, Mapping):
        raise VQFormatError(f"{file} holds {shown(type(found))} instead of named tensors.")
    for name, tensor in found.items():
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not plain or tensor.dtype not in _NAMES_OF_DTYPES:
            raise VQFormatError(
                f"{file}: {shown(name)} is {shown(type(tensor))} instead of a plain tensor. "
                "Download the checkpoint again."
            )
        available = tensor.untyped_storage().nbytes() if tensor.device.type == "cpu" else -1
        if tensor.numel() * tensor.itemsize > available:
            raise VQFormatError(
                f"{file}: {shown(name)} has the shape {tuple(tensor.shape)}, and the file does not "
                "hold so many numbers. Download the checkpoint again."
            )
    return dict(found)


def pickled_files(folder: Path) -> list[str]:
    """QServe's file in a folder; [] if there is none, or if the folder has safetensors files.

    Raises:
        VQFormatError: there are two.
    """
    found = [str(folder / name) for name in NAMES if (folder / name).is_file()]
    if any(folder.glob("*.safetensors")):
        return []
    if len(found) > 1:
        raise VQFormatError(
            f"{' and '.join(found)} are two checkpoints in one folder. Keep the one to convert."
        )
    return found


def published_config(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The `quantization_config` of a config.json; where it has none and the tensors are QoQ's, what
    they say themselves."""
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        return dict(found)
    suffixes = {name.rpartition(".")[2] for name in checkpoint.entries}
    if not {"qweight", "s1_scales"} <= suffixes:
        return {}
    group = 128 if "s2_scales" in suffixes else -1
    return {"quant_method": QoqLayout.method, "wbits": 4, "group_size": group}
