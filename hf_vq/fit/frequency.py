"""Entries of a learned codebook by how often they are used (VQ-LLM, section V).

The first entries are the hot ones: a kernel may keep just these where they are found fastest. It
costs nothing, because an index means what it means only together with its codebook.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme

_CODES = 1 << 22  # unpacked at once


def by_frequency(
    codes: Tensor, codebook: Tensor, scheme: VQScheme, in_features: int
) -> tuple[Tensor, Tensor]:
    """`codes` and `codebook` with the entries of each stage in descending frequency; equally
    frequent ones keep their order. They decode to the same weights, bit by bit.

    Args:
        codes: uint8 [out, bytes], packed.
        codebook: [z, entries, x] of the whole matrix.
    """
    vectors = in_features // scheme.vector_size
    rows = max(1, _CODES // vectors)

    def stages(packed: Tensor) -> list[Tensor]:
        streams = packed.unflatten(1, (scheme.streams, -1)).unbind(1)
        return [unpack_bits(stream, scheme.entry_bits, vectors) for stream in streams]

    count = torch.zeros(codebook.shape[:2], dtype=torch.int64, device=codes.device)
    for part in codes.split(rows):
        for stage, index in enumerate(stages(part)):
            count[stage] += torch.bincount(index.flatten(), minlength=scheme.entries)
    order = count.argsort(dim=1, descending=True, stable=True)
    place = order.argsort(dim=1)
    rewritten = []
    for part in codes.split(rows):
        moved = [place[stage][index] for stage, index in enumerate(stages(part))]
        packed = [pack_bits(index, scheme.entry_bits, check=False) for index in moved]
        rewritten.append(torch.cat(packed, 1))
    ordered = codebook.gather(1, order[..., None].expand_as(codebook))
    return torch.cat(rewritten), ordered
