"""Suite `cuda-peers`: quantized linear layers against the open-source kernels of VQ-LLM's tables.

VQ-LLM (arXiv 2503.02236) states its gains as latency reduction against the authors' kernels of
AQLM and QuIP#. AQLM's kernels are those of the installed package `aqlm`: it multiplies more than 6
tokens by a decoded weight and fewer one by one; both are timed for any number. QuIP#
decodes the weight and multiplies by it, here with our own dequantize kernel (its speed: suite
`cuda-linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch, ops
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import StoredWeight

from ..peers import aqlm_cuda
from ..timing import Candidate, speedup, summary
from .linear import SHAPES, copies_of, dense, ours
from .timing import interleave_graphs

AQLM = {"aqlm-2": "2x8", "vq8x16r1-tensor-g0-none": "1x16"}
SCHEMES = (*AQLM, "quip-sharp-2", "quip-sharp-4")
TOKENS = (1, 4, 16)
_DTYPE = torch.bfloat16
_Call = Callable[[int], Tensor]


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme and its peers at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU or no package aqlm, or a peer computes something else.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-peers needs a CUDA device.")
    found: list[dict[str, Any]] = []
    for shape in shapes:
        for name in schemes:
            sets = copies_of(weight_scheme(name), *shape)
            for count in tokens:
                for row in _rows(name, sets, *shape, count, rounds):
                    row |= {"out_features": shape[0], "in_features": shape[1]}
                    found.append(row)
                    report(row)
    settings = {"rounds": rounds, "dtype": str(_DTYPE)[6:], "aqlm": aqlm_cuda.version()}
    return settings, {"rows": found}


@torch.no_grad()
def _rows(
    name: str,
    sets: list[dict[str, Tensor]],
    out_features: int,
    in_features: int,
    tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    scheme = weight_scheme(name)
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    peers = _aqlm(x, name, sets) if name in AQLM else _dequantized(x, scheme, sets)
    expected = ops.linear(x, sets[0], None, scheme)
    for peer, call in peers.items():
        if not peer.endswith("kernels alone"):
            _check(peer, call(0), expected)
    candidates = {"ours": ours(x, sets, scheme), "bf16": dense(x, out_features)}
    candidates |= {peer: Candidate(call, len(sets)) for peer, call in peers.items()}
    seconds = interleave_graphs(candidates, rounds)
    mine = {"name": name, "tokens": tokens, "ours_us": summary(seconds["ours"])["us"]}
    return [
        {**mine, "peer": peer, **summary(seconds[peer]),
         "speedup": speedup(seconds["ours"], seconds[peer])}
        for peer in ("bf16", *peers)
    ]  # fmt: skip


def _aqlm(x: Tensor, name: str, sets: list[dict[str, Tensor]]) -> dict[str, _Call]:
    layers = [aqlm_layer(tensors, x.shape[-1]) for tensors in sets]
    kind = f"aqlm {AQLM[name]}"
    return {
        f"{kind}, token by token": lambda i: layers[i].looped(x),
        f"{kind}, kernels alone": lambda i: layers[i].products(x),
        f"{kind}, dequantized": lambda i: layers[i].dequantized(x),
    }


def aqlm_layer(tensors: dict[str, Tensor], in_features: int) -> aqlm_cuda.Layer:
    """Our stored tensors as the package keeps them."""
    codes, books = tensors["codes"], len(tensors["codebook"])
    if books == 2:  # the bytes of stages, side by side
        codes = codes.view(len(codes), 2, in_features // 8).transpose(1, 2)
    else:
        codes = codes.view(torch.int16).view(len(codes), in_features // 8, 1)
    return aqlm_cuda.Layer(codes, tensors["codebook"], tensors["scale"].flatten())


def _dequantized(x: Tensor, scheme: VQScheme, sets: list[dict[str, Tensor]]) -> dict[str, _Call]:
    (row,) = (row for row in dispatch.entries("linear") if row.name == "cuda.linear")
    weights = [StoredWeight.of(tensors, scheme, x.shape[-1]) for tensors in sets]
    return {"dequantized, as QuIP# does": lambda i: row.run(x, weights[i], None)}


def _check(peer: str, found: Tensor, expected: Tensor) -> None:
    """Both compute the same: the peer rounds sums of 8 weights to bfloat16 after each of them."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error < 8 * 2**-9:
        raise VQBackendError(f"{peer} computes something else: relative error {error:.3f}.")
