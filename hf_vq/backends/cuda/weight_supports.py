"""What the CUDA kernels of weights support, as the dispatch table asks: None, or why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ... import dispatch
from ...formats.published import VptqLayout
from ...formats.scheme import VQScheme
from ...ops import published
from .. import refusals
from . import devices

if TYPE_CHECKING:
    from ...codegen.families.vptq import VptqProblem


def linear(problem: dispatch.LinearProblem | dispatch.InputGradientProblem) -> str | None:
    """Whether the weight is decoded for PyTorch to multiply."""
    from ...codegen.families.dequantize_rotated import restorable
    from ...codegen.plan import Dtype

    scheme = VQScheme.parse(problem.scheme)
    reason = refusals.dtype(problem.dtype, refusals.FLOATS)
    if reason is None and scheme.stages == "nested":
        return restorable(scheme, problem.in_features, Dtype(problem.dtype))
    return reason or _decodable(scheme, problem.in_features)


def decode(problem: dispatch.DecodeProblem) -> str | None:
    """Whether rows are decoded."""
    return _decodable(VQScheme.parse(problem.scheme), problem.length)


def _decodable(scheme: VQScheme, length: int) -> str | None:
    from ...codegen.families.dequantize import decodable, rotatable

    return decodable(scheme) or rotatable(scheme, length)


def rotate(problem: dispatch.RotateProblem) -> str | None:
    """Whether rows are rotated."""
    from ...codegen.families.dequantize import rotatable

    reason = refusals.dtype(problem.dtype, refusals.FLOATS, "numbers")
    return reason or rotatable(VQScheme.parse(problem.scheme), problem.length)


def encode_weight(problem: dispatch.EncodeWeightProblem) -> str | None:
    """Whether the codes of rows are found."""
    from ...codegen.families.encode import encodable
    from ...codegen.jit.device import device_arch

    arch = device_arch(torch.cuda.current_device())
    return encodable(VQScheme.parse(problem.scheme), problem.in_features, arch)


def round_weight(problem: dispatch.RoundWeightProblem) -> str | None:
    """Whether rows are rounded, with errors passed on."""
    from ...codegen.families.encode import roundable
    from ...codegen.jit.device import device_arch

    arch = device_arch(torch.cuda.current_device())
    return roundable(VQScheme.parse(problem.scheme), problem.size, arch)


def fused_linear(problem: dispatch.LinearProblem) -> str | None:
    """Whether linear.cu computes with the codes."""
    from ...codegen.families.dequantize import rotatable
    from ...codegen.families.linear import MOST_TOKENS, LinearProblem, choose, fusable
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    scheme, columns = VQScheme.parse(problem.scheme), problem.in_features
    reason = (
        refusals.dtype(problem.dtype, refusals.HALVES)
        or refusals.many_tokens(problem.tokens, MOST_TOKENS)
        or fusable(scheme, columns)
        or rotatable(scheme, columns)
    )
    if reason:
        return reason
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    tokens = problem.tokens if problem.tokens == 1 else max(problem.tokens, 8)
    asked = LinearProblem(scheme, tokens, problem.out_features, columns, dtype, arch)
    return refusals.no_plan(choose(asked), problem.tokens)


def wide_linear(problem: dispatch.LinearProblem) -> str | None:
    """Whether linear_wgmma.cu, for many tokens on Hopper, computes with the codes."""
    from ...codegen.families.linear_wgmma import MOST_TOKENS, fewest_tokens

    fewest = fewest_tokens(VQScheme.parse(problem.scheme))
    reason = refusals.few_tokens(problem.tokens, fewest)
    return reason or refusals.many_tokens(problem.tokens, MOST_TOKENS) or _wide(problem, 16)


def int8_linear(problem: dispatch.LinearProblem) -> str | None:
    """Whether the same kernel computes with inputs that it rounds to int8, as the scheme asks."""
    from ...codegen.families.linear_wgmma import FEWEST_INT8_TOKENS

    if VQScheme.parse(problem.scheme).activations_bits != 8:
        return "inputs are floats: VQConfig(activations_bits=8) rounds them"
    return refusals.few_tokens(problem.tokens, FEWEST_INT8_TOKENS) or _wide(problem, 8)


def _wide(problem: dispatch.LinearProblem, activations_bits: int) -> str | None:
    from ...codegen.families.dequantize import rotatable
    from ...codegen.families.linear import LinearProblem
    from ...codegen.families.linear_wgmma import choose, token_bucket, wide
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    scheme, columns = VQScheme.parse(problem.scheme), problem.in_features
    reason = refusals.dtype(problem.dtype, refusals.HALVES) or devices.several_kinds()
    if reason:
        return reason
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    reason = wide(scheme, columns, arch, activations_bits) or rotatable(scheme, columns)
    if reason:
        return reason
    tokens, rows = token_bucket(problem.tokens), problem.out_features
    asked = LinearProblem(scheme, tokens, rows, columns, dtype, arch, activations_bits)
    return refusals.no_plan(choose(asked), problem.tokens)


def tile_linear(problem: dispatch.LinearProblem) -> str | None:
    """Whether linear_tile_codebook.cu, for a codebook per tile, computes with the codes."""
    from ...codegen.families.dequantize import rotatable
    from ...codegen.families.linear import LinearProblem, token_bucket
    from ...codegen.families.linear_tile_codebook import MOST_LAUNCHES, MOST_TOKENS, choose, tiled
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    scheme, columns = VQScheme.parse(problem.scheme), problem.in_features
    reason = (
        refusals.dtype(problem.dtype, refusals.HALVES)
        or refusals.many_tokens(problem.tokens, MOST_LAUNCHES * MOST_TOKENS)
        or devices.several_kinds()
        or tiled(scheme, columns)
        or rotatable(scheme, columns)
    )
    if reason:
        return reason
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    tokens = token_bucket(min(problem.tokens, MOST_TOKENS))
    asked = LinearProblem(scheme, tokens, problem.out_features, columns, dtype, arch)
    return refusals.no_plan(choose(asked), problem.tokens)


def vptq_decoded(problem: dispatch.PublishedLinearProblem) -> str | None:
    """Whether VPTQ's codes are decoded for PyTorch to multiply."""
    from ...codegen.families.vptq import decodable

    layout = published.parse(problem.published)
    if not isinstance(layout, VptqLayout):
        return f"kernels know VPTQ's layout, not that of {layout.name()}"
    return refusals.dtype(problem.dtype, refusals.FLOATS) or decodable(layout)


