"""Loading models for measurements, with this package's errors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from ..errors import VQError
from ..hf.checkpoint.atomic_dir import recover

_PIECES, _PIECE = 64, 1 << 16  # of a file of weights


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model directory or Hub id.

    Raises:
        VQError: there is none.
    """
    from transformers import AutoTokenizer

    check_model(model)
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise VQError(f"cannot load the tokenizer of {model}: {first_line(error)}") from error


def load_model(
    model: str,
    *,
    dtype: torch.dtype | str = "auto",
    config: Any = None,
    device_map: str | None = None,
) -> Any:
    """A causal language model in evaluation mode.

    Args:
        model: directory or Hub id.
        dtype: dtype of tensors that are not quantized.
        config: quantization config for loading, a `VQConfig` or that of another library; None
            does not quantize.
        device_map: `device_map` of `from_pretrained`.

    Raises:
        VQError: no such model, it is no causal language model, or it cannot be quantized.
    """
    from transformers import AutoModelForCausalLM

    check_model(model)
    options: dict[str, Any] = {"dtype": dtype}
    if device_map is not None:
        options["device_map"] = device_map
    if config is not None:
        options["quantization_config"] = config
    try:
        return AutoModelForCausalLM.from_pretrained(model, **options).eval()
    except VQError:
        raise
    except (OSError, ValueError) as error:
        raise VQError(f"cannot load {model}: {first_line(error)}") from error


def fingerprint(model: str) -> str:
    """Identify the model of a directory: hash of config.json, and of the size and some bytes of
    each file of weights. A Hub id is returned unchanged."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(piece * size // _PIECES)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()[:16]


def check_model(model: str) -> None:
    """Refuse a mistyped directory, which would be looked up on the Hub.

    Raises:
        VQError: `model` looks like a path and is not a directory with a config.json.
    """
    path = Path(model)
    try:
        recover(path)  # a save there may have been killed
    except OSError as error:
        raise VQError(f"a save into {model} cannot be finished: {error.strerror}.") from None
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists()
    if not model.strip() or (looks_like_path and not (path / "config.json").is_file()):
        raise VQError(f"{model!r} is not a model: no config.json in that directory.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
