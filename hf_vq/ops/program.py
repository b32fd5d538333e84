"""`Program`: the decoding step of one token as instructions over buffers of float32 numbers.

`hf.step` makes it of a model; a backend runs it (`dispatch.table.STEPS`). Nothing of it is of one
token: its buffers are numbered, and the layers of the cache too.

    operand      numbers [shape] of a buffer, or of a tensor of the model, at offset and strides
    instruction  result = op(operands), rounded to the float type that the model computes in there

Ops, and what they take beside operands of the result's shape:

    copy negate abs square cube sqrt rsqrt reciprocal silu relu       one
    add subtract multiply divide maximum minimum                      two, or one and `number`
    mean                              over the last dimension, which the result has not
    look_up                           row number `operand` of `Dense`
    dense codes                       the product of a `Dense` or a `StoredWeight` with a row, and a
                                      bias
    attention                         query, key, value [1, heads, dim] of the token in a layer
    call                              what PyTorch itself computes: `Instruction.call`, or attention
                                      of query, key, value [1, heads, dim] over a window of floats
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.stored_weight import StoredWeight

OPS = (
    "copy", "negate", "abs", "square", "cube", "sqrt", "rsqrt", "reciprocal", "silu", "relu", "add",
    "subtract", "multiply", "divide", "maximum", "minimum", "mean", "look_up", "dense", "codes",
    "attention", "call",
)  # fmt: skip


class Operand(NamedTuple):
    """Numbers that an instruction reads or writes.

    Args:
        shape: of what is read.
        stride: in numbers; 0 = the same number again.
        offset: of the first number, in the buffer; 0 of a tensor.
        buffer: its number; -1 = `tensor`.
        tensor: of the model, kept and read where it lies.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    buffer: int = -1
    tensor: Tensor | None = None


class Dense(NamedTuple):
    """A matrix. Only a `DenseHead` multiplies floats, and computes the same sums without a program.

    Args:
        tensor: [out, in] floats, for a product in rows; with `kind`, uint8 rows
            (`formats.integers`).
        kind: `int8`, or empty.
        columns: `in`.
    """

    tensor: Tensor
    kind: str
    columns: int


class Attention(NamedTuple):
    """Attention of one token over a layer of the cache, which takes the token first."""

    layer: int
    scaling: float
    softcap: float


class Form(NamedTuple):
    """How a model asks PyTorch for attention over floats; other forms have other bits.

    Args:
        query: its shape, [1, heads, 1, dim] or [1, kv heads, group, dim].
        repeats: of each head of the keys and values.
        enable_gqa: of `scaled_dot_product_attention`.
    """

    query: tuple[int, ...]
    repeats: int
    enable_gqa: bool


class FloatAttention(NamedTuple):
    """Attention of one token over a window of floats, which takes the token first.

    Args:
        layer: its number.
        window: tokens that a query sees at most, itself among them.
        scale: of `scaled_dot_product_attention`.
        dtype: of all tensors.
        early: its form until the window is full.
        full: its form then.
    """

    layer: int
    window: int
    scale: float | None
    dtype: torch.dtype
    early: Form
    full: Form


class Given(NamedTuple):
    """A tensor of a call: an operand, in the type that PyTorch had it in."""

    operand: Operand
    dtype: torch.dtype


class Call(NamedTuple):
    """An op of PyTorch's that has the same result as an instruction: result = op(*args, **options).

    Args:
        op: of torch.ops.
        args: tensors of the model, plain values and `Given`.
        options: tensors of the model and plain values.
        result: where the result goes, or the first one of several.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Operand


class Instruction(NamedTuple):
    """result = op(operands), and the call of PyTorch that it stands for."""

    op: str
    result: Operand
    operands: tuple[Operand, ...]
    rounded: torch.dtype
    number: float = 0.0
    detail: Dense | StoredWeight | Attention | FloatAttention | None = None
    call: Call | None = None


class Program(NamedTuple):
    """A decoding step.

    Args:
        instructions: in order.
        buffers: numbers of each. Number 0 is the token, number 1 its position.
        logits: [vocabulary], the result.
        dtype: of the logits.
    """

    instructions: tuple[Instruction, ...]
    buffers: tuple[int, ...]
    logits: Operand
    dtype: torch.dtype


TOKEN, POSITION = 0, 1


def flat(operand: Operand) -> tuple[int, int, int] | None:
    """(size, stride, offset) of an operand whose numbers lie at equal distances, else None."""
    size, stride = 1, 1
    for length, step in reversed(list(zip(operand.shape, operand.stride, strict=True))):
        if length == 1:
            continue
        if size == 1:
            stride = step
        elif step != stride * size:
            return None
        size *= length
    return size, stride, operand.offset


def merged(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """A shape and the strides of several operands with as few dimensions as possible.

    >>> merged((1, 4, 1, 64), ((256, 64, 64, 1), (0, 0, 0, 1)))
    ((4, 64), ((64, 1), (0, 1)))
    """
    kept: list[tuple[int, list[int]]] = []
    for axis, length in enumerate(shape):
        steps = [stride[axis] for stride in strides]
        if length == 1:
            continue
        if kept and all(
            outer == inner * length for outer, inner in zip(kept[-1][1], steps, strict=True)
        ):
            kept[-1] = kept[-1][0] * length, steps
        else:
            kept.append((length, steps))
    sizes = tuple(length for length, _ in kept)
    return sizes, tuple(tuple(steps[i] for _, steps in kept) for i in range(len(strides)))
