"""`Recorder`: what PyTorch computes in a decoding step, as instructions of a `Program`.

It is a dispatch mode that looks on. Tensors are found by their memory:

    live        made of the token, its position or a parameter: a buffer of the program
    stored      a parameter or a buffer of the model: read where it lies, at every token
    a view      of one of these: the same memory, at another offset and other strides
    fresh       made of plain numbers alone (`torch.full`): a constant

An op on something live or stored becomes an instruction, by `recipes`, or a call of PyTorch for
which no recipe is needed. A tensor that is nothing of these refuses the model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from ...cache import VQCache, VQCacheLayer
from ...cache.next_token import Slot, refusal, take
from ...ops.program import (
    Attention,
    Call,
    FloatAttention,
    Form,
    Given,
    Instruction,
    Operand,
)

LARGEST = 1 << 20  # numbers that a model may compute from its parameters at every token
_LIFT, _CLONE = torch.ops.aten.lift_fresh.default, torch.ops.aten.clone.default
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


class Refused(Exception):
    """A model that is no program; the message says why."""


class Numbers(NamedTuple):
    """Float32 numbers that PyTorch computed for an instruction.

    Args:
        inputs: None for constant operands.
        result: that it had.
    """

    inputs: tuple[Tensor | None, ...]
    result: Tensor


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Written(NamedTuple):
    """Keys and values of a layer that wait for their query."""

    key: Operand
    value: Operand
    numbers: tuple[Tensor, Tensor]


class Recorder(TorchDispatchMode):
    """The instructions of a step while it runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        stored = [*model.parameters(), *model.buffers()]
        self.stored = {_memory(tensor) for tensor in stored if tensor.numel()}
        self.fresh: set[int] = set()
        self.instructions: list[Instruction] = []
        self.numbers: list[Numbers] = []
        self.sizes: list[int] = []
        self.buffers: dict[int, int] = {}  # by address of the memory
        self.kept: list[Tensor] = []  # so that no address is used twice
        self.written: dict[int, _Written] = {}
        self.windows: dict[int, int] = {}  # of layers, in tokens
        self.layers: dict[int, int] = {}  # by address of keys and values that attention reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from .recipes import RECIPES

        kwargs = kwargs or {}
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor) and x.numel() > 0]
        if len(given) == 1 and (layer := self.layers.get(_memory(given[0]))) is not None:
            if func is not _CLONE and _memory(out) != _memory(given[0]):
                raise Refused("the model computes with keys or values of older tokens")
            self.layers[_memory(out)] = layer  # heads that are repeated for groups of queries
            self.kept.append(out)
            return out
        if any(_memory(x) in self.layers for x in given) and not _is_of_caches(func):
            raise Refused("the model computes with keys or values of older tokens")
        if not any(self.is_live(x) or self.is_stored(x) for x in given):
            if func is not _LIFT:  # of a tensor that was made of Python's numbers just now
                for x in given:
                    self.constant(x)
            self.fresh.update(_memory(x) for x in results)
            self.kept += results
            return out
        of_before = all(self.is_live(x) or self.is_stored(x) for x in results)
        if not func._schema.is_mutable and of_before and isinstance(out, Tensor | list | tuple):
            self.kept += results  # views
            return out
        if not any(self.is_live(x) for x in given) and sum(x.numel() for x in results) > LARGEST:
            raise Refused("the model computes a large weight at every token")
        before, recipe = len(self.instructions), RECIPES.get(str(func))
        if recipe is not None:
            recipe(self, args, kwargs, out)
        added = len(self.instructions) - before
        call = self._call(func, args, kwargs, results) if added < 2 else None
        if added == 0:
            if call is None:
                raise Refused(f"no instruction computes {func}")
            self.emit("call", results[0], tuple(x for x in given if self.is_live(x)))
        if call is not None:
            self.instructions[-1] = self.instructions[-1]._replace(call=call)
        return out

    def _call(
        self, func: Any, args: tuple[Any, ...], options: dict[str, Any], results: list[Tensor]
    ) -> Call | None:
        """The call of PyTorch that just made these; None if it cannot be made again."""
        if not _is_a_function(func, results):
            return None

        def given(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return Given(self.operand(x), x.dtype) if self.is_live(x) else self.constant(x)

        lists = [x for x in (*args, *options.values()) if isinstance(x, (list, tuple))]
        named = [x for x in options.values() if isinstance(x, Tensor)]
        of_lists = any(isinstance(x, Tensor) for each in lists for x in each)
        if of_lists or any(map(self.is_live, named)):
            return None
        if not self.is_live(results[0]):
            self.live(results[0])
        given_options = {name: given(x) for name, x in options.items()}
        return Call(func, tuple(given(x) for x in args), given_options, self.operand(results[0]))

    # -- memory ----------------------------------------------------------------------------------

    def live(self, x: Tensor) -> int:
        """Make the memory of a tensor a buffer; its number."""
        self._check(x)
        number = len(self.sizes)
        self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        self.buffers[_memory(x)] = number
        self.kept.append(x)
        return number

    def is_live(self, x: Tensor) -> bool:
        """True if it is a buffer."""
        return x.numel() > 0 and _memory(x) in self.buffers

    def is_stored(self, x: Tensor) -> bool:
        """True if it is a parameter or a buffer of the model, or a view of one."""
        return _memory(x) in self.stored

    def _check(self, x: Tensor) -> None:
        if x.dtype not in _TYPES:
            raise Refused(f"the model computes {str(x.dtype)[6:]} numbers of a token")
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise Refused(f"the model computes with a {type(x).__name__}")

    def operand(self, x: Tensor) -> Operand:
        """A tensor as an operand."""
        shape, stride = tuple(x.shape), tuple(x.stride())
        if self.is_live(x):
            self._check(x)
            buffer = self.buffers[_memory(x)]
            return Operand(shape, stride, int(x.storage_offset()), buffer)
        return Operand(shape, stride, 0, -1, self.constant(x))

    def constant(self, x: Tensor) -> Tensor:
        """A tensor that no token changes: the model's, or one that is made of plain numbers."""
        if x.numel() and not (self.is_stored(x) or _memory(x) in self.fresh):
            raise Refused("the model reads a tensor that is no parameter and no buffer of it")
        self.kept.append(x)
        return x.detach()

    def dense(self, x: Tensor) -> Tensor:
        """The numbers of a tensor now."""
        return x.detach().float().clone()

    def emit(
        self,
        op: str,
        result: Tensor,
        operands: tuple[Tensor, ...],
        number: float = 0.0,
        detail: Any = None,
        inputs: tuple[Tensor | None, ...] | None = None,
    ) -> None:
        """Add an instruction whose result and operands are these tensors."""
        found = tuple(self.operand(x) for x in operands)
        if inputs is None:
            inputs = tuple(self.dense(x) if self.is_live(x) else None for x in operands)
        self.add(op, result, found, inputs, number, detail)

    def add(
        self,
        op: str,
        result: Tensor,
        operands: tuple[Operand, ...],
        inputs: tuple[Tensor | None, ...],
        number: float = 0.0,
        detail: Any = None,
    ) -> None:
        """The same with operands that were found before."""
        if not self.is_live(result):
            self.live(result)
        y = self.operand(result)
        dtype = result.dtype if result.dtype.is_floating_point else torch.float32
        self.instructions.append(Instruction(op, y, operands, dtype, float(number), detail))
        self.numbers.append(Numbers(inputs, self.dense(result)))

    # -- the cache -------------------------------------------------------------------------------

    def update(
        self, cache: VQCache, slots: dict[int, Slot], keys: Tensor, values: Tensor, layer: int
    ) -> Any:
        """`VQCache.update` of a token: its keys and values wait for the attention."""
        with _disable_current_modes():
            own: Any = cache.layers[layer]
            taken = None if refusal(own) else take(own)
            if taken is None:
                raise Refused(refusal(own) or "the cache is not ready")
            if layer in slots:
                raise Refused("a layer of the cache is updated twice")
            slots[layer] = taken[0]
            if not (self.is_live(keys) and self.is_live(values)):
                raise Refused("keys or values are not made of the token")
            if keys.shape[0] != 1 or keys.shape[2] != 1:
                raise Refused("keys are not those of one token")
            rows = keys.transpose(1, 2)[0], values.transpose(1, 2)[0]  # [1, heads, dim]
            self.written[layer] = _Written(
                self.operand(rows[0]), self.operand(rows[1]),
                (self.dense(rows[0]), self.dense(rows[1])),
            )  # fmt: skip
            self.windows[layer] = getattr(own, "sliding_window", None) or 0
            read = type(cache).update(cache, keys, values, layer)
            parts = (own.k.tail.data,) if isinstance(own, VQCacheLayer) else read
            self.layers |= {_memory(part): layer for part in parts}
            self.kept += parts
            return read

    def _written_by(self, key: Tensor) -> tuple[int, _Written]:
        """The layer that has these keys, and the token's own in it, which now have their query."""
        layer = self.layers.get(_memory(key))
        if layer is None or layer not in self.written:
            raise Refused("attention reads a layer that another one has written")
        return layer, self.written.pop(layer)

    def attend(
        self, query: Tensor, key: Tensor, scaling: float, softcap: float, out: Tensor
    ) -> None:
        """Attention of the token over codes, in the layer that has these keys."""
        layer, (key_row, value_row, numbers) = self._written_by(key)
        self.live(out)
        rows = self._rows(query)
        self.add(
            "attention",
            self._rows(out),
            (self.operand(rows), key_row, value_row),
            (self.dense(rows), *numbers),
            detail=Attention(layer, scaling, softcap),
        )

    def attend_floats(
        self, query: Tensor, key: Tensor, scale: float | None, enable_gqa: bool, out: Tensor
    ) -> None:
        """Attention of the token over floats, in the layer that has these keys: PyTorch's own."""
        layer, (key_row, value_row, numbers) = self._written_by(key)
        self.live(out)
        rows, repeats = self._rows(query), key.shape[1] // key_row.shape[1]
        form = Form(tuple(query.shape), repeats, enable_gqa)
        self.add(
            "call",
            self._rows(out),
            (self.operand(rows), key_row, value_row),
            (self.dense(rows), *numbers),
            detail=FloatAttention(layer, self.windows[layer], scale, query.dtype, form, form),
        )

    def _rows(self, x: Tensor) -> Tensor:
        """[1, heads, dim] of [1, heads, 1, dim], or of groups of heads as [1, ., group, dim]."""
        rows = x.transpose(1, 2)[0] if x.shape[2] == 1 else x.reshape(1, -1, x.shape[3])
        if _memory(rows) != _memory(x):
            raise Refused("query heads lie apart")
        return rows


class WindowAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` over a layer of floats, as a call."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = self._attend if func is functional.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        recorder, layers = self.recorder, self.recorder.layers
        layer = layers.get(_memory(key))
        if layer is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        if layers.get(_memory(value)) != layer or dropout_p or is_causal:
            raise Refused("attention reads other values than those of its keys")
        with _disable_current_modes():
            check_mask(attn_mask)
            out = functional.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=enable_gqa
            ).contiguous()
            recorder.attend_floats(query, key, scale, enable_gqa, out)
        return out


def _is_of_caches(func: Any) -> bool:
    return str(func).startswith("hf_vq.kv_")


def _is_a_function(func: Any, results: list[Tensor]) -> bool:
    """True if an op's results are floats, made of its arguments alone."""
    return (
        not func._schema.is_mutable
        and not _is_of_caches(func)  # a program has another one
        and torch.Tag.nondeterministic_seeded not in func.tags
        and len(results) > 0
        and all(x.dtype.is_floating_point for x in results)
    )


def check_mask(mask: Tensor | None) -> None:
    """Refuse a mask that hides something from the token."""
    if mask is not None:
        hidden = (not mask.all()) if mask.dtype == torch.bool else bool((mask != 0).any())
        if hidden:
            raise Refused("attention with a mask has no instruction")
