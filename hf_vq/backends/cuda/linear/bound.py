"""The shortest way from a call in Python to linear.cu: a launch worked out before, an op in C.

For eager calls, of which the host takes longer than the GPU. While a graph is captured, and for
tensors that need a copy, `fused.linear` does it, which also lets kernels overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....codegen.families.linear import token_bucket
from ....dispatch import Bound, Implementation, LinearProblem
from ....formats.scheme import VQScheme
from ....ops.library import parse
from ...cpu import boxed_ops
from .. import weight_supports
from ..bound_weight import ATTRIBUTE, BoundWeight
from . import fused
from .dequantize import diagonal_size, stored_sizes

FIELDS = ("device", "dtype", "rows", "columns", "tokens", "codes", "codebook", "scale",
          "diagonal", "codebook_dtype", "diagonal_dtype", "function", "blocks", "threads",
          "shared_bytes", "before", "before_blocks", "before_threads", "before_shared_bytes",
          "rotations", "across", "token_tiles", "arranged")  # fmt: skip
"""Fields of hf_vq_cuda_launch (kernels/cpu/api.h), in their order."""


def bind(problem: LinearProblem) -> Bound | None:
    """The op for a problem of one pass; None where torch does not let us register it."""
    op, in_features, scheme = boxed_ops.cuda_linear(), problem.in_features, parse(problem.scheme)
    if op is None or scheme.two_passes:
        return None
    launches: dict[tuple[int, int], Tensor] = {}  # by device, and numbers of x
    none = torch.empty(0, device="cpu")

    def run(
        x: Tensor,
        codes: Tensor,
        codebook: Tensor,
        scale: Tensor,
        rotation: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor | None:
        ordinal, numel = x.get_device(), x.numel()
        # Python launches first: it remembers who wrote the codes, for graphs to come.
        launched = type(getattr(codes, ATTRIBUTE, None)) is BoundWeight
        if not launched or ordinal != torch._C._cuda_getDevice() or not numel:
            return None
        launch = launches.get((ordinal, numel))
        if launch is None:
            tokens = numel // in_features
            launch = prepared(scheme, problem.out_features, in_features, tokens, x.dtype, ordinal)
            launches[ordinal, numel] = launch
        diagonal, added = none if rotation is None else rotation, none if bias is None else bias
        y: Tensor | None = op(x, codes, codebook, scale, diagonal, added, launch)
        return y

    return run


def prepared(
    scheme: VQScheme,
    rows: int,
    in_features: int,
    tokens: int,
    dtype: torch.dtype,
    ordinal: int,
) -> Tensor:
    """The launch as the op takes it: hf_vq_cuda_launch as a tensor of int64 on the CPU; without
    numbers, and so refused, where x has to be filled up with zeros on its way."""
    launch = fused.prepared(scheme, (rows,), in_features, token_bucket(tokens), dtype, ordinal)
    if launch.ragged:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    codes, codebook, scale = stored_sizes(scheme, rows, in_features)
    diagonal, diagonal_dtype = diagonal_size(scheme, in_features)
    kernel, before = launch.kernel, launch.before
    values = {
        "device": ordinal,
        "dtype": boxed_ops.number_of(dtype),
        "rows": rows,
        "columns": in_features,
        "tokens": tokens,
        "codes": codes,
        "codebook": codebook,
        "scale": scale,
        "diagonal": diagonal,
        "diagonal_dtype": boxed_ops.number_of(diagonal_dtype),
        "codebook_dtype": boxed_ops.number_of(
            torch.int8 if scheme.largest_entry else torch.float16
        ),
        "function": int(kernel.function),
        "blocks": sum(launch.blocks),
        "threads": kernel.plan.threads,
        "shared_bytes": kernel.shared,
    }
    if before is not None:
        count = tokens * in_features // launch.rotation_block
        values |= {
            "before": int(before.function),
            "before_blocks": -(-count // launch.blocks_at_a_time),
            "before_threads": before.plan.threads,
            "before_shared_bytes": before.shared,
            "rotations": count,
            "across": in_features // launch.rotation_block,
            "token_tiles": launch.token_tiles,
            "arranged": launch.arranged or tokens * in_features,
        }
    numbers = [values.get(name, 0) for name in FIELDS]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


LINEAR = Implementation(
    fused.linear,
    weight_supports.fused_linear,
    bind,
    grouped=fused.grouped,
    note=weight_supports.slower_than_dense,
    is_slow=lambda problem: weight_supports.slower_than_dense(problem) is not None,
)
