"""`hf_vq.explain`: which kernel runs for each layer, and why not a faster one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .. import ops
from ..nn.experts import VQExperts
from ..nn.linear import VQLinear
from ..nn.replace import vq_modules
from ..ops.dispatch import Problem, Verdict, bucket


@dataclass(frozen=True)
class Row:
    """One kind of layer: where it is, what is asked of the dispatch table and what it answers.

    Args:
        layers: names of the layers that ask the same.
        problem: what they ask.
        verdicts: every row of the table, in order; the chosen one has no reason.
    """

    layers: tuple[str, ...]
    problem: Problem
    verdicts: tuple[Verdict, ...]

    @property
    def kernel(self) -> str:
        """Name of the kernel that runs, or `none`."""
        return next((v.kernel.name for v in self.verdicts if v.chosen), "none")


class Explanation(list[Row]):
    """The rows of `explain`; printing it shows a table."""

    def __str__(self) -> str:
        if not self:
            return "no VQ layer here"
        lines = [("layers", "op", "n x k", "kernel", "not used, because")]
        for row in self:
            first, count = row.layers[0], len(row.layers)
            shown = first if count == 1 else f"{first} and {count - 1} more"
            reasons = [f"{v.kernel.name}: {v.reason}" for v in row.verdicts if not v.chosen]
            size = f"{row.problem.n} x {row.problem.k}"
            lines.append((shown, row.problem.op, size, row.kernel, "; ".join(reasons)))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
            for line in lines
        )

    __repr__ = __str__


def explain(model: nn.Module, *, tokens: int = 1, dtype: torch.dtype | None = None) -> Explanation:
    """Which kernel runs for every VQ layer of `model` (or for one layer), and why not another.

    Args:
        model: a model, a part of one or a layer.
        tokens: rows of the input; 1 is a step of generation.
        dtype: of the input; by default the model's.
    """
    dtype = dtype or getattr(model, "dtype", None) or torch.get_default_dtype()
    names: dict[Problem, list[str]] = {}
    for name, module in _layers(model):
        for part, problem in _problems(module, tokens, dtype):
            names.setdefault(problem, []).append(".".join(filter(None, (name, part))) or "layer")
    return Explanation(
        Row(tuple(layers), problem, tuple(ops.explain(problem)))
        for problem, layers in names.items()
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, VQLinear | VQExperts]]:
    yield from vq_modules(model).items()


def _problems(
    module: VQLinear | VQExperts, tokens: int, dtype: torch.dtype
) -> Iterator[tuple[str, Problem]]:
    sizes = (
        [("", module.out_features, module.in_features)]
        if isinstance(module, VQLinear)
        else [(name, p.out_features, p.in_features) for name, p in module.projections.items()]
    )
    device = next(parameter.device.type for parameter in module.parameters())
    hook = getattr(module, "_hf_hook", None)
    if device == "meta" and hook is not None:  # offloaded: it is brought to this device to run
        device = torch.device(hook.execution_device).type
    spec, kind = module.scheme.spec(), str(dtype).removeprefix("torch.")
    for part, n, k in sizes:
        yield part, Problem("linear", device, kind, spec, bucket(tokens), n, k)
