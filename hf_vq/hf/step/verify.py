"""Verification of a traced step: for every token, and in every number.

difference   two traces, of other tokens at other positions, are one program: nothing in it was
             taken from the token, its position or the length of the cache
compare      each instruction, given what PyTorch gave its own ops, computes what they computed,
             to two units in the last place of their type
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.program import Codes, Dense, Instruction, Operand, Program
from .trace import Refused, Step

_SUMS = 2e-5  # of the largest result: sums in float32 have another order


def difference(first: Program, second: Program) -> str | None:
    """The first thing in which two programs differ, or None."""
    if len(first.instructions) != len(second.instructions) or first.buffers != second.buffers:
        return "the model computes another thing at every token"
    for a, b in zip(first.instructions, second.instructions, strict=True):
        same = a.op == b.op and a.number == b.number and a.rounded == b.rounded
        operands = zip((a.result, *a.operands), (b.result, *b.operands), strict=False)
        if not (
            same and len(a.operands) == len(b.operands)
            and all(_same_operand(x, y) for x, y in operands) and _same_detail(a.detail, b.detail)
        ):  # fmt: skip
            return f"a number of {a.op} depends on the token's position"
    if not _same_operand(first.logits, second.logits):
        return "the logits lie elsewhere at every token"
    return None


def _same_operand(a: Operand, b: Operand) -> bool:
    strides = zip(a.shape, a.stride, b.stride, strict=False)
    return (
        (a.shape, a.offset, a.buffer) == (b.shape, b.offset, b.buffer)
        and all(one == other for length, one, other in strides if length > 1)
        and _same_tensor(a.tensor, b.tensor)
    )


def _same_detail(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (Dense, Codes)):
        return all(
            _same_tensor(x, y) if isinstance(x, Tensor) else x == y
            for x, y in zip(a, b, strict=True)
        )
    return bool(a == b)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def compare(step: Step, compiled: Any) -> None:
    """Run each instruction of a step that was just traced on PyTorch's own numbers.

    Args:
        step: whose cache has taken no other token since.
        compiled: its program, as a backend runs it.

    Raises:
        Refused: a result differs.
    """
    for layer, place in step.slots.items():
        compiled.bind(layer, place.view, place[1:])
    compiled.check()
    for index, (one, numbers) in enumerate(
        zip(step.program.instructions, step.numbers, strict=True)
    ):
        found, wanted = compiled.run_one(index, numbers.inputs), numbers.result
        size = wanted.abs()
        bound = 2 * torch.finfo(one.rounded).eps * size + _SUMS * size.max() + numbers.rounded
        if not bool(((found - wanted).abs() <= bound).all()):
            raise Refused(f"{one.op} computes other numbers than the model{_where(one)}")


def _where(one: Instruction) -> str:
    detail = one.detail
    return f" ({detail.spec})" if isinstance(detail, Codes) else ""
