"""Hessians of layers: H = mean of x x^T over their inputs, one for all layers with the same input;
with gradients, also the mean squared gradient of each output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fit.block_ldlq import padded
from ..nn.experts import expert_output, holds_experts, projections_of, routed
from .blocks import Blocks, find_blocks, replace_forward, rounded_products

SHRINKAGE = 0.5
"""Weight of the pooled Hessian in each expert's, in tokens per input feature: an expert with few
tokens is calibrated on the tokens of the other experts, too."""

HELD_OUT = 1 / 8
"""Part of a sequence, at its end, that chooses the damping and that errors are reported on."""


@dataclass
class Site:
    """Layers that read the same tensor: q, k and v projections, or gate and up of an MLP. Or one
    fused tensor of experts, each of which reads different tokens.

    Args:
        layers: names of their tensors (`targets.Target`); only inputs of the first are summed.
        total: sum of x x^T [experts or 1, in, in], float32: the damping of H is far above its
            rounding. Or that of blocks of inputs, of every second pass and of the others,
            [experts or 1, 2, blocks, size, size].
        tokens: number of inputs x of each expert.
        unseen: sum of x x^T [in, in] of inputs that are not in `total`; None = all are.
        unseen_tokens: number of those.
    """

    layers: list[str]
    total: Tensor
    tokens: list[int]
    unseen: Tensor | None = None
    unseen_tokens: int = 0

    def add(self, x: Tensor, expert: int = 0, half: int = 0) -> None:
        """Add inputs [..., in] to the sum; with `unseen`, the last HELD_OUT of them to that.

        Args:
            half: of sums of blocks, the one that this pass is of.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if self.unseen is not None:
            count = int(HELD_OUT * len(rows))
            rows, unseen = rows[: len(rows) - count], rows[len(rows) - count :]
            self.unseen.addmm_(unseen.T, unseen)
            self.unseen_tokens += count
        if self.total.ndim == 5:
            blocks = padded(rows, self.total.shape[-1]).transpose(0, 1)
            with rounded_products():  # far more exact than so few inputs
                self.total[expert, half].baddbmm_(blocks.transpose(1, 2), blocks)
        else:
            self.total[expert].addmm_(rows.T, rows)
        self.tokens[expert] += len(rows)

    def hessian(self, expert: int = 0) -> Tensor:
        """H [in, in], or its two parts [2, blocks, size, size], float32; the H of one of several
        experts is shrunk towards the pooled H."""
        if len(self.total) == 1:
            return self.total[0] / self.tokens[0]
        prior = SHRINKAGE * self.total.shape[-1]
        return (self.total[expert] + prior * self.pooled) / (self.tokens[expert] + prior)

    def unseen_hessian(self) -> Tensor | None:
        """The same of the held-out inputs; None if there are none."""
        return None if not self.unseen_tokens else self.unseen / self.unseen_tokens  # type: ignore

    def release(self) -> None:
        """Free the memory; the site cannot be used afterwards."""
        self.total, self.unseen = torch.empty(0), None
        self.__dict__.pop("pooled", None)

    @cached_property
    def pooled(self) -> Tensor:
        """H of the inputs of all experts; cached, so read it after the last `add`."""
        return self.total.sum(0) / sum(self.tokens)


