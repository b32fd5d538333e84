"""`linear` on a Hopper GPU for many tokens: the fused kernel of linear_wgmma.cu.

No dense weight exists.

Launches are prepared here; `linear.fused` runs them, as it does those for few tokens.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....codegen.families.dequantize import diagonal_of, rotate_plan
from ....codegen.families.linear import LinearProblem
from ....codegen.families.linear_wgmma import blocks, choose, rotate_int8_plan, token_bucket
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel
from ....codegen.plan import RotateInt8Plan, WidePlan
from ....dispatch import Implementation
from ....errors import VQBackendError
from ....formats.scheme import VQScheme
from ....formats.stored_weight import StoredWeight
from .. import weight_supports
from . import fused
from .arguments import LinearArguments, RotateInt8Arguments
from .dequantize import DTYPES

_FLOAT = 4  # bytes


@functools.lru_cache(maxsize=1024)
def _kernel(plan: WidePlan, ordinal: int) -> LoadedKernel:
    return LoadedKernel(plan, LinearArguments, ordinal, default_store())


@functools.lru_cache(maxsize=1024)
def _rounder(plan: RotateInt8Plan, ordinal: int) -> LoadedKernel:
    return LoadedKernel(plan, RotateInt8Arguments, ordinal, default_store())


@functools.lru_cache(maxsize=4096)
def _prepare(
    scheme: VQScheme,
    rows: int,
    in_features: int,
    tokens: int,
    dtype: torch.dtype,
    ordinal: int,
    bits: int,
) -> fused.Launch:
    arch = device_arch(ordinal)
    bucket = token_bucket(tokens)
    problem = LinearProblem(scheme, bucket, rows, in_features, DTYPES[dtype], arch, bits)
    plan = choose(problem)
    if plan is None:
        raise VQBackendError(f"{scheme.spec()} has no wide kernel for {problem}.")
    return prepare(plan, scheme, rows, in_features, tokens, dtype, ordinal)


def prepare(
    plan: WidePlan,
    scheme: VQScheme,
    rows: int,
    in_features: int,
    tokens: int,
    dtype: torch.dtype,
    ordinal: int,
) -> fused.Launch:
    """How a layer of this size runs a plan with so many tokens: its kernels, and their sizes."""
    arch, token_tiles = device_arch(ordinal), -(-tokens // 8)
    kernel, count = _kernel(plan, ordinal), (blocks(plan, rows, tokens, arch),)
    if plan.activations_bits == 8:
        problem = LinearProblem(scheme, tokens, rows, in_features, DTYPES[dtype], arch, 8)
        rounding = _rounder(rotate_int8_plan(problem), ordinal)
        nbytes = 8 * token_tiles * (in_features + _FLOAT) + rows * _FLOAT
        return fused.Launch(
            kernel, token_tiles, count, rounding, 0, 0, -(-nbytes // 2), False, rounds=True
        )
    rotation = rotate_plan(
        DTYPES[dtype],
        DTYPES[dtype],
        scheme.block(in_features) if scheme.rotation != "none" else 1,
        diagonal_of(scheme),
        False,
        plan.unit,
        True,
    )
    return fused.Launch(
        kernel,
        token_tiles,
        count,
        fused.rotator(rotation, ordinal),
        rotation.blocks_at_a_time,
        rotation.numbers_of_a_block,
        8 * token_tiles * in_features,
        False,
    )


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`) for many tokens, in 16-bit floats.

    Entries of codebooks, their products with scales of groups and the rotated x are rounded to the
    dtype of x; sums are float32.
    """
    return _linear(x, weight, bias, 16)


def linear_int8(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """The same with 8-bit integers: the rotated x is rounded with a scale for each token, entries
    times scales of groups with one for each row. Their sums are exact."""
    return _linear(x, weight, bias, 8)


def _linear(x: Tensor, weight: StoredWeight, bias: Tensor | None, bits: int) -> Tensor:
    rows, scheme, in_features = weight.out_features, weight.scheme, weight.in_features
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    ordinal = x.device.index
    with torch.cuda.device(ordinal):
        tokens = x.numel() // in_features
        launch = _prepare(scheme, rows, in_features, tokens, x.dtype, ordinal, bits)
        fused.run(x, (weight,), (bias,), (y,), ordinal, launch)
    return y


LINEAR = Implementation(linear, weight_supports.wide_linear)
INT8_LINEAR = Implementation(linear_int8, weight_supports.int8_linear)
