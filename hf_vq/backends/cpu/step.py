"""`CompiledStep`: an `ops.program.Program` as libhf_vq_cpu runs it, with one call for a token."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...codegen.packed import FLOAT, INT32, INT64, POINTER, Packed
from ...errors import VQBackendError
from ...formats.stored_weight import StoredWeight
from ...ops.kv import KVCacheView
from ...ops.program import (
    OPS,
    POSITION,
    TOKEN,
    Attention,
    Call,
    Dense,
    FloatAttention,
    Given,
    Instruction,
    Operand,
    Program,
    flat,
    merged,
)
from . import kv
from . import library as native
from .matrices import matrix

OPERAND = Packed([("data", POINTER), ("stride.0 stride.1 stride.2", INT64), ("dtype", INT32)])
INSTRUCTION = Packed([
    ("y a b c", OPERAND), ("size.0 size.1 size.2", INT64), ("detail", POINTER), ("number", FLOAT),
    ("op rounded", INT32),
])  # fmt: skip
DENSE = Packed([("data", POINTER), ("out in out_stride in_stride", INT64), ("dtype", INT32)])
LAYER = Packed([
    ("k v", kv.CODES), ("sink_k sink_v tail_k tail_v", kv.FLOATS),
    ("heads group length coded begin end k_end v_end window keep", INT64),
    ("scaling softcap", FLOAT),
])  # fmt: skip
CALL = Packed([("run", POINTER), ("number", INT64)])
"""Structs of kernels/cpu/api.h: hf_vq_operand, hf_vq_instruction, hf_vq_dense, hf_vq_token,
hf_vq_call."""

_INT8 = 4  # enum hf_vq_dtype
_NUMBER = {op: number for number, op in enumerate(OPS)}
_NOTHING = (0, 0, 0, 0, 0)
_LINE = 16  # numbers of a cache line: buffers begin at one
_WHOLE_ROWS = {"dense", "codes"}
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class CompiledStep:
    """A program with its buffers. One thread at a time.

    Args:
        program: whose tensors it keeps, and reads where they lie.
        layers: how many the cache has.

    Raises:
        VQBackendError: the library is missing, or cannot run an instruction.
    """

    def __init__(self, program: Program, layers: int) -> None:
        library = native.load()
        if library is None:
            raise VQBackendError(native.why_not())
        self.program, self._run = program, library.hf_vq_step
        self._supports = library.hf_vq_step_supports
        self._places, size = _place(program)
        self._memory = torch.full((size,), math.nan, dtype=torch.float32, device="cpu")
        self._layers = [ctypes.create_string_buffer(LAYER.size) for _ in range(layers)]
        self._kept: list[Any] = [[] for _ in range(layers)]
        self._shape: dict[int, tuple[tuple[int, int, int], int, float, float]] = {}
        self._floats: dict[int, _Floats] = {}
        self._details: list[Any] = []
        self._calls = _Calls()
        self._callback = _CALLBACK(self._calls)
        shown = Operand(program.logits.shape, _dense_stride(program.logits.shape))
        last = Instruction("copy", shown, (program.logits,), torch.float32)
        packed = [self._packed(each) for each in (*program.instructions, last)]
        self._count = len(packed)
        self._code = ctypes.create_string_buffer(b"".join(packed), INSTRUCTION.size * self._count)
        self._address = ctypes.addressof(self._code)
        base, place = self._memory.data_ptr(), self._places
        self._token = ctypes.c_float.from_address(base + 4 * place[TOKEN])
        self._position = ctypes.c_float.from_address(base + 4 * place[POSITION])
        # The last instruction writes the logits into a tensor of the caller's.
        first = self._address + INSTRUCTION.size * (self._count - 1)
        self._out = ctypes.c_void_p.from_address(first)
        dtype = ctypes.c_int32.from_address(first + OPERAND.size - 8)
        dtype.value = native.DTYPES[program.dtype]

    # -- compiling -------------------------------------------------------------------------------

    def _packed(self, one: Instruction) -> bytes:
        result, operands = one.result, one.operands
        if one.op == "call":
            return self._packed_call(one)
        of_row: list[tuple[int, ...]]
        if one.op in _WHOLE_ROWS:
            size, strides = _row(result, one)
            of_row = [strides, _row(operands[0], one)[1]]
            of_row += [_row(each, one)[1] for each in operands[1:]]
        elif one.op == "attention":
            size, of_row = _rows(result), [_row_strides(each) for each in (result, *operands)]
        elif one.op == "look_up":
            size, of_row = (1, 1, math.prod(result.shape)), [(0, 0, 1), (0, 0, 1)]
        else:
            size, of_row = _elements(result, operands, one)
        fields = [*self._operand(result, of_row[0])]
        places = list(operands)
        if one.op == "dense" or one.op == "codes":  # the bias is c
            places = [operands[0], None, *operands[1:]]  # type: ignore[list-item]
            of_row = [of_row[0], of_row[1], (0, 0, 0), *of_row[2:]]
        for index in range(3):
            there = index < len(places) and places[index] is not None
            fields += self._operand(places[index], of_row[1 + index]) if there else _NOTHING
        detail = self._detail(one)
        return INSTRUCTION.pack(
            *fields, *size, detail, one.number, _NUMBER[one.op], native.DTYPES[one.rounded]
        )

    def _operand(self, x: Operand, stride: Sequence[int]) -> tuple[int, ...]:
        if x.tensor is None:
            place = (
                0 if x.buffer < 0 else self._places[x.buffer] + x.offset
            )  # `run` knows that of 0
            return self._memory.data_ptr() + 4 * place, *stride, 0
        if x.tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise VQBackendError(f"an operand is {x.tensor.dtype}")
        return x.tensor.data_ptr(), *stride, native.DTYPES[x.tensor.dtype]

    def _detail(self, one: Instruction) -> int:
        detail = one.detail
        if detail is None:
            return 0
        if isinstance(detail, Attention):
            query, key, value = (operand.shape for operand in one.operands)
            sizes, group = (key[1], key[2], value[2]), query[1] // key[1]
            self._shape[detail.layer] = sizes, group, detail.scaling, detail.softcap
            return ctypes.addressof(self._layers[detail.layer])
        made: Any
        if isinstance(detail, StoredWeight):
            made = matrix(detail)
            if not made.has_kernel:
                name = detail.scheme.notation()
                raise VQBackendError(f"{name} has no kernel that multiplies with it")
        else:
            assert isinstance(detail, Dense)
            made = ctypes.create_string_buffer(_dense(detail), DENSE.size)
        self._details.append(made)
        return ctypes.addressof(made)

    def _packed_call(self, one: Instruction) -> bytes:
        """An instruction that PyTorch computes: the library itself reads and writes nothing."""
        if isinstance(one.detail, FloatAttention):
            rows = [self._numbers(x) for x in (*one.operands, one.result)]
            self._floats[one.detail.layer] = floats = _Floats(one.detail, rows)
            number = self._calls.add(floats.attend)
        else:
            assert one.call is not None
            number = self._calls.add(self._in_torch(one.call))
        run = ctypes.cast(self._callback, ctypes.c_void_p).value
        made = ctypes.create_string_buffer(CALL.pack(run, number), CALL.size)
        self._details.append(made)
        somewhere = self._memory.data_ptr(), 0, 0, 1, 0
        return INSTRUCTION.pack(
            *somewhere, *somewhere, *_NOTHING, *_NOTHING, 1, 1, 1, ctypes.addressof(made), 0.0,
            _NUMBER["call"], 0,
        )  # fmt: skip

    def _in_torch(self, call: Call) -> Callable[[], None]:
        """A call of PyTorch between the buffers."""
        args, makers = [*call.args], []
        for index, x in enumerate(call.args):
            if isinstance(x, Given):
                args[index] = numbers = self._numbers(x.operand)
                if x.dtype is not torch.float32:
                    makers.append((index, partial(numbers.to, x.dtype)))
        op, options, result = call.op, call.options, self._numbers(call.result)

        def run() -> None:
            given = [*args]
            for index, make in makers:
                given[index] = make()
            out = op(*given, **options)
            result.copy_(out[0] if type(out) is tuple else out)

        return run

    def call(self, index: int) -> None:
        """Leave an instruction to PyTorch from now on."""
        one = self.program.instructions[index]._replace(op="call")
        at = self._address + INSTRUCTION.size * index
        ctypes.memmove(at, self._packed_call(one), INSTRUCTION.size)

    # -- running ---------------------------------------------------------------------------------

    def bind(self, layer: int, view: KVCacheView, counts: tuple[int, ...]) -> bool:
        """Let the next token of a layer go to a place; False if its heads are not the program's.

        Args:
            layer: its number.
            view: `recent` are the whole memories of the tails.
            counts: length, coded, begin, end, key_end, value_end, window, keep.
        """
        if layer in self._floats:
            return self._floats[layer].bind(view, *counts[2:4])
        if layer not in self._shape:
            return False
        sizes, group, scaling, softcap = self._shape[layer]
        kept: list[Tensor | None] = []
        key, value = view.key, view.value
        if (key.heads, key.dim, value.dim) != sizes or value.heads != key.heads:
            return False
        LAYER.pack_into(
            self._layers[layer], 0,
            *kv._codes(key, view, key.codes, kept, 0, 0),
            *kv._codes(value, view, value.codes, kept, 0, 0),
            *kv._floats(key.sinks, kept), *kv._floats(value.sinks, kept),
            *kv._floats(key.recent, kept), *kv._floats(value.recent, kept),
            key.heads, group, *counts, scaling, softcap,
        )  # fmt: skip
        self._kept[layer] = kept
        return True

    def forget(self, layer: int) -> None:
        """Let a layer of floats begin one token later."""
        self._floats[layer].begin += 1

    def check(self) -> None:
        """Ask the library whether it runs the program, after all layers were bound.

        Raises:
            VQBackendError: it does not; names the instruction.
        """
        out = torch.empty(self.program.logits.shape, dtype=self.program.dtype, device="cpu")
        self._out.value = out.data_ptr()
        for index in range(self._count):
            at = self._address + INSTRUCTION.size * index
            if self._supports(at, 1) != native.OK:
                op = (*self.program.instructions, None)[index]
                raise VQBackendError(f"the library does not run {op and op.op}")

    def run(self, token: int, position: int, out: Tensor) -> None:
        """Run the program: the token is written to all layers, its logits to `out`.

        Raises:
            VQBackendError: the library refused; no layer counts the token.
            KeyboardInterrupt: Ctrl-C, or what else a call of PyTorch raises.
        """
        self._token.value, self._position.value = token, position
        self._out.value = out.data_ptr()
        self._calls.finished = 0
        status = self._run(self._address, self._count)
        self._calls.check(status)
        native.check(status, "step")
        self._calls.check_all()
        for each in self._floats.values():
            each.end += 1

    def run_one(self, index: int, inputs: Sequence[Tensor | None]) -> Tensor:
        """Run one instruction on numbers that are given, for comparisons.

        Args:
            inputs: float32, one for each operand; None for tensors of the model.

        Returns:
            float32 [shape of the result].
        """
        one = self._given(index, inputs)
        status = self._run(self._address + INSTRUCTION.size * index, 1)
        self._calls.check(status)
        native.check(status, "step")
        return self._numbers(one.result).clone()

    def call_one(self, index: int, inputs: Sequence[Tensor | None]) -> Tensor:
        """What PyTorch computes in the place of an instruction: the same arguments and result."""
        one = self._given(index, inputs)
        assert one.call is not None
        self._in_torch(one.call)()
        return self._numbers(one.result).clone()

    def _given(self, index: int, inputs: Sequence[Tensor | None]) -> Instruction:
        """An instruction whose operands now have these numbers."""
        one = self.program.instructions[index]
        for operand, numbers in zip(one.operands, inputs, strict=True):
            if operand.tensor is None and numbers is not None:
                once = tuple(slice(1) if step == 0 else slice(None) for step in operand.stride)
                self._numbers(operand)[once].copy_(numbers[once])
        return one

    def _numbers(self, x: Operand) -> Tensor:
        return self._memory.as_strided(x.shape, x.stride, self._places[x.buffer] + x.offset)


def head(x: Tensor, weight: Dense, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + bias as `Program`s compute it, in the dtype of x.

    Args:
        x: one row of any shape [.., in].
        weight: W [out, in].
        bias: [out] floats, contiguous.

    Returns:
        [.., out]; None if the library does not run.
    """
    library, rows = native.load(), len(weight.tensor)
    if library is None or x.dtype not in native.DTYPES or weight.tensor.stride(1) != 1:
        return None
    given = x.detach().float().contiguous()
    out = torch.empty(rows, dtype=torch.float32, device="cpu")
    matrix_ = ctypes.create_string_buffer(_dense(weight), DENSE.size)
    row = [(each.data_ptr(), 0, 0, 1, 0) for each in (out, given)]
    added = _NOTHING if bias is None else (bias.data_ptr(), 0, 0, 1, native.DTYPES[bias.dtype])
    instruction = ctypes.create_string_buffer(
        INSTRUCTION.pack(
            *row[0], *row[1], *_NOTHING, *added, 1, 1, rows, ctypes.addressof(matrix_), 0.0,
            _NUMBER["dense"], native.DTYPES[x.dtype],
        ),
        INSTRUCTION.size,
    )  # fmt: skip
    if library.hf_vq_step(instruction, 1) != native.OK:
        return None
    return out.to(x.dtype).view(*x.shape[:-1], rows)


