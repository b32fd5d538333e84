"""The universal codebooks: MSE-optimal for N(0, 1) data, the same for every model.

After a rotation the coordinates of a scaled group are close to N(0, 1) (TurboQuant, arXiv
2504.19874, section 3.1; HIGGS, arXiv 2411.17525), so a codebook needs no data. The tables were made
by scripts/make_universal_codebooks.py, which also documents their order, and are part of the file
format: a new table is a new version, never a change of this one.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import VQFormatError, VQSchemeError

UNIVERSAL_VERSION = 1
_FILE = Path(__file__).parent / "data" / f"universal_v{UNIVERSAL_VERSION}.safetensors"


class _Table(NamedTuple):
    tensor: torch.Tensor
    sha256: str
    mse: float  # per dimension, for N(0, 1) data; nan if the tensor is only a part of a codebook


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256, in hex, of the little-endian bytes of a contiguous CPU tensor."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def read_universal(path: Path) -> dict[str, _Table]:
    """Every table of a file; VQFormatError where a tensor is not the one its hash was made of."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["universal"])
            tensors = {name: file.get_tensor(name) for name in about["tables"]}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise VQFormatError(f"{path} is no file of universal codebooks: {error}") from error
    if about["version"] != str(UNIVERSAL_VERSION):
        raise VQFormatError(f"{path} has version {about['version']}, not {UNIVERSAL_VERSION}")
    for name, tensor in tensors.items():
        if tensor_hash(tensor) != about["tables"][name]["sha256"]:
            raise VQFormatError(f"{path}: {name} does not match its sha256. Reinstall hf_vq.")
    return {
        name: _Table(tensors[name], entry["sha256"], float(entry.get("mse", "nan")))
        for name, entry in about["tables"].items()
    }


@cache
def _tables() -> dict[str, _Table]:
    return read_universal(_FILE)


def _table(vector_size: int, entry_bits: int) -> _Table:
    if (vector_size, entry_bits) not in available():
        shapes = ", ".join(f"<{x},{y}>" for x, y in available())
        raise VQSchemeError(
            f"no universal codebook has vector size {vector_size} and {entry_bits} bits per entry; "
            f"there are {shapes} and E8P <8,16>. Choose one of these or a fitted codebook."
        )
    return _tables()[f"gauss_{vector_size}x{entry_bits}"]


@cache
def available() -> tuple[tuple[int, int], ...]:
    """(vector_size, entry_bits) of each universal codebook, ascending; E8P is in `lattice`."""
    names = [name.removeprefix("gauss_") for name in _tables() if name.startswith("gauss_")]
    return tuple(sorted((int(x), int(y)) for x, y in (name.split("x") for name in names)))


def universal_codebook(vector_size: int, entry_bits: int) -> torch.Tensor:
    """The codebook float16 [2**entry_bits, vector_size] on the CPU, in units of N(0, 1) data.

    One-dimensional tables ascend and are symmetric. The tensor is shared by all callers: clone it
    before writing to it. VQSchemeError, with the list of those that exist, for any other shape.
    """
    return _table(vector_size, entry_bits).tensor


def universal_mse(vector_size: int, entry_bits: int) -> float:
    """Mean squared error per dimension on N(0, 1) data, as measured when the table was made."""
    return _table(vector_size, entry_bits).mse


def refined_name(bits: int, second_bits: int) -> str:
    """The size of a refined 1-D table in its name: `1x4`, or `1x4+2` where the passes differ."""
    return f"1x{bits}" if second_bits == bits else f"1x{bits}+{second_bits}"


def nested_codebook(bits: int, second_bits: int) -> torch.Tensor:
    """Refinement of the 1-D table of `bits` per code by `second_bits` more, 1 to 4 each: ascending
    float16 [2**(bits + second_bits), 1], CPU.

    Row (first code << second_bits) | second code: the 2**second_bits rows of a first code are
    optimal for its cell. VQSchemeError for other sizes.
    """
    return _named(f"nested_{refined_name(bits, second_bits)}").tensor


def nested_mse(bits: int, second_bits: int) -> float:
    """Mean squared error on N(0, 1) data of both codes of `nested_codebook`."""
    return _named(f"nested_{refined_name(bits, second_bits)}").mse


def e8p_mse() -> float:
    """Mean squared error per dimension of `lattice.e8p_codebook` on N(0, 1) data."""
    return _named("e8p_patterns").mse


def universal_tensor(name: str) -> torch.Tensor:
    """A tensor of the file by name, e.g. "gauss_2x8" or "e8p_patterns"; VQSchemeError if none."""
    return _named(name).tensor


def universal_hash(name: str) -> str:
    """sha256, in hex, of the bytes of a tensor by name; VQSchemeError if there is none."""
    return _named(name).sha256


def _named(name: str) -> _Table:
    if name not in _tables():
        raise VQSchemeError(f"no universal table {name!r}; there are {', '.join(_tables())}")
    return _tables()[name]