class Listener:
    """Records the inputs of layers inside `listening`.

    Args:
        gradients: also record the gradients of their outputs.
        block: size of the blocks of H that are summed, by number of inputs and whether they are of
            fused experts, in two halves of the passes; None = all of H.
        hold_out: keep a part of the inputs of layers that are not experts apart (HELD_OUT).

    Attributes:
        sites: in the order of the first call; a layer without a token has no site.
        weights: sum of the squared gradients of each output [experts * out], by tensor.
    """

    def __init__(
        self,
        gradients: bool = False,
        block: Callable[[int, bool], int] | None = None,
        hold_out: bool = False,
    ) -> None:
        self.block = block
        self.sites: list[Site] = []
        self.weights: dict[str, Tensor] = {}
        self.gradients, self.hold_out = gradients, hold_out
        self._site: dict[str, Site] = {}  # by layer
        self._half = 1  # of this pass
        # Inputs of this pass. They stay alive, so identity tells whether two layers share one.
        self._recorded: list[tuple[Tensor, Site]] = []

    @contextmanager
    def listening(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record one forward pass of `layers`.

        Args:
            layers: linear layers, or modules of fused experts. The experts are then computed in
                a loop, whatever implementation the model uses.
        """
        self._half = 1 - self._half
        with ExitStack() as stack:
            for name, layer in layers.items():
                if holds_experts(layer):
                    stack.callback(replace_forward(layer, self._experts(name, layer)))
                    continue
                hook = partial(self._record_input, name)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if self.gradients:
                    recorded = layer.register_forward_hook(partial(self._weigh_output, name))
                    stack.callback(recorded.remove)
            try:
                yield
            finally:
                self._recorded.clear()

    def _record_input(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not x.numel():  # an expert that no token was sent to
            return
        site = self._site.get(name)
        if site is None:
            site = next((site for recorded, site in self._recorded if recorded is x), None)
            if site is None:
                site = self._new(name, x, 1)
                site.unseen = torch.zeros_like(site.total[0]) if self.hold_out else None
            if name not in site.layers:
                site.layers.append(name)
            self._site[name] = site
        if site.layers[0] == name:
            self._recorded.append((x, site))
            site.add(x, half=self._half)

    def _new(self, name: str, x: Tensor, experts: int, fused: bool = False) -> Site:
        size = x.shape[-1]
        shape: tuple[int, ...] = (experts, size, size)
        if self.block is not None:
            block = self.block(size, fused)
            shape = (experts, 2, -(-size // block), block, block)
        total = torch.zeros(shape, dtype=torch.float32, device=x.device)
        self.sites.append(Site([name], total, [0] * experts))
        return self.sites[-1]

    def _experts(self, layer: str, experts: Any) -> Callable[..., Tensor]:
        """Make a forward for a module of fused experts that records every projection's input."""
        names, count = projections_of(experts, layer), int(experts.num_experts)

        def project(weight: str, index: int, x: Tensor) -> Tensor:
            name = f"{layer}.{weight}"
            if name not in self._site:
                self._site[name] = self._new(name, x, count, fused=True)
            self._site[name].add(x, index, self._half)
            matrix = getattr(experts, weight)[index]
            bias = getattr(experts, f"{weight}_bias")[index] if experts.has_bias else None
            y = F.linear(x, matrix.T if experts.is_transposed else matrix, bias)
            self._weigh(name, y, index, count)
            return y

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            def expert(index: int, x: Tensor) -> Tensor:
                return expert_output(experts, names, index, x, project)

            return routed(hidden_states, top_k_index, top_k_weights, count, expert)

        return forward

    def _weigh_output(self, name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        self._weigh(name, output, 0, 1)

    def _weigh(self, name: str, y: Tensor, index: int, count: int) -> None:
        """Register a hook that adds the squared gradient of `y` [..., out] to `weights`."""
        if not y.requires_grad or not self.gradients:
            return
        if name not in self.weights:
            self.weights[name] = torch.zeros(count, y.shape[-1], device=y.device)

        def count_gradient(gradient: Tensor) -> None:
            squares = gradient.float().square().flatten(0, -2).sum(0)
            self.weights[name][index] += squares

        y.register_hook(count_gradient)


@torch.no_grad()
def by_block(model: Any, names: list[str], sequences: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield the Hessians of the layers of each block, by name.

    The inputs of a block are the outputs of the one before, as it is when the next is asked for: by
    then its weights may have been replaced.

    Args:
        names: of linear layers; those outside the model's blocks, and those that no token reaches,
            are left out.
        sequences: token ids [sequences, tokens].

    Raises:
        VQCalibrationError: the blocks of the model cannot be run one by one.
    """
    prefix = find_blocks(model, names)
    blocks = Blocks(model, prefix, sequences)
    for index in range(len(blocks)):
        start, listener = f"{prefix}.{index}.", Listener()
        layers = {name: model.get_submodule(name) for name in names if name.startswith(start)}
        with blocks.on(index, None) as device:
            for hidden in blocks.hidden:
                with listener.listening(layers):
                    blocks.run(index, hidden, device)
            yield {name: site.hessian() for site in listener.sites for name in site.layers}
            blocks.hidden = [blocks.run(index, hidden, device) for hidden in blocks.hidden]