class _Calls:
    """What PyTorch computes in a step, by number, as the library calls it."""

    def __init__(self) -> None:
        self._made: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self.finished = 0

    def add(self, call: Callable[[], None]) -> int:
        """The number of one more."""
        self._made.append(call)
        return len(self._made) - 1

    def __call__(self, number: int) -> int:
        try:
            self._made[number]()
        except BaseException as error:  # it may not pass through C: `check` raises it
            self._error = error
            return native.UNSUPPORTED
        self.finished += 1
        return native.OK

    def check(self, status: int) -> None:
        """Raise what the last call raised. Ctrl-C just before one is lost in ctypes, which prints
        it and gives the library any number; success, too (`check_all`)."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        if status == native.CALL_ENDED:
            raise KeyboardInterrupt

    def check_all(self) -> None:
        """Raise if a call of a whole step did not happen: see `check`."""
        if self.finished != len(self._made):
            raise KeyboardInterrupt


class _Floats:
    """A layer of floats: two memories whose tokens lie at [begin .. end), and PyTorch's attention.

    Args:
        detail: of the instruction.
        rows: query, key, value and result [1, heads, dim] of the token.
    """

    def __init__(self, detail: FloatAttention, rows: Sequence[Tensor]) -> None:
        self.detail = detail
        query, *self._new, self._result = rows
        self._query = {form: query.view(form.query) for form in (detail.early, detail.full)}
        self._memory: tuple[Tensor, ...] = ()
        self.begin = self.end = 0

    def bind(self, view: KVCacheView, begin: int, end: int) -> bool:
        """Take a place; False if its heads are not the program's."""
        self._memory, self.begin, self.end = (view.key.recent, view.value.recent), begin, end
        held = [(x.shape[1], x.shape[3], x.dtype) for x in self._memory]
        return held == [(*x.shape[1:], self.detail.dtype) for x in self._new]

    def attend(self) -> None:
        """Write the token behind the others, and attend."""
        detail, tokens = self.detail, self.end + 1 - self.begin
        form = detail.full if tokens >= detail.window else detail.early
        for memory, row in zip(self._memory, self._new, strict=True):
            memory.select(2, self.end).copy_(row)
        key, value = (each.narrow(2, self.begin, tokens) for each in self._memory)
        if form.repeats > 1:
            key, value = (each.repeat_interleave(form.repeats, 1) for each in (key, value))
        out = scaled_dot_product_attention(
            self._query[form].to(detail.dtype), key, value, scale=detail.scale,
            enable_gqa=form.enable_gqa,
        )  # fmt: skip
        self._result.copy_(out.reshape(self._result.shape))


