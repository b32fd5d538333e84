"""`trace`: one decoding step of a model as a `Program`, which a `Recorder` writes down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from ...cache import VQCache
from ...cache.argument import CACHE
from ...cache.next_token import Slot
from ...nn.dense_head import DenseHead, takes
from ...nn.embedding import VQEmbedding, VQTiedHead
from ...ops.program import POSITION, TOKEN, Dense, Program
from .recorder import Numbers, Recorder, Refused, WindowAttention

FAR = 1 << 20  # tokens that the cache seems to hold, where masks of windows and of chunks hide some
_WHOLE = {VQEmbedding: "look_up", VQTiedHead: "dense", DenseHead: "dense"}


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


def trace(
    model: PreTrainedModel, cache: VQCache, token: int, position: int | None, num_cached: int | None
) -> Step:
    """Trace one step; the cache takes the token.

    Args:
        model: in eval mode.
        cache: that a prompt has filled.
        token: its number.
        position: of the token; None = the one after those in the cache.
        num_cached: tokens that the model is told the cache holds; None = as many as it does.

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

    claims: dict[str, Any] = {"update": update}
    if num_cached is not None:
        claims |= {
            "get_seq_length": lambda *args, **kwargs: num_cached,
            "get_mask_sizes": lambda queries, layer, **kwargs: _as_if(
                num_cached, cache.layers[layer], int(queries)
            ),
        }
    cache.__dict__.update(claims)
    try:
        with (
            torch.no_grad(), _whole_matrices(model, recorder), recorder,
            WindowAttention(recorder),
        ):  # fmt: skip
            out = type(model).forward(model, **inputs)
    finally:
        for name in claims:
            del cache.__dict__[name]
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


def _as_if(num_cached: int, layer: Any, queries: int) -> tuple[int, int]:
    """`get_mask_sizes` of a layer that holds so many tokens, or the last ones of them."""
    past = min(layer.sliding_window - 1, num_cached) if layer.is_sliding else num_cached
    return past + queries, num_cached - past


@contextmanager
def _whole_matrices(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Rows of integers are looked up, and multiplied, without decoding all of them; a `DenseHead`
    is no op of PyTorch."""
    changed, tracing = [], threading.get_ident()

    def recorded(module: nn.Module, op: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            plain: Any = type(module).forward
            if threading.get_ident() != tracing:
                return plain(module, x)
            with _disable_current_modes():
                out: Tensor = plain(module, x)
                _matrix(op, module, x, out, recorder)
            return out

        return forward

    try:
        for module in model.modules():
            op = _WHOLE.get(type(module))
            if op is None or getattr(module, "scheme", None) is not None:
                continue  # the ops on codes are seen
            if isinstance(module, DenseHead) and not takes(module, _row_of(module)):
                continue  # PyTorch's product is seen, too
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = recorded(module, op)
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _row_of(head: DenseHead) -> Tensor:
    return head.weight.new_empty(1, head.weight.shape[1])


def _matrix(op: str, module: Any, x: Tensor, out: Tensor, recorder: Recorder) -> None:
    if not recorder.is_live(x):
        raise Refused("a head or an embedding of something else than the token")
    weight = module.weight.detach()
    if isinstance(module, DenseHead):
        given = (x,) if module.bias is None else (x, module.bias)
        recorder.emit(op, out, given, detail=Dense(weight, "", weight.shape[1]))
        return
    if module.kind != "int8":
        raise Refused(f"rows of {module.kind} have no instruction")
    recorder.emit(op, out, (x,), detail=Dense(weight, module.kind, module.features))
