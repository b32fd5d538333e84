"""Inputs of the layers that end a block (QServe, sections 4.3.2 and 4.3.3): their channels are
smoothed and sorted by magnitude. Both are folded into the layer before, since

    down (act(gate x) * up x)       a factor of up, or an order of gate and up, comes out unchanged
    o (sum over tokens of p v)      a factor of a channel of v, for all query heads that read it
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...transforms import output_factors
from .structure import Block

GROUP_EXPONENTS = (0.3, 0.7)  # of activations and weights, with a scale for 128 columns
ROW_EXPONENTS = (0.1, 0.9)  # with a scale for a whole row


def smooth_down(block: Block, largest: Tensor, exponents: tuple[float, float]) -> Tensor:
    """Smooth the inputs of `down`, in place.

    Args:
        largest: max |x| of these inputs, [intermediate].

    Returns:
        Divisors of the inputs, [intermediate].
    """
    weights = block.down.weight.abs().amax(0)
    factors = output_factors(largest.to(weights.device), weights, *exponents)
    _scale(block.up, block.down, factors, factors)
    return factors


def smooth_values(block: Block, largest: Tensor, exponents: tuple[float, float]) -> Tensor:
    """Smooth the inputs of `o`, in place.

    Args:
        largest: max |x| of the inputs of `o`, [heads * head_dim].

    Returns:
        Divisors of the values, [kv heads * head_dim].
    """
    heads, repeats, size = block.values

    def of_value(x: Tensor) -> Tensor:  # query heads of one head of values are adjacent
        return x.reshape(heads, repeats, size).amax(1).flatten()

    weights = of_value(block.o.weight.abs().amax(0))
    factors = output_factors(of_value(largest).to(weights.device), weights, *exponents)
    read = factors.reshape(heads, 1, size).expand(-1, repeats, -1).flatten()
    _scale(block.v, block.o, factors, read)
    return factors


def _scale(before: nn.Linear, layer: nn.Linear, given: Tensor, read: Tensor) -> None:
    before.weight.copy_(before.weight.double() / given[:, None])
    if before.bias is not None:
        before.bias.copy_(before.bias.double() / given)
    layer.weight.copy_(layer.weight.double() * read)


def reorder_down(block: Block, largest: Tensor) -> Tensor:
    """Sort the channels of the inputs of `down` by magnitude, the largest first, in place.

    Channels of similar magnitude then share a group and its scale. Other layers cannot be sorted:
    they read hidden states, whose order all blocks share, or values, whose head is no wider than a
    group.

    Args:
        largest: max |x| of these inputs, [intermediate].

    Returns:
        The old channel of each new one, int64 [intermediate].
    """
    order = torch.argsort(largest, descending=True, stable=True).to(block.down.weight.device)
    for layer in (block.gate, block.up):
        layer.weight.copy_(layer.weight[order])
        if layer.bias is not None:
            layer.bias.copy_(layer.bias[order])
    block.down.weight.copy_(block.down.weight[:, order])
    return order
