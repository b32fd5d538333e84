"""PyTorch's ops as instructions: one recipe for each that the library computes to the last bit.

A recipe gets the recorder, the arguments of a call and its result, and refuses what its instruction
does not do at all. An op that has none, or for which its recipe adds nothing, stays a call of
PyTorch, and so does one whose instruction turns out to compute other bits (`verify`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from ...ops.kv import NUM_ARGUMENTS, unflatten
from ...ops.program import Dense
from .recorder import Recorder, Refused, check_mask

Recipe = Callable[[Recorder, tuple[Any, ...], dict[str, Any], Any], None]

_UNARY = {
    "neg": "negate", "abs": "abs", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal",
    "silu": "silu", "relu": "relu", "clone": "copy",
}  # fmt: skip
_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "maximum": "maximum",
    "minimum": "minimum",
}  # fmt: skip
_POWERS = {2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt", 1.0: "copy", -1.0: "reciprocal"}


def _unary(op: str) -> Recipe:
    def recipe(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        to.emit(op, out, (args[0],))

    return recipe


def _binary(op: str) -> Recipe:
    def recipe(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        a, b = args[:2]
        if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None or len(args) > 2:
            return
        if not out.dtype.is_floating_point and op == "divide":
            raise Refused("integers are divided")
        if isinstance(b, Tensor):
            to.emit(op, out, (a.expand(out.shape), b.expand(out.shape)))
        else:
            to.emit(op, out, (a.expand(out.shape),), float(b))

    return recipe


def _convert(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if args[0].dtype.is_floating_point and not out.dtype.is_floating_point:
        raise Refused("numbers of a token are made integers")
    to.emit("copy", out, (args[0],))


def _power(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    op = _POWERS.get(float(args[1]))
    if op is not None:
        to.emit(op, out, (args[0],))


def _mean(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, dims = args[:2]
    if [d % x.ndim for d in dims or ()] != [x.ndim - 1]:
        return
    result = out if out.ndim == x.ndim else out.unsqueeze(-1)
    if not to.is_live(out):
        to.live(out)
    to.emit("mean", result, (x,))


def _cat(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    to.live(out)
    at = 0
    for part in (each for each in parts if each.numel()):
        to.emit("copy", out.narrow(dim, at, part.shape[dim]), (part,))
        at += part.shape[dim]


def _stack(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    to.live(out)
    for index, part in enumerate(parts):
        to.emit("copy", out.select(dim, index), (part,))


def _embedding(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    weight, ids = args[:2]
    if ids.numel() != 1 or to.is_live(weight):
        raise Refused("an embedding of several tokens")
    to.emit("look_up", out, (ids,), detail=Dense(to.constant(weight), "", weight.shape[1]))


def _codes(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, *tensors, bias, spec = args
    scheme = VQScheme.parse(spec)
    if scheme.stages not in ("independent", "nested"):
        raise Refused(f"two products with codes ({spec}) have no instruction")
    weight = StoredWeight.of_flat(tensors, scheme, x.shape[-1])
    rotation_dtype = torch.float16 if scheme.is_scaled else torch.uint8
    dtypes = {"codes": torch.uint8, "rotation": rotation_dtype}
    plain = weight.first.codes.ndim == 2 and all(
        each is None or (each.is_contiguous() and each.dtype is dtypes.get(name, torch.float16))
        for part in (weight.first, weight.residual) if part is not None
        for name, each in part._asdict().items()
    )  # fmt: skip
    if not plain or x.numel() != x.shape[-1]:
        raise Refused("codes that are not stored as their scheme says")
    row = out.view(-1)
    if not to.is_live(out):
        to.live(out)
    kept = [None if each is None else to.constant(each) for each in weight.tensors]
    detail = StoredWeight.of_flat(kept, scheme, x.shape[-1])
    operands = (x.view(-1),) if bias is None else (x.view(-1), bias)
    to.emit("codes", row, operands, detail=detail)


def _attention(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    query = args[0]
    view = unflatten(*args[1 : 1 + NUM_ARGUMENTS])
    mask, sink_logits, scaling, softcap = args[1 + NUM_ARGUMENTS :]
    if sink_logits is not None:
        raise Refused("attention with sink logits has no instruction")
    check_mask(mask)
    to.attend(query, view.key.recent, scaling, softcap, out)


RECIPES: dict[str, Recipe] = {
    "aten._to_copy.default": _convert,
    "aten.pow.Tensor_Scalar": _power,
    "aten.mean.dim": _mean,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.embedding.default": _embedding,
    "hf_vq.linear.default": _codes,
    "hf_vq.kv_attention.default": _attention,
}
for _name, _op in _UNARY.items():
    RECIPES[f"aten.{_name}.default"] = _unary(_op)
for _name, _op in _BINARY.items():
    for _overload in ("Tensor", "Scalar", "default"):
        RECIPES[f"aten.{_name}.{_overload}"] = _binary(_op)
