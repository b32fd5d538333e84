"""`trace`: one decoding step of a model as a `Program`.

PyTorch computes the step, and a dispatch mode looks on. Tensors are found by their memory:

    live        made of the token or its position: a buffer of the program
    a view      of live memory: the same buffer, at another offset and other strides
    others      constants: parameters, and what the model computes from them alone

An op on something live becomes an instruction, by `recipes`; one that has none refuses the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from ...cache import VQCache
from ...cache.argument import CACHE
from ...cache.next_token import Slot, ready, refusal, slot
from ...nn.embedding import VQEmbedding, VQTiedHead
from ...ops.program import POSITION, TOKEN, Attention, Dense, Instruction, Operand, Program

LARGEST_CONSTANT = 1 << 20  # numbers that a model may compute from its parameters at every token
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


class Refused(Exception):
    """A model that is no program; the message says why."""


class Numbers(NamedTuple):
    """Float32 numbers that PyTorch computed for an instruction; None for constant operands."""

    inputs: tuple[Tensor | None, ...]
    result: Tensor


class Step(NamedTuple):
    """A step that was traced.

    Args:
        program: of it.
        numbers: of each instruction.
        slots: where each layer wrote the token.
        kind: class of the model's output.
        logits: shape of its logits.
    """

    program: Program
    numbers: list[Numbers]
    slots: dict[int, Slot]
    kind: type
    logits: torch.Size


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
        self.stored = {tensor.untyped_storage().data_ptr() for tensor in stored}
        self.instructions: list[Instruction] = []
        self.numbers: list[Numbers] = []
        self.sizes: list[int] = []
        self.buffers: dict[int, int] = {}  # by address of the memory
        self.kept: list[Tensor] = []  # so that no address is used twice
        self.written: dict[int, _Written] = {}
        self.layers: dict[int, int] = {}  # by address of the keys' tail

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from .recipes import RECIPES

        kwargs = kwargs or {}
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(self.is_live(x) for x in given):
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        if (
            not func._schema.is_mutable
            and results
            and all(x.numel() == 0 or self.is_live(x) for x in results)
        ):
            self.kept += results  # views
            return out
        recipe = RECIPES.get(str(func))
        if recipe is None:
            raise Refused(f"no instruction computes {func}")
        recipe(self, args, kwargs, out)
        return out

    # -- memory ----------------------------------------------------------------------------------

    def live(self, x: Tensor) -> int:
        """Make the memory of a tensor a buffer; its number."""
        self._check(x)
        number = len(self.sizes)
        self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        self.buffers[x.untyped_storage().data_ptr()] = number
        self.kept.append(x)
        return number

    def is_live(self, x: Tensor) -> bool:
        """True if it is a buffer."""
        return x.numel() > 0 and x.untyped_storage().data_ptr() in self.buffers

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
            buffer = self.buffers[x.untyped_storage().data_ptr()]
            return Operand(shape, stride, int(x.storage_offset()), buffer)
        return Operand(shape, stride, 0, -1, self.constant(x))

    def constant(self, x: Tensor) -> Tensor:
        """A tensor that no token changes: the model's, or a small one that it computes of those."""
        if x.numel() > LARGEST_CONSTANT and x.untyped_storage().data_ptr() not in self.stored:
            raise Refused("the model computes a large weight at every token")
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
        rounded = result.dtype if result.dtype.is_floating_point else torch.float32
        self.instructions.append(Instruction(op, y, operands, rounded, float(number), detail))
        self.numbers.append(Numbers(inputs, self.dense(result)))

    # -- the cache -------------------------------------------------------------------------------

    def update(
        self, cache: VQCache, slots: dict[int, Slot], keys: Tensor, values: Tensor, layer: int
    ) -> Any:
        """`VQCache.update` of a token: its keys and values wait for the attention."""
        with _disable_current_modes():
            own: Any = cache.layers[layer]
            problem = refusal(own) or (None if ready(own) else "the cache is not ready")
            if problem:
                raise Refused(problem)
            if layer in slots:
                raise Refused("a layer of the cache is updated twice")
            slots[layer] = slot(own)
            if not (self.is_live(keys) and self.is_live(values)):
                raise Refused("keys or values are not made of the token")
            if keys.shape[0] != 1 or keys.shape[2] != 1:
                raise Refused("keys are not those of one token")
            rows = keys.transpose(1, 2)[0], values.transpose(1, 2)[0]  # [1, heads, dim]
            self.written[layer] = _Written(
                self.operand(rows[0]), self.operand(rows[1]),
                (self.dense(rows[0]), self.dense(rows[1])),
            )  # fmt: skip
            self.layers[own.k.tail.data.untyped_storage().data_ptr()] = layer
            return type(cache).update(cache, keys, values, layer)

    def attend(
        self, query: Tensor, tail: Tensor, scaling: float, softcap: float, out: Tensor
    ) -> None:
        """Attention of the token in the layer that has this tail."""
        layer = self.layers.get(tail.untyped_storage().data_ptr())
        if layer is None or layer not in self.written:
            raise Refused("attention reads a layer that another one has written")
        key, value, numbers = self.written.pop(layer)
        self.live(out)
        rows = query.transpose(1, 2)[0]  # [1, heads, dim]
        self.add(
            "attention",
            out.transpose(1, 2)[0],
            (self.operand(rows), key, value),
            (self.dense(rows), *numbers),
            detail=Attention(layer, scaling, softcap),
        )


