"""PyTorch's ops as instructions: one recipe for each that decoding steps use.

A recipe gets the recorder, the arguments of a call and its result, and refuses what its instruction
does not do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats.scheme import VQScheme
from ...ops.kv import NUM_ARGUMENTS, unflatten
from ...ops.program import Codes, Dense
from .trace import Recorder, Refused, check_mask

Recipe = Callable[[Recorder, tuple[Any, ...], dict[str, Any], Any], None]

_UNARY = {
    "neg": "negate", "abs": "abs", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal",
    "exp": "exp", "tanh": "tanh", "sigmoid": "sigmoid", "silu": "silu", "relu": "relu",
    "cos": "cos", "sin": "sin", "clone": "copy",
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
            raise Refused(f"{op} with {sorted(kwargs)}")
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
    if op is None:
        raise Refused(f"a power of {args[1]}")
    to.emit(op, out, (args[0],))


def _gelu(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    to.emit("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", out, (args[0],))


def _mean(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, dims = args[:2]
    if [d % x.ndim for d in dims or ()] != [x.ndim - 1]:
        raise Refused(f"a mean over {dims}")
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


def _layer_norm(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, shape, weight, bias, epsilon = args[:5]
    if list(shape) != [x.shape[-1]] or (weight is None and bias is not None):
        raise Refused(f"a norm over {shape}")
    operands = tuple(each.expand(x.shape) for each in (weight, bias) if each is not None)
    to.emit("layer_norm", out[0], (x, *operands), epsilon)


def _rms_norm(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, shape, weight, epsilon = args[:4]
    if list(shape) != [x.shape[-1]]:
        raise Refused(f"a norm over {shape}")
    if epsilon is None:
        epsilon = torch.finfo(x.dtype).eps
    result = out[0] if isinstance(out, (tuple, list)) else out
    weights = () if weight is None else (weight.expand(x.shape),)
    to.emit("rms_norm", result, (x, *weights), epsilon)


def _embedding(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    weight, ids = args[:2]
    if ids.numel() != 1 or to.is_live(weight):
        raise Refused("an embedding of several tokens")
    to.emit("look_up", out, (ids,), detail=Dense(to.constant(weight), "", weight.shape[1]))


def _product(
    to: Recorder, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, whole: Tensor
) -> None:
    """result [n] = weight [n, k] x [k] + bias [n]."""
    if to.is_live(weight) or not to.is_live(x) or (bias is not None and to.is_live(bias)):
        raise Refused("a product of two things that the token makes")
    if weight.dtype != x.dtype:
        raise Refused(f"a product of {weight.dtype} and {x.dtype}")
    if not to.is_live(whole):
        to.live(whole)
    operands = (x,) if bias is None else (x, bias)
    to.emit("dense", result, operands, detail=Dense(to.constant(weight), "", weight.shape[1]))


def _matrix_product(to: Recorder, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [m, n] = a [m, k] b [k, n] + bias, one of a and b a constant."""
    if to.is_live(a) and to.is_live(b):
        if a.shape[1] == 1 and bias is None:  # an outer product
            to.emit("multiply", out, (a.expand(out.shape), b.expand(out.shape)))
            return
        raise Refused("a product of two things that the token makes")
    if a.shape[1] == 1 and bias is None:
        to.emit("multiply", out, (a.expand(out.shape), b.expand(out.shape)))
    elif to.is_live(a) and a.shape[0] == 1:
        row = None if bias is None else bias.expand(out.shape)[0]
        _product(to, a[0], b.T, row, out[0], out)
    elif to.is_live(b) and b.shape[1] == 1:
        column = None if bias is None else bias.expand(out.shape)[:, 0]
        _product(to, b[:, 0], a, column, out[:, 0], out)
    else:
        raise Refused("a product of several rows")


def _mm(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _matrix_product(to, args[0], args[1], None, out)


def _addmm(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        raise Refused("addmm with factors")
    _matrix_product(to, args[1], args[2], args[0], out)


def _bmm(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if args[0].shape[0] != 1:
        raise Refused("a product of several rows")
    if not to.is_live(out):
        to.live(out)
    _matrix_product(to, args[0][0], args[1][0], None, out[0])


def _linear(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else None
    if x.numel() != x.shape[-1]:
        raise Refused("a product of several rows")
    _product(to, x.view(-1), weight, bias, out.view(-1), out)


def _codes(to: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    x, codes, codebook, scale, rotation, *second, bias, spec = args
    if any(each is not None for each in second):
        raise Refused(f"two passes of codes ({spec}) have no instruction")
    scheme = VQScheme.parse(spec)
    rotation_dtype = torch.float16 if scheme.is_scaled else torch.uint8
    plain = (
        codes.ndim == 2 and codes.is_contiguous() and codebook.is_contiguous()
        and codebook.dtype is torch.float16 and scale.is_contiguous()
        and scale.dtype is torch.float16
        and (rotation is None or (rotation.is_contiguous() and rotation.dtype is rotation_dtype))
    )  # fmt: skip
    if not plain or x.numel() != x.shape[-1]:
        raise Refused("codes that are not stored as their scheme says")
    row = out.view(-1)
    if not to.is_live(out):
        to.live(out)
    signs = None if rotation is None else to.constant(rotation)
    stored = to.constant(codes), to.constant(codebook), to.constant(scale), signs
    detail = Codes(*stored, spec, x.shape[-1])
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
    "aten.gelu.default": _gelu,
    "aten.mean.dim": _mean,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten.embedding.default": _embedding,
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.linear.default": _linear,
    "hf_vq.linear.default": _codes,
    "hf_vq.kv_attention.default": _attention,
}
for _name, _op in _UNARY.items():
    RECIPES[f"aten.{_name}.default"] = _unary(_op)
for _name, _op in _BINARY.items():
    for _overload in ("Tensor", "Scalar", "default"):
        RECIPES[f"aten.{_name}.{_overload}"] = _binary(_op)
