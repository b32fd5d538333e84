"""Rows <-> codes: `hf_vq::encode`, `decode`, `rotate` and `append`, and `encode_weight`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..formats import qoq
from ..formats.catalog import LinearScheme
from ..formats.packing import packed_size
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from .library import define, name_of, only_result, parse, rows_of


def rotation_of(tensors: Mapping[str, Tensor], suffix: str = "") -> Tensor | None:
    """The rotation argument of an op: packed signs, a QR matrix, or None."""
    signs = tensors.get(f"signs{suffix}")
    return tensors.get(f"rotation{suffix}") if signs is None else signs


def decode_weight(
    tensors: Mapping[str, Tensor],
    scheme: LinearScheme,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The dense weight [out, in] of stored tensors (keys of `formats.tensor_specs`)."""
    if isinstance(scheme, QoQScheme):
        return qoq.decode(tensors, scheme, in_features).to(dtype)
    decoded: Tensor = torch.ops.hf_vq.decode(*stored_arguments(tensors), scheme.spec(), in_features)
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
    problem = dispatch.EncodeWeightProblem(
        rows.device.type, name_of(rows.dtype), scheme.spec(), rows_of(rows), rows.shape[-1],
        len(factors),
    )  # fmt: skip
    codes, scale = dispatch.select(problem).run(rows, codebook, scheme, factors, refit)
    return codes, scale


def stored_arguments(tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Stored tensors in the order of the ops' schemas."""
    return (
        tensors["codes"],
        tensors["codebook"],
        tensors["scale"],
        rotation_of(tensors),
        tensors.get("codes_2"),
        tensors.get("codebook_2"),
        tensors.get("scale_2"),
        rotation_of(tensors, "_2"),
    )


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


def append_kv(
    x: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    at: int,
    scheme: str,
    layout: str,
) -> None:
    """Encode x - mean [B, H, n, head_dim] and write it to tokens `at`, `at` + 1, ... of a tape.

    Args:
        mean: float32 [B, H, 1, head_dim]; None = 0.
        codebook: as for `encode_kv`.
        codes: the tape's codes in `layout` (`ops.layout`); written to.
        scale: fp16 [B, H, tokens, 1], or [B, H, tokens, 0] without scales; written to.
        scheme: spec string.
    """
    alone = only_result(x)
    if alone:
        bound = dispatch.bind(_append_problem(x.device, x.dtype, x.shape, scheme, layout))
        if bound is not None and bound(x, mean, codebook, codes, scale, at) is not None:
            return
    run = _append if alone else torch.ops.hf_vq.append.default
    run(x, mean, codebook, codes, scale, at, scheme, layout)


def rotate(x: Tensor, rotation: Tensor | None, scheme: VQScheme, inverse: bool = False) -> Tensor:
    """Rotate the rows of `x` [..., n] as the scheme says (see `transforms.rotate`)."""
    run = _rotate if only_result(x) else torch.ops.hf_vq.rotate.default
    rotated: Tensor = run(x, rotation, scheme.spec(), inverse)
    return rotated


def _decode(
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    codes_2: Tensor | None,
    codebook_2: Tensor | None,
    scale_2: Tensor | None,
    rotation_2: Tensor | None,
    scheme: str,
    length: int,
) -> Tensor:
    problem = dispatch.DecodeProblem(codes.device.type, scheme, rows_of(codes), length)
    rows: Tensor = dispatch.select(problem).run(
        codes, codebook, scale, rotation, codes_2, codebook_2, scale_2, rotation_2,
        parse(scheme), length,
    )  # fmt: skip
    return rows


def _encode(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: str
) -> tuple[Tensor, Tensor]:
    problem = dispatch.EncodeProblem(
        x.device.type, name_of(x.dtype), scheme, rows_of(x), x.shape[-1]
    )
    codes, scale = dispatch.select(problem).run(x, codebook, rotation, parse(scheme))
    return codes, scale


def _rotate(x: Tensor, rotation: Tensor | None, scheme: str, inverse: bool) -> Tensor:
    problem = dispatch.RotateProblem(
        x.device.type, name_of(x.dtype), scheme, rows_of(x), x.shape[-1]
    )
    rotated: Tensor = dispatch.select(problem).run(x, rotation, parse(scheme), inverse)
    # An op's output must not be its input: a scheme without rotation returns it.
    return rotated.clone() if rotated is x else rotated


def _append(x: Tensor, *arguments: Any) -> None:
    *tensors, scheme, layout = arguments
    entry = dispatch.select(_append_problem(x.device, x.dtype, x.shape, scheme, layout))
    entry.run(x, *tensors, parse(scheme), layout)


@lru_cache(maxsize=256)  # every layer asks this twice for every token
def _append_problem(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, scheme: str, layout: str
) -> dispatch.AppendProblem:
    batch, heads, tokens, dim = shape
    rows = dispatch.bucket(batch * heads * tokens)
    return dispatch.AppendProblem(device.type, name_of(dtype), scheme, rows, dim, layout)


def _fake_decode(codes: Tensor, *arguments: Any) -> Tensor:
    return codes.new_empty(*codes.shape[:-1], arguments[-1], dtype=torch.float32)


def _fake_encode(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: str
) -> tuple[Tensor, Tensor]:
    parsed = parse(scheme)
    size = packed_size(x.shape[-1] // parsed.vector_size, parsed.entry_bits)
    codes = x.new_empty(*x.shape[:-1], size, dtype=torch.uint8)
    return codes, x.new_empty(*x.shape[:-1], parsed.row_numbers, dtype=torch.float16)


def _fake_append(x: Tensor, *arguments: Any) -> None:
    return None


def _fake_rotate(x: Tensor, rotation: Tensor | None, scheme: str, inverse: bool) -> Tensor:
    return torch.empty_like(x)


define(
    "decode",
    "(Tensor codes, Tensor codebook, Tensor scale, Tensor? rotation, Tensor? codes_2, "
    "Tensor? codebook_2, Tensor? scale_2, Tensor? rotation_2, str scheme, int length) -> Tensor",
    _decode,
    _fake_decode,
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
define(
    "append",
    "(Tensor x, Tensor? mean, Tensor codebook, Tensor(a!) codes, Tensor(b!) scale, int at, "
    "str scheme, str layout) -> ()",
    _append,
    _fake_append,
)
