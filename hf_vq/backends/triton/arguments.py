"""What Triton's kernels are given: stored tensors, checked, as numbers of the width they read."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...errors import VQFormatError
from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from ...formats.tensors import tensor_specs

_ENTRIES = {1: torch.int16, 2: torch.int32, 4: torch.int64}
_WORDS = {16: torch.int16, 32: torch.int32}


def check(weight: StoredWeight, bias: Tensor | None) -> None:
    """Raise unless tensors of a weight and a bias belong together.

    Raises:
        VQFormatError: they do not. A kernel would read what is not there.
    """
    (codes, codebook, scale, rotation), second, scheme, in_features = weight
    given = [codes, codebook, scale]
    if second is not None:
        given = [codes, second.codebook, scale, second.codes]
    shapes = tuple(tuple(tensor.shape) for tensor in given)
    expected = _shapes(scheme, len(codes), in_features)
    if shapes != expected:
        raise VQFormatError(
            f"{len(codes)} rows of {in_features} weights as {scheme.spec()} have codes, codebook "
            f"and scales {expected}; got {shapes}."
        )
    behind = {"random_hadamard": packed_size(in_features, 1), "scaled_hadamard": in_features}
    count = behind.get(scheme.rotation)
    if count and (rotation is None or rotation.numel() != count):
        what = "number" if scheme.is_scaled else "sign"
        raise VQFormatError(f"{scheme.spec()} needs a {what} for each of {in_features} inputs.")
    if bias is not None and bias.shape != (len(codes),):
        raise VQFormatError(f"{len(codes)} rows need as many biases; got {tuple(bias.shape)}.")


@functools.lru_cache(maxsize=1024)
def _shapes(scheme: VQScheme, rows: int, in_features: int) -> tuple[tuple[int, ...], ...]:
    specs = tensor_specs(scheme, rows, in_features)
    nested = ("codes", "codebook_2", "scale", "codes_2")
    keys = nested if scheme.two_passes else ("codes", "codebook", "scale")
    return tuple(specs[key].shape for key in keys)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """The codes [rows, numbers], each number those of a unit, if that has as many bits as an
    integer and they are where one may be; else bytes."""
    codes = codes.contiguous()
    dtype = _WORDS.get(bits, torch.uint8)
    size = dtype.itemsize
    whole = codes.shape[1] % size == 0 and codes.data_ptr() % size == 0
    return codes.view(dtype) if whole else codes


def integers_of(codebook: Tensor, scheme: VQScheme) -> Tensor:
    """The entries as one integer each."""
    codebook = codebook.to(torch.float16).contiguous()
    if codebook.data_ptr() % 8:
        codebook = codebook.clone()
    return codebook.view(_ENTRIES[scheme.vector_size])
