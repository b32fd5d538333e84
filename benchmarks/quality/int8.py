"""Simulate `VQConfig(activations_bits=8)` on any device, by the kernel's formula."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_vq.codegen.families.linear_wgmma import wide
from hf_vq.codegen.jit.device import named_arch
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import rotation_of
from hf_vq.nn.linear import VQLinear
from hf_vq.nn.replace import vq_modules
from hf_vq.ops.codes import rotate
from tests.fixtures.random_weights import int8_tokens, int8_weight

_GPU = "sm_90a"  # that has the kernel


def simulate_int8(model: Any) -> float:
    """Let the layers of a model compute with int8 inputs and weights where a Hopper GPU would, for
    any number of tokens. tests/gpu/linear/test_int8.py compares the formula with the kernel.

    Returns:
        the share of weights in such layers.
    """
    count = rounded = 0
    for module in vq_modules(model).values():
        count += module.weight_count()
        if not isinstance(module, VQLinear) or module.op != "linear":
            continue
        scheme = module.scheme
        assert isinstance(scheme, VQScheme)
        if wide(scheme, module.in_features, named_arch(_GPU), 8) is None:
            rounded += module.weight_count()
            weight, _ = int8_weight(module.tensors(), scheme, module.in_features)
            module.forward = partial(_forward, module, weight.float())  # type: ignore[method-assign]
    return rounded / count


def _forward(module: VQLinear, weight: Tensor, x: Tensor) -> Tensor:
    assert isinstance(module.scheme, VQScheme)
    rotated = rotate(x.float(), rotation_of(module.tensors()), module.scheme)
    y = torch.nn.functional.linear(int8_tokens(rotated), weight, module.bias)
    return y.to(x.dtype)
