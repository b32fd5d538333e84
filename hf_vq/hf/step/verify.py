"""Verification of a traced step: for every token, and in every number.

difference   two traces, of other tokens at other positions, are one program: nothing in it was
             taken from the token, its position or the length of the cache
compare      each instruction, given what PyTorch gave its own ops, computes the same bits: one that
             does not becomes a call of PyTorch
whole        the program of both traces

The order of PyTorch's sums, and the polynomials of its functions, depend on its version and the
processor. The library's equal those of the machines that we know; `compare` finds out on
many numbers whether they do here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats.stored_weight import StoredWeight
from ...ops.program import Call, Dense, FloatAttention, Given, Instruction, Operand, Program
from .recorder import Refused
from .trace import Step

_SAMPLED = {"mean", "silu"}  # compared on more numbers than those of a trace
_SAMPLES = 1 << 16  # numbers of float32 that are compared


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
            and _same_call(a.call, b.call)
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
    if isinstance(a, StoredWeight):
        tensors = zip(a.tensors, b.tensors, strict=True)
        return a[2:] == b[2:] and all(_same_tensor(x, y) for x, y in tensors)
    if isinstance(a, Dense):
        return a[1:] == b[1:] and _same_tensor(a.tensor, b.tensor)
    if isinstance(a, FloatAttention):  # forms are those of two lengths
        return a._replace(early=b.early, full=b.full) == b
    return bool(a == b)


def _same_call(a: Call | None, b: Call | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.op is not b.op or len(a.args) != len(b.args) or a.options.keys() != b.options.keys():
        return False
    pairs = [*zip(a.args, b.args, strict=True)]
    pairs += [(x, b.options[name]) for name, x in a.options.items()]
    return _same_operand(a.result, b.result) and all(_same_argument(x, y) for x, y in pairs)


def _same_argument(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Given):
        return a.dtype == b.dtype and _same_operand(a.operand, b.operand)
    return _same_tensor(a, b) if isinstance(a, Tensor) else bool(a == b)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    return alike and (a.data_ptr() == b.data_ptr() or torch.equal(a, b))


def compare(step: Step, compiled: Any) -> set[int]:
    """Run each instruction of a step that was just traced on PyTorch's own numbers.

    Args:
        step: whose cache has taken no other token since.
        compiled: its program, as a backend runs it.

    Returns:
        The numbers of those that compute other bits, which are calls of PyTorch from now on.

    Raises:
        Refused: one of them cannot be a call.
    """
    for layer, place in step.slots.items():
        compiled.bind(layer, place.view, place[1:])
    compiled.check()
    known: dict[Any, bool] = {}
    calls = set()
    for index, (one, numbers) in enumerate(
        zip(step.program.instructions, step.numbers, strict=True)
    ):
        exact = True
        if one.op in _SAMPLED and one.call is not None:
            alike = one.op, one.rounded, one.result.shape, one.operands[0].shape
            if alike not in known:
                known[alike] = _equal_on_samples(index, one, compiled)
            exact = known[alike]
        if exact and _same_bits(compiled.run_one(index, numbers.inputs), numbers.result):
            continue
        if one.call is None:
            raise Refused(f"{one.op} computes other numbers than the model{_where(one)}")
        compiled.call(index)
        if not _same_bits(compiled.run_one(index, numbers.inputs), numbers.result):
            raise Refused(f"{one.call.op} computes other numbers at every call")
        calls.add(index)
    return calls


def whole(early: Program, late: Program, calls: set[int]) -> Program:
    """The program of two that are the same: one with these calls, and the forms of both lengths."""

    def merged(index: int, one: Instruction) -> Instruction:
        other = late.instructions[index].detail
        if isinstance(one.detail, FloatAttention) and isinstance(other, FloatAttention):
            return one._replace(detail=one.detail._replace(full=other.full))
        return one._replace(op="call", detail=None) if index in calls else one

    both = (merged(index, one) for index, one in enumerate(early.instructions))
    return early._replace(instructions=tuple(both))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _equal_on_samples(index: int, one: Instruction, compiled: Any) -> bool:
    """True if an instruction of one operand computes PyTorch's bits of many numbers."""
    assert one.call is not None
    (given,) = (x for x in one.call.args if isinstance(x, Given))
    shape = one.operands[0].shape
    samples = _samples(given.dtype, torch.Size(shape).numel()).view(-1, *shape)
    found = [compiled.run_one(index, (x,)) for x in samples]
    return all(
        _same_bits(result, compiled.call_one(index, (x,)))
        for result, x in zip(found, samples, strict=True)
    )


def _samples(dtype: torch.dtype, row: int) -> Tensor:
    """Rows of numbers of a type: of 16 bits all that are finite, of float32 some of every size."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.float32:
        numbers = torch.randn(_SAMPLES, generator=generator)
        numbers *= torch.exp2(torch.randint(-8, 8, (_SAMPLES,), generator=generator))
    else:
        every = torch.randperm(1 << 16, generator=generator).to(torch.int16)
        numbers = every.view(dtype).float().nan_to_num(0.0, 0.0, 0.0)
    rows = -(-len(numbers) // row)
    return numbers.repeat(1 + rows * row // len(numbers))[: rows * row]


def _where(one: Instruction) -> str:
    detail = one.detail
    return f" ({detail.scheme.spec()})" if isinstance(detail, StoredWeight) else ""
