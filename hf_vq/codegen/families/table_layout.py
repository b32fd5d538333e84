"""Layout of codebook tables in shared memory (table.cuh), and width of code loads."""

from __future__ import annotations

import math

from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ..jit.device import Arch

BANKS = 128  # bytes
LARGEST_INDEX = 12  # bits; a larger codebook stays in L2


def fused(scheme: VQScheme) -> int:
    """Codes that lie side by side and are looked up together: up to 8 bits and 8 weights."""
    count = 1
    if scheme.two_passes:
        return count
    while 2 * count * scheme.vector_size <= 8 and 2 * count * scheme.entry_bits <= 8:
        count *= 2
    return count


def tables(scheme: VQScheme) -> tuple[int, int, int]:
    """Bytes of an entry in shared memory, bits of its index, and how many tables there are."""
    if scheme.lattice:
        return 8, 8, scheme.streams + 1
    width = scheme.vector_size * fused(scheme)
    entry = width if scheme.largest_entry else max(4, 2 * width)
    return entry, (scheme.entry_bits + scheme.second_bits) * fused(scheme), scheme.streams


def copies(scheme: VQScheme, arch: Arch) -> tuple[int, int]:
    """`replicas` and `interleaved` of a plan whose tables take at most half of shared memory.

    Places of entries that are not there (a fourth of three books, a second of one whose addresses
    bytes make) are given up before replicas are: the tables are then contiguous (1).
    """
    entry, index_bits, books = tables(scheme)
    together = 1 << (books - 1).bit_length()
    together = 2 if together == 1 and index_bits == 8 else together  # addresses by bytes
    replicas = max(1, BANKS // entry)
    if together * entry * replicas << index_bits > arch.shared_per_block // 2:
        together = 1
    if books * entry * replicas << index_bits > arch.shared_per_block // 2:
        replicas = 1
    return replicas, together


def load_bytes(scheme: VQScheme, unit: int, in_features: int) -> int:
    """The widest load whose address is aligned for every row, stage and lane."""
    return _aligned(scheme.vector_size, scheme.entry_bits, unit, in_features)


def second_load_bytes(scheme: VQScheme, unit: int, in_features: int) -> int:
    """The same of the codes of a nested pass; 0 where there is none."""
    return _aligned(1, scheme.second_bits, unit, in_features) if scheme.two_passes else 0


def _aligned(vector_size: int, bits: int, unit: int, in_features: int) -> int:
    stream = packed_size(in_features // vector_size, bits)
    return math.gcd(16, unit // vector_size * bits // 8, stream)
