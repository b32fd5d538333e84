"""`Entry`, a line of the dispatch table, and `Implementation`, one way to run an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from .problem import Problem

Bound = Callable[..., Tensor | None]
"""An op bound to one problem, called without torch's dispatcher; None for unsupported tensors.

linear      (x, codes, codebook, scale, rotation, bias) -> y
kv_append   (x, side, at, view) -> a tensor without meaning
kv_attention (query, view, softmax_scale, softcap) -> out, without mask, padding and sink_logits
"""


class Fused(NamedTuple):
    """Kernels of a W4A8 layer whose input is already quantized to 8 bits.

    Args:
        tokens: (x) -> quantized x, the input of `linear`.
        norm: (x, weight, eps) -> quantized RMSNorm of x.
        gated: (gate, up) -> quantized SiLU(gate) * up.
        linear: (quantized, x, weight, bias) -> y; of `x` only shape, dtype and device are read.
    """

    tokens: Callable[..., Any]
    norm: Callable[..., Any]
    gated: Callable[..., Any]
    linear: Callable[..., Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. Reasons are sentences for `explain`; None means yes.

    Args:
        run: function with the op's arguments.
        supports: (problem) -> None if it supports the problem, else the reason why not.
        bind: (problem) -> a `Bound` for this problem, or None; for linear only with weights of one
            pass.
        layouts: (problem of attention) -> the layouts of keys and values that it needs in a new
            cache.
        grouped: runs several linear layers with one input (the op `hf_vq::linears`).
        fused: kernels for quantized inputs of a W4A8 layer.
        note: (problem) -> remark of `explain` on a problem that it supports, but runs slowly.
        is_slow: (problem of one token) -> True if a dense layer would take less time: the weight is
            decoded at every call.
    """

    run: Callable[..., Any]
    supports: Callable[[Any], str | None] = lambda problem: None
    bind: Callable[[Any], Bound | None] = lambda problem: None
    layouts: Callable[[Any], tuple[str, str]] = lambda problem: ("rows", "rows")
    grouped: Callable[..., list[Tensor]] | None = None
    fused: Fused | None = None
    note: Callable[[Any], str | None] = lambda problem: None
    is_slow: Callable[[Any], bool] = lambda problem: False


@dataclass(frozen=True)
class Entry:
    """One line of the table: an op, an implementation, and the devices that it supports.

    The implementation is imported for the first problem on a supported device, and only if
    `available` returns None.

    Args:
        name: `device.kernel`, unique per op; `explain` prints it and HF_VQ_BACKEND takes it.
        op: name of the op.
        source: an `Implementation`, or its name: "module:attribute" in hf_vq.
        devices: device types of the supported inputs; empty = any.
        available: "module:function" in hf_vq, or the function. It returns None if this machine has
            everything that the implementation needs, else the reason why not. It is called before
            `source` is imported.
    """

    name: str
    op: str
    source: str | Implementation
    devices: tuple[str, ...] = ()
    available: str | Callable[[], str | None] | None = None

    @cached_property
    def implementation(self) -> Implementation:
        """The implementation, imported on first use."""
        found = load(self.source) if isinstance(self.source, str) else self.source
        assert isinstance(found, Implementation), f"{self.source} is not an Implementation"
        return found

    @cached_property
    def run(self) -> Callable[..., Any]:
        """`implementation.run`: it is called with the op's arguments."""
        return self.implementation.run

    def refusal(self, problem: Problem, forced: str = "") -> str | None:
        """None if the entry runs `problem`, else the reason why not.

        Args:
            forced: the value of HF_VQ_BACKEND.
        """
        if forced and forced != self.name and not self.name.startswith(forced + "."):
            return f"HF_VQ_BACKEND={forced}"
        if self.devices and problem.device not in self.devices:
            return f"tensor is on {problem.device}"
        missing = load(self.available) if isinstance(self.available, str) else self.available
        reason: str | None = None if missing is None else missing()
        return reason or self.implementation.supports(problem)


def load(reference: str) -> Any:
    """Import "module:attribute", a module of hf_vq and its attribute."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(f"hf_vq.{module}"), attribute)
