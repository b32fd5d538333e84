"""Stored tensors of one [out_features, in_features] matrix under a scheme, by name.

    codes      uint8 [out, streams * bytes]     the independent stages' streams, concatenated
    scale      fp16  [out, groups]
    codebook   fp16  [z, 2^y, x]                E8P: [z, 257, 8]; tile: [tile rows, columns, 2^y, x]
               int8  the same shapes            where codebook_bits is 7
    signs      uint8 [ceil(in / 8)]             random_hadamard: bit 1 = the input is negated
    diagonal   fp16  [in]                       scaled_hadamard: what the input is multiplied by
    rotation   fp16  [block, block]             qr
    codes_2, codebook_2         the second pass; a nested one's codebook is indexed by both codes,
                                [1, 2^(y + y_2), 1] at (first code << y_2) | second code
    scale_2                     of shared and rerotated stages
    signs_2, diagonal_2, rotation_2     of rerotated stages

A KV cache has no matrix: its rows are tokens [batch, heads, tokens, head_dim], coded one by one as
they come. With a universal codebook, or one per tensor (keys or values of a layer), a row has one
fp16 scale; with codebooks per channel group it has none (`kv_codebook_spec`).

Tensors with a `shared_name` do not depend on the data. A checkpoint keeps each of them once, at its
top level, under that name.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from ..errors import VQSchemeError
from .packing import packed_size
from .qoq import QoQScheme, qoq_specs
from .scheme import VQScheme
from .spec import TensorSpec
from .universal import refined_name


def tensor_specs(
    scheme: VQScheme | QoQScheme,
    out_features: int,
    in_features: int,
    *,
    seed: int = 0,
    where: str = "the tensor",
) -> dict[str, TensorSpec]:
    """Every tensor of a stored [out_features, in_features] matrix, by key (see the module, and
    formats/qoq.py).

    Raises:
        VQSchemeError: the dimensions cannot be stored; the message names `where` and the cure.
    """
    if isinstance(scheme, QoQScheme):
        return qoq_specs(scheme, out_features, in_features, where)
    try:
        return dict(_known_specs(scheme.key, out_features, in_features, seed))
    except VQSchemeError:
        return _specs(scheme, out_features, in_features, seed, where)  # the message names `where`


@lru_cache(maxsize=256)
def _known_specs(
    spec: str, out_features: int, in_features: int, seed: int
) -> dict[str, TensorSpec]:
    return _specs(VQScheme.parse(spec), out_features, in_features, seed, "the tensor")


def _specs(
    scheme: VQScheme, out_features: int, in_features: int, seed: int, where: str
) -> dict[str, TensorSpec]:
    if scheme.codebook == "channel_group":
        raise VQSchemeError(
            f"{where}: codebooks per channel group are for the KV cache, not for weights."
        )
    if scheme.mode != "unbiased":
        raise VQSchemeError(
            f"{where}: mode {scheme.mode!r} is for the KV cache; scales of weights are searched."
        )
    group, block = scheme.group(in_features, where), scheme.block(in_features, where)
    stream = packed_size(in_features // scheme.vector_size, scheme.entry_bits)
    codes = TensorSpec((out_features, scheme.streams * stream), torch.uint8)
    scale = TensorSpec((out_features, in_features // group), torch.float16)
    specs = {
        "codes": codes,
        "scale": scale,
        "codebook": _codebook_spec(scheme, out_features, in_features),
        **_rotation_specs(scheme, in_features, block, seed, suffix=""),
    }
    if scheme.two_passes:
        stream = packed_size(in_features // scheme.vector_size, scheme.second_bits)
        specs["codes_2"] = TensorSpec((out_features, stream), torch.uint8)
    if scheme.stages == "nested":
        bits = scheme.entry_bits + scheme.second_bits
        name = f"vq_codebook.gauss_{refined_name(scheme.entry_bits, scheme.second_bits)}_nested"
        specs["codebook_2"] = TensorSpec((1, 1 << bits, 1), torch.float16, name)
    elif scheme.two_passes:
        specs["codebook_2"] = _codebook_spec(scheme.second_pass(), out_features, in_features)
        specs["scale_2"] = scale
    if scheme.stages == "rerotated":
        specs.update(_rotation_specs(scheme, in_features, block, seed + 1, suffix="_2"))
    return specs


def _codebook_spec(scheme: VQScheme, out_features: int, in_features: int) -> TensorSpec:
    x, entries, stages = scheme.vector_size, scheme.entries, scheme.streams
    dtype = torch.int8 if scheme.largest_entry else torch.float16
    if scheme.codebook == "tile":
        tiles = (math.ceil(out_features / scheme.tile[0]), math.ceil(in_features / scheme.tile[1]))
        return TensorSpec((*tiles, entries, x), dtype, largest=scheme.largest_entry)
    if scheme.codebook == "tensor":
        return TensorSpec((stages, entries, x), dtype, largest=scheme.largest_entry)
    repeated = f"_r{stages}" if stages > 1 else ""
    if scheme.lattice:
        return TensorSpec((stages, 257, 8), torch.float16, f"vq_codebook.e8p{repeated}")
    name = f"vq_codebook.gauss_{x}x{scheme.entry_bits}{repeated}"
    return TensorSpec((stages, entries, x), torch.float16, name)


def kv_codebook_spec(
    scheme: VQScheme, heads: int, head_dim: int, where: str = "the cache"
) -> TensorSpec:
    """The codebooks that one layer's keys (or values) of a learned scheme are coded with: fp16
    [heads, head_dim / x, 2^y, x] per channel group, [1, 2^y, x] per tensor.

    Raises:
        VQSchemeError: head_dim cannot be split into vectors; the message names `where`.
    """
    if head_dim <= 0 or head_dim % scheme.vector_size:
        raise VQSchemeError(
            f"{scheme.notation()} needs a head_dim divisible by {scheme.vector_size}; {where} has "
            f"{head_dim}. Use a scheme with shorter vectors, such as nomad-4."
        )
    books = (heads, head_dim // scheme.vector_size) if not scheme.has_scale else (1,)
    return TensorSpec((*books, scheme.entries, scheme.vector_size), torch.float16)


def _rotation_specs(
    scheme: VQScheme, in_features: int, block: int, seed: int, suffix: str
) -> dict[str, TensorSpec]:
    if scheme.rotation == "random_hadamard":
        return {f"signs{suffix}": TensorSpec((packed_size(in_features, 1),), torch.uint8)}
    if scheme.is_scaled:
        diagonal = TensorSpec((in_features,), torch.float16, invertible=True)
        return {f"diagonal{suffix}": diagonal}
    if scheme.rotation == "qr":
        name = f"vq_rotation.qr{block}_seed{seed}"
        return {f"rotation{suffix}": TensorSpec((block, block), torch.float16, name)}
    return {}
