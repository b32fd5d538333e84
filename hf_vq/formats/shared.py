"""The tensors that no data decides: the universal codebook of every stage."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import lattice, universal
from .scheme import VQScheme


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers that will want gradients
def universal_tensor(scheme: VQScheme) -> Tensor:
    """The universal codebook of a scheme, fp16 [z, entries, x] ([z, 257, 8] for E8P); of two
    passes, that of the first one; of mode `product`, that of the bits without the sign. All callers
    share it: clone it before writing to it.

    Stage i + 1 codes what stage i leaves; its entries are scaled by the root of stage i's error on
    Gaussian data (E8P: by a measured constant). `integers` are 0, 1, 2 ...

    Raises:
        VQSchemeError: there is no such universal codebook.
    """
    if scheme.has_zero:
        return torch.arange(scheme.entries, dtype=torch.float16, device="cpu").reshape(1, -1, 1)
    if scheme.lattice:
        # Not the root of the error: outliers decide. With the first stage spread by 1.16 (which the
        # group scale does) a second one of 1/4 gives .0084 on Gaussian data; QuIP#'s 1/3.45, .0088.
        step = 0.25
        base = lattice.e8p_codebook()
    else:
        bits = scheme.entry_bits - (scheme.mode == "product")
        step = universal.universal_mse(scheme.vector_size, bits) ** 0.5
        base = universal.universal_codebook(scheme.vector_size, bits)
    return torch.stack([(base.float() * step**stage).half() for stage in range(scheme.streams)])


def second_universal_tensor(scheme: VQScheme) -> Tensor:
    """The universal codebook of the second pass of a scheme; of nested stages that of both codes,
    [1, 2^(y + y_2), 1], indexed by (first code << y_2) | second code.

    Raises:
        VQSchemeError: there is no such universal codebook.
    """
    if scheme.stages != "nested":
        return universal_tensor(scheme.second_pass())
    return universal.nested_codebook(scheme.entry_bits, scheme.second_bits).reshape(1, -1, 1)
