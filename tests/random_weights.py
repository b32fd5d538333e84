"""Stored tensors of layers with random codes."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vq.formats.catalog import LinearScheme
from hf_vq.formats.qoq import QoQScheme, encode
from hf_vq.formats.shared import second_universal_tensor, universal_tensor
from hf_vq.formats.tensors import tensor_specs


def random_tensors(scheme: LinearScheme, out_features: int, in_features: int) -> dict[str, Tensor]:
    """Stored tensors with random codes; decoded weights have the size of a trained layer's."""
    if isinstance(scheme, QoQScheme):
        return encode(torch.randn(out_features, in_features) * in_features**-0.5, scheme)
    tensors = {}
    for key, spec in tensor_specs(scheme, out_features, in_features).items():
        if spec.dtype == torch.uint8:
            tensors[key] = torch.randint(256, spec.shape, dtype=torch.uint8)
        elif key.startswith("codebook") and spec.shared_name:
            second = key == "codebook_2"
            tensors[key] = second_universal_tensor(scheme) if second else universal_tensor(scheme)
        elif spec.largest:
            tensors[key] = torch.randint(
                -spec.largest, spec.largest + 1, spec.shape, dtype=spec.dtype
            )
        elif key == "codebook":
            tensors[key] = torch.randn(spec.shape).half()
        else:
            size = in_features**-0.5 / max(scheme.largest_entry / 2, 1)
            tensors[key] = torch.rand(spec.shape).add_(0.5).mul_(size).half()
    return tensors
