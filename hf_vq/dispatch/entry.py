"""A line of the dispatch table, and what it names: one way to run an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from .problem import Problem

Bound = Callable[..., Tensor | None]
"""An op for one problem, called without torch's dispatcher; None for tensors that it does not take.

linear      (x, codes, codebook, scale, signs, bias) -> y
kv_append   (x, side, at) -> a tensor, of no meaning
kv_attention (query, view, softmax_scale, softcap) -> out, without mask, padding and sink_logits
"""


class Fused(NamedTuple):
    """How a W4A8 layer takes inputs that were rounded before.

    Args:
        tokens: (x) -> x as `linear` reads it.
        norm: (x, weight, eps) -> RMSNorm of x as `linear` reads it.
        gated: (gate, up) -> SiLU(gate) * up as `linear` reads it.
        linear: (rounded, x, weight, bias) -> y; x is only described.
    """

    tokens: Callable[..., Any]
    norm: Callable[..., Any]
    gated: Callable[..., Any]
    linear: Callable[..., Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. Reasons are sentences for `explain`; None means yes.

    Args:
        run: called with the op's arguments.
        supports: (problem) -> None if it solves the problem, else the reason why not.
        bind: (problem) -> a shorter way to `run` for this problem, or None; for linear only with
            weights of one pass.
        layouts: (problem of attention) -> the layouts of keys and values that it wants in a new
            cache.
        grouped: runs several linear layers with one input (the op `hf_vq::linears`).
        fused: how a W4A8 layer takes inputs that are rounded already.
        note: (problem) -> what `explain` says of a problem that it runs, but not well.
    """

    run: Callable[..., Any]
    supports: Callable[[Any], str | None] = lambda problem: None
    bind: Callable[[Any], Bound | None] = lambda problem: None
    layouts: Callable[[Any], tuple[str, str]] = lambda problem: ("rows", "rows")
    grouped: Callable[..., list[Tensor]] | None = None
    fused: Fused | None = None
    note: Callable[[Any], str | None] = lambda problem: None


@dataclass(frozen=True)
class Entry:
    """One line of the table: who runs which op, and where.

    What it names is imported when a problem comes that it might run: on another device, or without
    what it needs, never.

    Args:
        name: `device.kernel`, unique per op; `explain` prints it and HF_VQ_BACKEND takes it.
        op: name of the op.
        source: an `Implementation`, or where it is: "module:attribute" in hf_vq.
        devices: device types of inputs that it takes; empty = any.
        available: "module:function" in hf_vq, or the function: None if this machine has what the
            implementation needs, else the reason why not. Asked before `source` is imported.
    """

    name: str
    op: str
    source: str | Implementation
    devices: tuple[str, ...] = ()
    available: str | Callable[[], str | None] | None = None

    @cached_property
    def implementation(self) -> Implementation:
        """What the entry names, imported."""
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
    """The attribute that "module:attribute" names, the module below hf_vq."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(f"hf_vq.{module}"), attribute)
