"""Plans of kernels/cuda/encode: the lanes that own a group or a row. Pure functions, no GPU."""

from __future__ import annotations

from ...formats.scheme import VQScheme
from ..encode_plan import EncodePlan, RoundPlan
from ..jit.device import Arch
from ..plan import Scope

VECTOR_SIZES = (1, 2, 4, 8, 16)
_THREADS = 256
_ROUNDING_THREADS = 128
_ROUNDING_BYTES = 72 << 10  # of rows in shared memory
_WARP = 32
BEAM = 8  # beam of the specification (hf_vq/ops/reference/encode_weight.py)
_ROW_LANES = 8
"""Lanes that round a row: 4,096 rows are 1,024 warps. Other numbers were not timed."""


def _searchable(scheme: VQScheme) -> str | None:
    """None if nearest.cuh searches its codebooks, else the reason why not."""
    if scheme.codebook not in ("universal", "tensor"):
        return f"its codebooks are per {scheme.codebook.replace('_', ' ')}"
    if scheme.streams > 2 and not scheme.lattice:
        return f"it has {scheme.streams} stages, which a longer beam follows"
    if scheme.vector_size not in VECTOR_SIZES:
        return f"vectors have {scheme.vector_size} weights, not one of {VECTOR_SIZES}"
    return None


def _too_large(needed: int, arch: Arch) -> str | None:
    if needed <= arch.shared_per_block:
        return None
    return f"it needs {needed} bytes of shared memory, of {arch.shared_per_block}"


def encodable(scheme: VQScheme, in_features: int, arch: Arch) -> str | None:
    """None if the kernel encodes rows of this scheme, else the reason why not."""
    if reason := _searchable(scheme):
        return reason
    vectors = scheme.group(in_features) // scheme.vector_size
    if vectors % _WARP and (vectors > _WARP or vectors & (vectors - 1)):
        return f"{vectors} vectors of a group are not whole warps"
    across = in_features // scheme.vector_size
    if across * scheme.entry_bits % 8:
        return "a row's codes are not whole bytes"
    if across % _WARP and scheme.streams > 1 and not scheme.lattice:
        return f"{across} codes of a stage are not whole warps"
    return _too_large(encode_plan(scheme, in_features, 1, False).shared_bytes, arch)


def encode_plan(scheme: VQScheme, in_features: int, candidates: int, refit: bool) -> EncodePlan:
    """Plan of an encodable scheme; it is unique.

    Args:
        candidates: scales that are tried for each group.
        refit: fit scales to the codes.
    """
    group = scheme.group(in_features)
    vectors = group // scheme.vector_size
    one = scheme.lattice or scheme.streams > 1 or (vectors % (2 * _WARP) and vectors > _WARP)
    slots = 1 if one else 2
    large = scheme.streams > 1 and scheme.vector_size > 8
    resident = 1 if large else 2  # leaves a thread 128 registers
    return EncodePlan(
        _THREADS, resident, scheme.vector_size, scheme.entry_bits, scheme.streams, _scope(scheme),
        BEAM, min(vectors, _WARP), 0 if group == in_features else group, candidates, refit, slots,
        slots == 1 or vectors > _WARP,
    )  # fmt: skip


def roundable(scheme: VQScheme, size: int, arch: Arch) -> str | None:
    """None if the kernel rounds rows of this scheme in blocks of `size` columns, else why not."""
    if reason := _searchable(scheme):
        return reason
    if size % scheme.vector_size:
        return f"blocks of {size} columns are not whole vectors"
    return _too_large(round_plan(scheme, size).shared_bytes, arch)


def round_plan(scheme: VQScheme, size: int) -> RoundPlan:
    """Plan of a roundable scheme for blocks of `size` columns; it is unique."""
    threads = _ROUNDING_THREADS
    while threads > _WARP and threads // _ROW_LANES * size * 4 > _ROUNDING_BYTES:
        threads //= 2
    large = scheme.streams > 1 and scheme.vector_size > 8
    resident = 2 if large else 4  # leaves a thread 128 registers
    return RoundPlan(
        threads, resident, scheme.vector_size, scheme.entry_bits, scheme.streams,
        _scope(scheme), BEAM, _ROW_LANES, size,
    )  # fmt: skip


def _scope(scheme: VQScheme) -> Scope:
    return Scope.E8P if scheme.lattice else Scope.SHARED
