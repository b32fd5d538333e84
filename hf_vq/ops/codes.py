"""Rows <-> codes: `hf_vq::encode`, `decode` and `rotate`, `encode_weight` and `round_weight`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import qoq
from ..formats.catalog import LinearScheme
from ..formats.packing import packed_size
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from ..formats.stored_weight import SCHEMA, Pass, StoredWeight, flat
from .library import define, entry_of_rows, is_plain_eager, parse


def decode_weight(
    tensors: Mapping[str, Tensor],
    scheme: LinearScheme,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The dense weight [out, in] of stored tensors (keys of `formats.tensor_specs`)."""
    if isinstance(scheme, QoQScheme):
        return qoq.decode(tensors, scheme, in_features).to(dtype)
    codes = tensors["codes"]
    if is_plain_eager(codes, *tensors.values()):
        weight = StoredWeight.of(tensors, scheme, in_features)
        decoded = entry_of_rows("decode", codes, scheme, in_features).run(weight)
    else:
        decoded = torch.ops.hf_vq.decode(*flat(tensors), scheme.spec(), in_features)
    return decoded.to(dtype)


def encode_weight(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, bytes] and scales fp16 [n, groups] of float32 `rows` [n, in] that are rotated
    already: for each group the scale of the least squared error among its root mean square times
    each of `factors`, and the nearest entries under it.

    A group that is not finite, or beyond fp16, has a scale that is not finite. No op of torch:
    nobody compiles or differentiates it.

    Args:
        codebook: as stored [z, entries, x] (E8P [z, 257, 8]), for all rows.
        refit: choose codes, fit the scale to them by least squares, and both once more.
    """
    length, tried = rows.shape[-1], len(factors)
    entry = entry_of_rows("encode_weight", rows, scheme, length, tried)
    codes, scale = entry.run(rows, codebook, scheme, factors, refit)
    return codes, scale


def round_weight(
    rows: Tensor, scale: Tensor, codebook: Tensor, scheme: VQScheme, feedback: Tensor
) -> Tensor:
    """Codes, integers [n, vectors, z], of float32 `rows` [n, in] that are rotated already: vector
    by vector inside of blocks, each the nearest entry of what the errors before it leave. No op of
    torch, as `encode_weight`.

    Args:
        scale: [n, groups]; a group is one block or several.
        codebook: as of `encode_weight`.
        feedback: [blocks, size, size] float32: number j of a block gets the errors e_i (number less
            entry times scale) of the vectors before its own, times [j, i].
    """
    length, size = rows.shape[-1], feedback.shape[-1]
    entry = entry_of_rows("round_weight", rows, scheme, length, size)
    codes: Tensor = entry.run(rows, scale, codebook, scheme, feedback)
    return codes


def encode_kv(x: Tensor, codebook: Tensor, scheme: VQScheme) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., bytes] and scale fp16 [..., 1] of rows `x` [..., head_dim]; of mode
    `product` two scales.

    Args:
        x: for codebooks per channel group [..., heads, tokens, head_dim].
        codebook: [1, entries, x], or per channel group [heads, head_dim / x, entries, x]; the scale
            then is [..., 0]; of integers it is [..., 2], with the zero.
    """
    codes, scale = torch.ops.hf_vq.encode(x, codebook, None, scheme.spec())
    return codes, scale


