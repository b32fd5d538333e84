"""`linear` on a GPU for few tokens and codebooks of tiles (linear_tile_codebook.cu).

Launches are prepared here; `linear.fused` keeps and runs them, as it does those of linear.cu.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....codegen.families.dequantize import diagonal_of, rotate_plan
from ....codegen.families.linear import LinearProblem, token_bucket
from ....codegen.families.linear_tile_codebook import MOST_TOKENS, blocks, choose
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....codegen.plan import TilePlan
from ....dispatch import Implementation
from ....errors import VQBackendError
from ....formats.scheme import VQScheme
from ....formats.stored_weight import StoredWeight
from .. import weight_supports
from . import fused
from .arguments import LinearArguments
from .dequantize import DTYPES


@functools.lru_cache(maxsize=1024)
def _kernel(plan: TilePlan, ordinal: int) -> LoadedKernel:
    return LoadedKernel(plan, LinearArguments, ordinal, default_store())


@functools.lru_cache(maxsize=4096)
def _prepare(
    scheme: VQScheme, rows: int, in_features: int, bucket: int, dtype: torch.dtype, ordinal: int
) -> fused.Launch:
    arch = device_arch(ordinal)
    problem = LinearProblem(scheme, bucket, rows, in_features, DTYPES[dtype], arch)
    plan = choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no kernel for tiles for {problem}.")
    return prepare(plan, scheme, rows, in_features, dtype, ordinal)


def prepare(
    plan: TilePlan,
    scheme: VQScheme,
    rows: int,
    in_features: int,
    dtype: torch.dtype,
    ordinal: int,
) -> fused.Launch:
    """How a layer of this size runs a plan: its kernels, loaded, and their sizes."""
    before, block, at_a_time = None, 0, 0
    if scheme.rotation != "none":
        rotation = rotate_plan(
            DTYPES[dtype], DTYPES[dtype], scheme.block(in_features), diagonal_of(scheme), False
        )
        before = fused.rotator(rotation, ordinal)
        block, at_a_time = rotation.numbers_of_a_block, rotation.blocks_at_a_time
    return fused.Launch(
        _kernel(plan, ordinal),
        plan.token_tiles,
        (blocks(plan, rows),),
        before,
        at_a_time,
        block,
        0,
        False,
    )


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`) in 16-bit floats, for `MOST_TOKENS` at a time.

    Entries of codebooks and the rotated x are rounded to the dtype of x; sums are float32.
    """
    rows, scheme, in_features = weight.out_features, weight.scheme, weight.in_features
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    ordinal, tokens = x.get_device(), x.numel() // in_features
    parts = [(x, y)]
    if tokens > MOST_TOKENS:
        of_x, of_y = x.reshape(-1, in_features), y.view(-1, rows)
        parts = list(zip(of_x.split(MOST_TOKENS), of_y.split(MOST_TOKENS), strict=True))
    with torch.cuda.device(ordinal):
        bucket = token_bucket(min(tokens, MOST_TOKENS))
        launch = _prepare(scheme, rows, in_features, bucket, x.dtype, ordinal)
        for of_x, of_y in parts:
            fused.run(of_x, (weight,), (bias,), (of_y,), ordinal, launch)
    return y


LINEAR = Implementation(linear, weight_supports.tile_linear)