def vptq_linear(problem: dispatch.PublishedLinearProblem) -> str | None:
    """Whether vptq.cu multiplies with VPTQ's codes."""
    from ...codegen.families.vptq import MOST_TOKENS, choose, fusable

    reason = vptq_decoded(problem) or refusals.many_tokens(problem.tokens, MOST_TOKENS)
    if reason:
        return reason
    asked = _vptq_problem(problem)
    reason = fusable(asked.layout, asked.dtype)
    if reason is None and choose(asked) is None:
        return refusals.NO_PLAN
    return reason


def _vptq_problem(problem: dispatch.PublishedLinearProblem) -> VptqProblem:
    from ...codegen.families.vptq import VptqProblem
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    layout, tokens = published.parse(problem.published), 16 if problem.tokens > 8 else 8
    assert isinstance(layout, VptqLayout)
    arch = device_arch(torch.cuda.current_device())
    return VptqProblem(layout, tokens, problem.out_features, Dtype(problem.dtype), arch)


def slower_than_dense(problem: dispatch.LinearProblem) -> str | None:
    """What to say of a layer that a GPU multiplies by a dense bfloat16 weight in less time."""
    from ...codegen.families import linear as choose_linear
    from ...codegen.jit.device import device_arch
    from ...codegen.plan import Dtype

    if problem.tokens > 1:
        return None
    scheme, dtype = VQScheme.parse(problem.scheme), Dtype(problem.dtype)
    rows, columns = problem.out_features, problem.in_features
    arch = device_arch(torch.cuda.current_device())
    plan = choose_linear.choose(choose_linear.LinearProblem(scheme, 1, rows, columns, dtype, arch))
    if plan is None or plan.in_shared:
        return None
    return _slower(rows * columns / scheme.vector_size * scheme.streams, rows, columns)


def vptq_slower_than_dense(problem: dispatch.PublishedLinearProblem) -> str | None:
    """`slower_than_dense` of VPTQ's codes."""
    from ...codegen.families.vptq import choose, l2_lookups

    if problem.tokens > 1:
        return None
    asked = _vptq_problem(problem)
    plan = choose(asked)
    return (
        None
        if plan is None
        else _slower(l2_lookups(plan, asked), problem.out_features, problem.in_features)
    )


def _slower(lookups: float, rows: int, columns: int) -> str | None:
    from ...codegen.families.dequantize import times_dense
    from ...codegen.jit.device import device_arch

    if times_dense(lookups, rows, columns, device_arch(torch.cuda.current_device())) <= 1:
        return None
    return (
        "entries of a codebook this large are looked up in L2, which takes longer than reading a "
        "bfloat16 weight: on this GPU these codes save memory, not time; `hf-vq convert "
        "--requantize vq-2` makes a model that saves both"
    )
