"""Plans of kernels/cuda/linear/dequantize_rotated.cu: codes to rows in the original basis.

Pure functions, no GPU. A problem has one plan: writing the rows is the bottleneck of every plan.
"""

from __future__ import annotations

import functools

from ...formats.scheme import VQScheme
from ..jit.device import Arch
from ..plan import DensePlan, Dtype, Scope
from .dequantize import DecodeProblem
from .linear import fusable
from .table_layout import LARGEST_INDEX, copies, fused, load_bytes, second_load_bytes, tables

_THREADS = 256
_FEW_WORDS, _FEW_STAGES = 8, 3  # of codes: with more, registers suffice for one block only
_LARGEST_TABLES = 96 << 10  # bytes; what every GPU has
_TILE_ROWS, _COLUMNS = 16, 4 * DensePlan.UNIT  # of a warp


@functools.lru_cache(maxsize=1024)  # asked at every call of a layer
def restorable(scheme: VQScheme, in_features: int, out: Dtype) -> str | None:
    """None if a plan decodes such rows and rotates them back, else the reason why not."""
    if out is Dtype.FLOAT32:
        return "sums of 16-bit floats are not exact enough for float32"
    reason = fusable(scheme, in_features)
    if reason:
        return reason
    entry, index_bits, books = tables(scheme)
    if index_bits > LARGEST_INDEX or books * entry << index_bits > _LARGEST_TABLES:
        return "its codebooks do not fit into shared memory"
    if scheme.is_scaled:
        return "a diagonal is not multiplied by kernels"
    if scheme.rotation == "qr":
        return "a QR rotation is a matrix product"
    block, group = scheme.block(in_features), scheme.group(in_features)
    if block > DensePlan.LARGEST_BLOCK:
        return f"a rotation block has {block} weights, more than {DensePlan.LARGEST_BLOCK}"
    if in_features % _COLUMNS or group % _COLUMNS:
        return f"{_COLUMNS} neighbouring weights of a row do not have one scale"
    width, bits = scheme.vector_size * fused(scheme), scheme.entry_bits * fused(scheme)
    loads = [load_bytes(scheme, DensePlan.UNIT, in_features)]
    if scheme.two_passes:
        loads.append(second_load_bytes(scheme, DensePlan.UNIT, in_features))
    if DensePlan.UNIT // width * bits % 32 or min(loads) < 4:
        return f"codes of {DensePlan.UNIT} weights are not whole words"
    return None


def dense_plan(problem: DecodeProblem) -> DensePlan:
    """Plan of a problem that is `restorable`."""
    scheme, columns = problem.scheme, problem.in_features
    replicas, interleaved = copies(scheme, problem.arch)
    group = scheme.group(columns)
    bits = scheme.entry_bits + scheme.second_bits
    words = 2 * scheme.streams * DensePlan.UNIT // scheme.vector_size * bits // 32
    return DensePlan(
        threads=_THREADS,
        blocks_per_sm=2 if words <= _FEW_WORDS and scheme.streams <= _FEW_STAGES else 1,
        dtype=Dtype.FLOAT16,
        vector_size=scheme.vector_size,
        entry_bits=scheme.entry_bits,
        num_codebooks=scheme.streams,
        scope=Scope.E8P if scheme.lattice else Scope.SHARED,
        group=0 if group == columns else group,
        fused=fused(scheme),
        in_shared=True,
        integers=scheme.largest_entry > 0,
        replicas=replicas,
        interleaved=interleaved,
        unit=DensePlan.UNIT,
        load_bytes=load_bytes(scheme, DensePlan.UNIT, columns),
        out=problem.out,
        block=scheme.block(columns),
        signs=scheme.rotation == "random_hadamard",
        second_bits=scheme.second_bits,
        second_load_bytes=second_load_bytes(scheme, DensePlan.UNIT, columns),
    )


def blocks(plan: DensePlan, rows: int, in_features: int, arch: Arch) -> int:
    """Blocks of a launch: one wave, but at least a warp for every 128 columns."""
    across, warps = in_features // _COLUMNS, plan.threads // 32
    needed = -(-(-(-rows // _TILE_ROWS) * across) // warps)
    return max(min(arch.sms * plan.blocks_per_sm, needed), -(-across // warps))
