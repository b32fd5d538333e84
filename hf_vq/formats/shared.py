"""The tensors that no data decides: the universal codebook of every stage."""

from __future__ import annotations

import torch
from torch import Tensor

from . import lattice, universal
from .scheme import VQScheme


def universal_tensor(scheme: VQScheme, *, refined: bool = False) -> Tensor:
    """The universal codebook of a scheme, fp16 [z, entries, x] ([z, 257, 8] for E8P).

    Stage i + 1 codes what stage i leaves; its entries are scaled by the root of stage i's error on
    Gaussian data (E8P: by a measured constant).

    Args:
        refined: the codebook of a nested second pass, [1, 2^(2y), 1], indexed by
            (first code << y) | second code.

    Raises:
        VQSchemeError: there is no such universal codebook.
    """
    if refined:
        return universal.nested_codebook(scheme.entry_bits).reshape(1, -1, 1)
    if scheme.lattice:
        # Not the root of the error: outliers decide. With the first stage spread by 1.16 (which the
        # group scale does) a second one of 1/4 gives .0084 on Gaussian data; QuIP#'s 1/3.45, .0088.
        step = 0.25
        base = lattice.e8p_codebook()
    else:
        step = universal.universal_mse(scheme.vector_size, scheme.entry_bits) ** 0.5
        base = universal.universal_codebook(scheme.vector_size, scheme.entry_bits)
    return torch.stack([(base.float() * step**stage).half() for stage in range(scheme.streams)])
