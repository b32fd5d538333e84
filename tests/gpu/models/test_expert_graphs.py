"""Experts with codes in a CUDA graph that tokens with other experts replay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.fixtures.cuda_layers import poison
from tests.fixtures.models.random_experts import CHOSEN, EXPERTS, HIDDEN, exact, random_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def routing(tokens: int, only: int | None = None, absent: bool = False) -> tuple[Tensor, Tensor]:
    """Experts int64 [tokens, k] and their weights.

    Args:
        only: the expert that all tokens choose first.
        absent: some are experts of another rank.
    """
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    if only is not None:
        index[:, 0], index[:, 1] = only, (only + 1) % EXPERTS
    if absent:
        index[::2, 1] = EXPERTS
    return index.cuda(), torch.rand(tokens, CHOSEN).cuda()


@pytest.mark.parametrize("tokens", [1, 3, 4, 16, 70])  # up to 3, chosen experts' codes are copied
@pytest.mark.parametrize("scheme", ["vq-4", "vq-2", "turboquant-4", "qoq-w4a8"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_experts_are_replayed_with_other_routings(kind: str, scheme: str, tokens: int) -> None:
    torch.manual_seed(0)
    right = random_experts(kind, scheme)
    for parameter in right.parameters():
        if parameter.dtype == torch.float32:  # biases
            parameter.data = parameter.data.bfloat16()
    module = copy.deepcopy(right).cuda()
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    index, weights = routing(tokens)
    with torch.no_grad():
        module.forward_unsynchronized(x, index, weights)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module.forward_unsynchronized(x, index, weights)
        for now in (routing(tokens), routing(tokens, 0), routing(tokens, EXPERTS - 1),
                    routing(tokens, absent=True)):  # fmt: skip
            x.normal_()
            index.copy_(now[0])
            weights.copy_(now[1])
            y.fill_(torch.nan)
            poison()
            graph.replay()
            found = y.clone()
            assert torch.equal(found, module.forward_unsynchronized(x, index, weights))
            true = exact(right, x.cpu(), index.cpu(), weights.cpu()).cuda()
            wanted = module(x, index, weights)
            # Sums of `forward` are rounded as often, in another order.
            allowed = 2 * (wanted - true).abs().max() + 2**-8 * true.abs().max()
            assert (found - true).abs().max() <= allowed
