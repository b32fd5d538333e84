"""The blocks of a decoder: find them, and run one without the others.

A decoder is  embedding -> block 0 -> block 1 -> ... -> head. The other arguments of a block
(positions, masks, which may differ from block to block) do not depend on the hidden states. So one
pass in which every block returns its input records the arguments of all blocks.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from transformers.utils import logging

from ..errors import VQCalibrationError
from ..nn.replace import vq_modules
from .offload import free_memory, in_memory, place_of
from .targets import Target

logger = logging.get_logger("hf_vq")

_HALVES = (torch.float16, torch.bfloat16)


def find_blocks(model: nn.Module, names: Iterable[str]) -> str:
    """Name of the list of modules that holds most weights of the layers `names`.

    No list of architectures is needed (`optimum.gptq.utils` has one; it misses newer models).

    Raises:
        VQCalibrationError: the model is no decoder with such a list.
    """
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in names}
    found, most = "", 0
    for prefix, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            weights = sum(n for name, n in sizes.items() if name.startswith(f"{prefix}."))
            if weights > most:
                found, most = prefix, weights
    if not found or getattr(model.config, "is_encoder_decoder", False):
        raise VQCalibrationError(
            f"{type(model).__name__} is no decoder of equal blocks, which calibration needs. "
            "Quantize it without calibration."
        )
    return found


def dtypes_of_blocks(model: Any) -> tuple[torch.dtype | None, ...]:
    """Dtypes to run the blocks of a model in, the best first: float32 where a CPU computes in it
    several times faster than in the 16 bits of the model; None = that of the model."""
    slow = model.dtype.itemsize < 4 and model.dtype is not multiplied_by_tiles()
    return (torch.float32, None) if slow and place_of(model).type == "cpu" else (None,)


class Blocks:
    """The blocks of `model` and the arguments of each.

    Args:
        prefix: name of their list in `model`.
        sequences: token ids [sequences, tokens] to embed, in order; or batches of them
            [some, tokens], all of one size.
        dtype: what embeddings are converted to, and each block while it runs
            (`dtypes_of_blocks`); None = that of the model.

    Attributes:
        hidden: input of the first block for each sequence, [1, tokens, hidden] each, or batch.

    Raises:
        VQCalibrationError: the model calls its blocks in an unsupported way.
    """

    def __init__(
        self,
        model: Any,
        prefix: str,
        sequences: Iterable[Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.prefix, self.dtype = model, prefix, dtype
        self.blocks: list[nn.Module] = list(model.get_submodule(prefix))
        self.hidden: list[Tensor] = []
        self._calls: list[_Call] = []
        self._tail: tuple[Any, ...] | None = None  # a block's outputs after the hidden states
        self._in_tuple = False
        for ids in sequences:
            calls = self._pass(torch.atleast_2d(ids).to(place_of(model)))
            self.hidden.append(calls[0].hidden)
            if self._calls:
                self._check_same(calls)
            else:
                self._calls = [call.others() for call in calls]

    def __len__(self) -> int:
        return len(self.blocks)

    def targets(self, index: int, targets: Iterable[Target]) -> list[Target]:
        """Select the dense tensors of block `index`."""
        start = f"{self.prefix}.{index}."
        return [target for target in targets if target.layer.startswith(start)]

    @contextmanager
    def on(self, index: int, device: torch.device | None) -> Iterator[torch.device]:
        """Keep block `index` in memory, on `device` (None: its own device); yields the device."""
        with _kept(self.blocks[index], device) as place:
            yield place

    def run(
        self,
        index: int,
        hidden: Tensor,
        device: torch.device,
        tensors: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Run block `index`, which is on `device`; the output is on the device of `hidden`.

        Args:
            tensors: replacements of parameters, by name in the block.
        """
        args, kwargs = self._calls[index].with_hidden(hidden)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        block, known = self.blocks[index], tensors or {}
        if self.dtype is None:
            result = torch.func.functional_call(block, known, args, kwargs)
            return _hidden_of(result).to(hidden.device)
        try:
            result = self._in_dtype(block, known, args, kwargs)
        except Exception as error:  # the model's code may name a dtype, or memory may end
            if self.dtype is self.model.dtype:
                raise
            logger.info("hf_vq: %s Blocks run in %s instead.", error, self.model.dtype)
            self.dtype = self.model.dtype
            result = self._in_dtype(block, known, args, kwargs)
        return _hidden_of(result).to(hidden.device)

    def _in_dtype(self, block: nn.Module, known: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        assert self.dtype is not None
        args, kwargs = _converted((args, kwargs), self.dtype)
        own = dict(chain(block.named_parameters(), block.named_buffers()))
        left = {name: tensor for name, tensor in own.items() if name not in known}
        given = {name: tensor.to(self.dtype) for name, tensor in known.items()}
        tensors = {**_converted(left, self.dtype), **given}
        return torch.func.functional_call(block, tensors, args, kwargs)

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Logits of the model for the output of its last block.

        Args:
            ids: token ids [1, tokens].
            hidden: output of the last block, [1, tokens, hidden].

        Raises:
            VQCalibrationError: the model returns no logits.
        """
        result = (hidden, *(self._tail or ())) if self._in_tuple else hidden
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(replace_forward(block, lambda *args, **kwargs: result))
            found = getattr(self.model(ids, use_cache=False), "logits", None)
        if found is None:
            raise VQCalibrationError(
                f"{type(self.model).__name__} returns no logits, so the effect of a layer on its "
                "predictions cannot be measured. Load it as AutoModelForCausalLM, or give a scheme "
                "instead of target_bits."
            )
        return found

    def _pass(self, ids: Tensor) -> list[_Call]:
        """Record the arguments of each block while every block returns its input."""
        calls: list[_Call] = []
        known = inspect.signature(self.model.forward).parameters
        options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.callback(replace_forward(block, self._recorder(index, block, calls)))
            if self.dtype is not None:
                embedding = self.model.get_input_embeddings()
                hook = embedding.register_forward_hook(lambda *call: call[-1].to(self.dtype))
                stack.callback(hook.remove)
            self.model(ids, use_cache=False, **options)
        order = [call.index for call in calls]
        if order != list(range(len(self.blocks))):
            raise self._unknown(f"calls them in the order {order}")
        for call in calls[1:]:
            if call.hidden is not calls[0].hidden:
                raise self._unknown(f"changes hidden states before block {call.index}")
            given, returned = tree_leaves(call.others().arguments), tree_leaves(self._tail)
            if any(isinstance(a, Tensor) and a is b for a in given for b in returned):
                raise self._unknown(f"gives block {call.index} more than hidden states of another")
        return calls

    def _recorder(
        self, index: int, block: nn.Module, calls: list[_Call]
    ) -> Callable[..., Tensor | tuple[Any, ...]]:
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
            if not args and "hidden_states" not in kwargs:
                raise self._unknown(f"gives block {index} no hidden states")
            call = _Call(index, args, kwargs)
            if self._tail is None:
                given = (args, kwargs)
                if self.dtype is not None:  # the block itself has the dtype of the model
                    given = _converted(given, self.model.dtype)
                result = original(*given[0], **given[1])
                self._in_tuple = isinstance(result, tuple)
                self._tail = result[1:] if self._in_tuple else ()
            calls.append(call)
            hidden = call.hidden
            if self.dtype is not None and index + 1 == len(self.blocks):  # the head has its dtype
                hidden = hidden.to(self.model.dtype)
            return (hidden, *self._tail) if self._in_tuple else hidden

        return forward

    def _check_same(self, calls: list[_Call]) -> None:
        for call, first in zip(calls, self._calls, strict=True):
            if not _equal(call.others().arguments, first.arguments):
                raise self._unknown(f"gives block {call.index} more than hidden states of a text")

    def _unknown(self, what: str) -> VQCalibrationError:
        return VQCalibrationError(
            f"{type(self.model).__name__} {what} ({self.prefix}), so its blocks cannot be "
            "calibrated one by one. Quantize it without calibration."
        )


class WholeModel:
    """A model that is run as one block, for statistics: its blocks cannot be run one by one.

    Attributes:
        hidden: token ids of each batch, [sequences, tokens] each.
    """

    def __init__(self, model: Any, batches: Iterable[Tensor]) -> None:
        self.model = model
        self.hidden: list[Tensor] = list(batches)

    def __len__(self) -> int:
        return 1

    def targets(self, index: int, targets: Iterable[Target]) -> list[Target]:
        """Select all dense tensors."""
        return list(targets)

    @contextmanager
    def on(self, index: int, device: torch.device | None) -> Iterator[torch.device]:
        """Keep the model in memory, on `device` (None: its own device); yields the device."""
        with _kept(self.model, device) as place:
            yield place

    def run(self, index: int, hidden: Tensor, device: torch.device) -> Tensor:
        """Run the model on one batch; returns the token ids."""
        ids, known = hidden.to(device), inspect.signature(self.model.forward).parameters
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
        if "decoder_input_ids" in known:
            options["decoder_input_ids"] = ids
        self.model(input_ids=ids, **options)
        return hidden


@contextmanager
def _kept(block: nn.Module, device: torch.device | None) -> Iterator[torch.device]:
    """Keep a module in memory, on `device` (None: its own device); yields the device."""
    home = place_of(block)
    device = home if device is None else device
    with in_memory(block, device):
        if device != home:
            block.to(device)
        try:
            yield device
        finally:
            if device != home:
                block.to(home)


class _Call:
    """Arguments of one call of a block; the first, or `hidden_states`, are the hidden states."""

    def __init__(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.index, self.arguments = index, (args, kwargs)

    @property
    def hidden(self) -> Tensor:
        args, kwargs = self.arguments
        found: Tensor = args[0] if args else kwargs["hidden_states"]
        return found

    def with_hidden(self, hidden: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.arguments
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def others(self) -> _Call:
        """The call without its hidden states."""
        return _Call(self.index, *self.with_hidden(None))


def replace_forward(block: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of one module; returns a function that undoes it."""
    own = block.__dict__.get("forward")
    block.forward = forward

    def undo() -> None:
        del block.forward
        if own is not None:
            block.forward = own

    return undo


@contextmanager
def in_float32(model: nn.Module) -> Iterator[bool]:
    """Keep the dense 16-bit weights of a model as float32 for the duration of the block, on an x86
    CPU without AMX that has memory for them; yields whether it does. The weights come back
    untouched.

    AMX multiplies bfloat16 faster. Other processors keep their dtype: nothing is known of them.
    """
    coded = {id(p) for module in vq_modules(model).values() for p in module.parameters()}
    halves = [p for p in model.parameters() if p.dtype in _HALVES and id(p) not in coded]
    have = free_memory("cpu")
    if (
        not halves
        or platform.machine().lower() not in ("x86_64", "amd64")
        or any(p.device.type != "cpu" or p.dtype is multiplied_by_tiles() for p in halves)
        or have is None
        or 4 * sum(p.numel() for p in halves) > have // 2
    ):
        yield False
        return
    stored = [p.data for p in halves]
    try:
        for parameter in halves:
            parameter.data = parameter.data.float()
        yield True
    finally:
        for parameter, data in zip(halves, stored, strict=True):
            parameter.data = data


def multiplied_by_tiles() -> torch.dtype | None:
    """bfloat16 on a CPU with AMX, which multiplies it faster than float32; else None."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if has_tiles() else None


@contextmanager
def rounded_products() -> Iterator[None]:
    """Let a CPU with AMX round the factors of float32 products to bfloat16 for the duration of the
    block; sums stay in float32."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if multiplied_by_tiles() is not None:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _hidden_of(result: Any) -> Tensor:
    hidden: Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def _converted(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with its floats in another dtype."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, convert, tree)


def _equal(one: Any, other: Any) -> bool:
    """True if two trees of arguments have equal tensors, numbers and types of other objects."""
    (left, shape), (right, same) = tree_flatten(one), tree_flatten(other)
    if shape != same:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not torch.equal(a, b):
                return False
        elif type(a) is not type(b) or (isinstance(a, (int, float, str, bool)) and a != b):
            return False
    return True