def decode_kv(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor,
    scheme: VQScheme,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Keys or values [..., head_dim] of `encode_kv`, rotated back."""
    tensors = {"codes": codes, "codebook": codebook, "scale": scale}
    return decode_weight(tensors, scheme, head_dim, dtype)


def look_up(ids: Tensor, tensors: Mapping[str, Tensor], scheme: VQScheme, length: int) -> Tensor:
    """Rows [..., length] float32 of a weight of one pass, by their numbers `ids` [...]; no others
    are decoded.

    Args:
        tensors: stored tensors of the weight (keys of `formats.tensor_specs`).
        length: of a row.
    """
    stored = flat(tensors)
    if is_plain_eager(ids, *stored):
        return _look_up(ids, *stored, scheme.spec(), length)
    rows: Tensor = torch.ops.hf_vq.look_up.default(ids, *stored, scheme.spec(), length)
    return rows


def rotate(x: Tensor, rotation: Tensor | None, scheme: VQScheme, inverse: bool = False) -> Tensor:
    """Rotate the rows of `x` [..., n] as the scheme says (see `transforms.rotate`)."""
    rotated: Tensor
    if not is_plain_eager(x):
        rotated = torch.ops.hf_vq.rotate.default(x, rotation, scheme.spec(), inverse)
        return rotated
    rotated = entry_of_rows("rotate", x, scheme, x.shape[-1]).run(x, rotation, scheme, inverse)
    return rotated.clone() if rotated is x else rotated


def rotate_weight(weight: Tensor, rotation: Tensor | None, scheme: VQScheme) -> Tensor:
    """Rotate the rows of a weight [out, in] float32, so that their products with rotated inputs are
    those of before: `rotate(inverse=True)` undoes it (see `transforms.rotate`)."""
    if scheme.is_scaled and rotation is not None:
        weight = weight / rotation.float().square()  # which `rotate` multiplies by once
    return rotate(weight, rotation, scheme)


def _decode(*arguments: Any) -> Tensor:
    *tensors, spec, length = arguments
    return run_decode(StoredWeight.of_flat(tensors, parse(spec), length))


def _look_up(ids: Tensor, *arguments: Any) -> Tensor:
    codes, codebook, scale, rotation, *_, spec, length = arguments
    wanted = ids.reshape(-1)
    codes, scale = (torch.nn.functional.embedding(wanted, rows) for rows in (codes, scale))
    some = Pass(codes, codebook, scale, rotation)
    rows = run_decode(StoredWeight(some, None, parse(spec), length))
    return rows.view(*ids.shape, length)


def run_decode(weight: StoredWeight) -> Tensor:
    """The rows of a weight, by the entry that the table chooses, without torch's dispatcher."""
    entry = entry_of_rows("decode", weight.first.codes, weight.scheme, weight.in_features)
    rows: Tensor = entry.run(weight)
    return rows


def _encode(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: str
) -> tuple[Tensor, Tensor]:
    parsed = parse(scheme)
    entry = entry_of_rows("encode", x, parsed, x.shape[-1])
    codes, scale = entry.run(x, codebook, rotation, parsed)
    return codes, scale


def _rotate(x: Tensor, rotation: Tensor | None, scheme: str, inverse: bool) -> Tensor:
    parsed = parse(scheme)
    entry = entry_of_rows("rotate", x, parsed, x.shape[-1])
    rotated: Tensor = entry.run(x, rotation, parsed, inverse)
    # An op's output must not be its input: a scheme without rotation returns it.
    return rotated.clone() if rotated is x else rotated


def _fake_decode(codes: Tensor, *arguments: Any) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], arguments[-1], dtype=torch.float32)


def _fake_look_up(ids: Tensor, *arguments: Any) -> Tensor:
    return ids.new_empty(*ids.shape, arguments[-1], dtype=torch.float32)


def _fake_encode(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: str
) -> tuple[Tensor, Tensor]:
    parsed = parse(scheme)
    size = packed_size(x.shape[-1] // parsed.vector_size, parsed.entry_bits)
    codes = x.new_empty(*x.shape[:-1], size, dtype=torch.uint8)
    return codes, x.new_empty(*x.shape[:-1], parsed.row_numbers, dtype=torch.float16)


def _fake_rotate(x: Tensor, rotation: Tensor | None, scheme: str, inverse: bool) -> Tensor:
    return torch.empty_like(x)


define(
    "decode",
    f"({SCHEMA}, str scheme, int length) -> Tensor",
    _decode,
    _fake_decode,
)
define(
    "look_up",
    f"(Tensor ids, {SCHEMA}, str scheme, int length) -> Tensor",
    _look_up,
    _fake_look_up,
)
define(
    "encode",
    "(Tensor x, Tensor codebook, Tensor? rotation, str scheme) -> (Tensor, Tensor)",
    _encode,
    _fake_encode,
)
define(
    "rotate",
    "(Tensor x, Tensor? rotation, str scheme, bool inverse) -> Tensor",
    _rotate,
    _fake_rotate,
)