def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _dense(detail: Dense) -> bytes:
    tensor, kind, columns = detail
    if kind:
        return DENSE.pack(tensor.data_ptr(), len(tensor), columns, tensor.stride(0), 1, _INT8)
    rows, columns = tensor.shape
    outer, inner = tensor.stride()
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise VQBackendError(f"a matrix is {tensor.dtype}")
    inner = 1 if columns == 1 else inner  # it says nothing
    if inner != 1 and outer != 1:
        raise VQBackendError("a matrix has gaps between its numbers")
    return DENSE.pack(tensor.data_ptr(), rows, columns, outer, inner, native.DTYPES[tensor.dtype])


def _row(x: Operand, one: Instruction) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    found = flat(x)
    if found is None or (found[1] != 1 and found[0] > 1 and x.tensor is None):
        raise VQBackendError(f"an operand of {one.op} has gaps")
    return (1, 1, found[0]), (0, 0, found[1] if found[0] > 1 else 1)


def _rows(x: Operand) -> tuple[int, int, int]:
    _, heads, dim = x.shape
    return 1, heads, dim


def _row_strides(x: Operand) -> tuple[int, int, int]:
    return 0, x.stride[1], x.stride[2]


def _elements(
    result: Operand, operands: tuple[Operand, ...], one: Instruction
) -> tuple[tuple[int, int, int], list[tuple[int, ...]]]:
    """Sizes and strides of what is read element by element, or along the last dimension."""
    shape, strides = operands[0].shape, [each.stride for each in (result, *operands)]
    if one.op == "mean":  # the last dimension stays what it is
        last = [stride[-1] for stride in strides]
        sizes, merged_ = merged(shape[:-1], tuple(stride[:-1] for stride in strides))
        sizes = (*sizes, shape[-1])
        merged_ = tuple((*m, end) for m, end in zip(merged_, last, strict=True))
    else:
        sizes, merged_ = merged(shape, tuple(strides))
    if len(sizes) > 3:
        raise VQBackendError(f"{one.op} has {len(sizes)} dimensions")
    missing = 3 - len(sizes)
    full = (1,) * missing + sizes
    padded = [(0,) * missing + each for each in merged_]
    return (full[0], full[1], full[2]), padded


def _place(program: Program) -> tuple[list[int], int]:
    """Where each buffer begins, and how many numbers all take: one that is read for the last time
    leaves its place to those that come."""
    last: dict[int, int] = {TOKEN: -1, POSITION: -1}
    for index, one in enumerate(program.instructions):
        for x in (one.result, *one.operands):
            if x.buffer >= 0:
                last[x.buffer] = index
    kept = {TOKEN, POSITION, program.logits.buffer}
    places, size, free = [-1] * len(program.buffers), 0, {}  # type: ignore[var-annotated]

    def take(buffer: int) -> None:
        nonlocal size
        room = -(-max(program.buffers[buffer], 1) // _LINE) * _LINE
        if free.get(room):
            places[buffer] = free[room].pop()
        else:
            places[buffer], size = size, size + room

    take(TOKEN)
    take(POSITION)
    for index, one in enumerate(program.instructions):
        if places[one.result.buffer] < 0:
            take(one.result.buffer)
        for buffer in {x.buffer for x in (one.result, *one.operands) if x.buffer >= 0}:
            if last[buffer] == index and buffer not in kept:
                room = -(-max(program.buffers[buffer], 1) // _LINE) * _LINE
                free.setdefault(room, []).append(places[buffer])
    return places, size
