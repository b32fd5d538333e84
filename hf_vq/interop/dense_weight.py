"""The dense weight of a `VQLinear` in place of its codes, for code that reads or changes it.

layer.weight   codes uint8 --decode--> W float32 [out, in] --changed by others--> W'
                 ^                                                                |
                 +--------------- encode: same scheme, same rotation -------------+
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import VQBackendError, VQFormatError
from ..fit import fit_weight
from ..formats.qoq import QoQScheme
from ..nn.accelerate_hooks import hook_of
from ..nn.linear import VQLinear
from ..nn.published import PublishedLinear
from .small_change import decoded, fit_small_change, part_left

_VIEW = "_dense_view"  # attribute of a layer that shows its dense weight
_FIXED = ("signs", "diagonal", "rotation")  # keys of what no weight decides, with their suffixes
_ENOUGH = 0.9
"""Part of a change that rounding to nearest must leave, if the change is smaller than the weight;
otherwise codes are rounded at random, which adds to the error of the weights."""

_MOST = 0.7
"""Part of a change above which it is near the step of a code: rounding to nearest is as good as
random then, and its error half as large."""

_swapping = threading.Lock()


@dataclass(frozen=True)
class Encoded:
    """Result W" of encoding a changed weight W' = W + D again.

    Args:
        error: |W" - W'|^2 / |W'|^2.
        kept: the part of the change that is left (`small_change.part_left`).
    """

    error: float
    kept: float


class _View:
    """Dense weight of a layer that is viewed; decoded when it is first asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.depth, self.encode, self.dtype = 0, False, dtype
        self.dense: nn.Parameter | None = None

    def weight(self, layer: VQLinear) -> nn.Parameter:
        if self.dense is None:
            if layer._parameters["weight"].is_meta:  # type: ignore[union-attr]
                raise VQBackendError(
                    f"{layer.where} is offloaded, and this adapter reads its weight. Load the "
                    "model without offloading."
                )
            self.dense = nn.Parameter(layer.decoded(self.dtype).detach(), requires_grad=False)
        return self.dense


class _ShowsDense:
    """Mixed into the class of a layer while it is viewed. The codes stay its parameter."""

    @property
    def weight(self) -> Any:
        view: _View = self.__dict__[_VIEW]
        return view.weight(self)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.__dict__[_VIEW].dense = value
        else:
            super().__setattr__(name, value)


_classes: dict[type[VQLinear], type[VQLinear]] = {}  # that show, by those that do not


def _showing(kind: type[VQLinear]) -> type[VQLinear]:
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_ShowsDense, kind), {"__module__": kind.__module__})
    return _classes[kind]


def viewed(layer: VQLinear) -> bool:
    """True if `layer.weight` is dense now."""
    return _VIEW in layer.__dict__


@contextmanager
def dense_weight(
    layer: VQLinear, *, encode: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[list[Encoded]]:
    """Let `layer.weight` be the dense weight, `dtype` [out_features, in_features], within.

    Views nest: the outermost one restores the codes. If an exception leaves it, they are those from
    before.

    Args:
        encode: at the end, encode what was changed.
        dtype: of an outermost view; float32 if it is to be encoded.

    Yields:
        A list that says afterwards how it was encoded, if anything changed.

    Raises:
        VQBackendError: the weight is read, but offloaded; or changed, and a pass is offloaded.
        VQFormatError: the changed weight cannot be encoded.
    """
    with _swapping:
        view: _View = layer.__dict__.setdefault(_VIEW, _View(dtype))
        view.depth += 1
        view.encode |= encode
        if view.depth == 1:
            layer.__class__ = _showing(type(layer))
    encoded: list[Encoded] = []
    done = False
    try:
        yield encoded
        done = True
    finally:
        with _swapping:
            view.depth -= 1
            last = view.depth == 0
            if last:
                layer.__class__ = type(layer).__mro__[2]
                del layer.__dict__[_VIEW]
    if done and last and view.encode and view.dense is not None:
        dense = view.dense.detach()
        if not torch.equal(dense, layer.decoded()):
            encoded.append(encode_again(layer, dense))


def encode_again(layer: VQLinear, dense: Tensor) -> Encoded:
    """Store another matrix [out_features, in_features] in a layer.

    Scheme and rotation, with its diagonal, stay. After a small change, scales and codebooks stay,
    too; otherwise they are fitted as without calibration.

    Raises:
        VQBackendError: codes, or those of the second pass, are offloaded.
        VQFormatError: nothing is fitted to the layer's layout, or the matrix is not finite.
    """
    hook = hook_of(layer)
    if layer.second is not None or (hook is not None and hook.offload):
        raise VQBackendError(
            f"{layer.where} cannot be encoded again: it is offloaded. Load the model without "
            'offloading, and with VQConfig(pass2="resident").'
        )
    if isinstance(layer, PublishedLinear):
        raise VQFormatError(
            f"{layer.where}: {layer.layout.name()} is read, not made, so no adapter is merged into "
            "it. Keep the adapter unmerged, or make a model that can be encoded: hf-vq "
            "convert --requantize vq-4."
        )
    scheme, before = layer.scheme, layer.decoded().detach()
    specs = {key: layer.specs[name] for key, name in layer.attributes.items()}
    stored = {key: t.detach().to(specs[key].dtype) for key, t in layer.tensors().items()}
    found = fit_weight(dense, scheme, where=layer.where, fixed=_fixed(layer)).tensors
    after = decoded({**stored, **found}, scheme, layer.in_features)
    change, left = dense - before, part_left(after, before, dense)
    if left < _ENOUGH and bool(change.norm() < dense.norm()):
        if left > _MOST:  # as much more of the change as rounding to nearest takes away
            more = before + change / left
            found = fit_weight(more, scheme, where=layer.where, fixed=_fixed(layer)).tensors
        else:
            found = {**stored, **fit_small_change(dense, stored, scheme, layer.where)}
        after = decoded({**stored, **found}, scheme, layer.in_features)
    own = {key: tensor for key, tensor in found.items() if specs[key].shared_name is None}
    layer.assign(own, layer.bias)
    error = (after - dense).square().sum(dtype=torch.float64) / dense.square().sum()
    return Encoded(float(error), part_left(after, before, dense))


def _fixed(layer: VQLinear) -> dict[str, Tensor] | None:
    """The tensors by key that stay as they are (`fit.fixed_tensors`)."""
    scheme = layer.scheme
    if isinstance(scheme, QoQScheme):
        return None
    kept = [*_FIXED, *(f"{key}_2" for key in _FIXED), "codebook_2"]
    if scheme.codebook == "universal":
        kept.append("codebook")
    return {key: layer.stored(name) for key, name in layer.attributes.items() if key in kept}