def trace(model: PreTrainedModel, cache: VQCache, token: int, position: int | None) -> Step:
    """Trace one step; the cache takes the token.

    Args:
        model: in eval mode.
        cache: that a prompt has filled.
        token: its number.
        position: of the token; None = the one after those in the cache.

    Raises:
        Refused: the step is no program.
    """
    recorder, slots = Recorder(model), {}  # type: ignore[var-annotated]
    ids = torch.tensor([[token]])
    where = torch.tensor([[cache.get_seq_length() if position is None else position]])
    assert recorder.live(ids) == TOKEN and recorder.live(where) == POSITION
    inputs: dict[str, Any] = {"input_ids": ids, CACHE: cache, "use_cache": True}
    inputs |= {"position_ids": where, "return_dict": True}

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return recorder.update(cache, slots, keys, values, layer)

    cache.__dict__["update"] = update
    try:
        with torch.no_grad(), _whole_embeddings(model, recorder), recorder:
            out = type(model).forward(model, **inputs)
    finally:
        del cache.__dict__["update"]
    logits = out.get("logits")
    others = {name for name, x in out.items() if x is not None} - {"logits", CACHE}
    if others or logits is None or not recorder.is_live(logits):
        raise Refused(f"the model returns {sorted(others)} next to logits")
    if logits.shape[:2] != (1, 1) or not logits.dtype.is_floating_point:
        raise Refused(f"the logits are {list(logits.shape)}")
    if recorder.written:
        raise Refused("a layer of the cache is written and not read")
    program = Program(
        tuple(recorder.instructions), tuple(recorder.sizes), recorder.operand(logits), logits.dtype
    )
    return Step(program, recorder.numbers, slots, type(out), logits.shape)


@contextmanager
def _whole_embeddings(model: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    """Rows of integers are looked up, and multiplied, without decoding all of them."""
    changed, tracing = [], threading.get_ident()

    def recorded(module: nn.Module, op: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            plain: Any = type(module).forward
            if threading.get_ident() != tracing:
                return plain(module, x)
            with _disable_current_modes():
                out: Tensor = plain(module, x)
                _integers(op, module, x, out, recorder)
            return out

        return forward

    try:
        for module in model.modules():
            op = {VQEmbedding: "look_up", VQTiedHead: "dense"}.get(type(module))
            if op is not None and "forward" not in module.__dict__:
                module.__dict__["forward"] = recorded(module, op)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _integers(op: str, module: Any, x: Tensor, out: Tensor, recorder: Recorder) -> None:
    if module.kind != "int8":
        raise Refused(f"rows of {module.kind} have no instruction")
    if not recorder.is_live(x):
        raise Refused("an embedding of something else than the token")
    weight = module.weight.detach()
    recorder.emit(op, out, (x,), detail=Dense(weight, module.kind, module.features))
