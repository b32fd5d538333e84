"""`linear` in cuTile, a peer of the CUDA kernels: codes of 4 bits, or of nested passes of 4 + 4.

    y[m, n] = sum_g scale[n, g] * sum_(j in g) x[m, j] table[code[n, j]]        x rotated before

A block has TM x TN outputs and takes 128 columns per step: 64 bytes of every row and pass, whose
lower halves are codes of even columns, the upper ones of odd columns. So x lies in halves, too,
[2, tokens, in_features / 2], and there are two products on tensor cores. Bytes: the codes once for
every TM tokens, x once for every TN rows. Bound by gathers, one for each weight: cuTile cannot say
that a table should lie in shared memory.

Needs the package `cuda-tile[tileiras]`.
"""

from __future__ import annotations

import io
from typing import Any

import cuda.tile as ct
from cuda.tile import compilation

STEP = 128  # columns per step
TOKENS, ROWS = 16, 64  # of a block
BYTES = STEP // 2  # of a row and a pass

Size = ct.Constant[int]


@ct.kernel
def linear_kernel(  # type: ignore[no-untyped-def]  # cuTile reads the annotations
    x,
    first,
    second,
    table,
    scale,
    y,
    TM: Size,  # type: ignore[valid-type]
    TN: Size,  # type: ignore[valid-type]
    GROUP: Size,  # type: ignore[valid-type]
    NESTED: Size,  # type: ignore[valid-type]
):
    """GROUP steps share a scale; without NESTED, `second` is not read."""
    m, n = ct.bid(0), ct.bid(1)
    zero = ct.PaddingMode.ZERO
    total = ct.full((TM, TN), 0.0, ct.float32)
    for step in range(ct.num_tiles(first, 1, (TN, BYTES))):
        code = ct.astype(ct.load(first, (n, step), (TN, BYTES), padding_mode=zero), ct.int32)
        even, odd = code & 15, code >> 4
        if NESTED:
            code = ct.astype(ct.load(second, (n, step), (TN, BYTES), padding_mode=zero), ct.int32)
            even, odd = even << 4 | code & 15, odd << 4 | code >> 4
        part = ct.full((TM, TN), 0.0, ct.float32)
        for half in ct.static_iter(range(2)):
            inputs = ct.load(x, (half, m, step), (1, TM, BYTES), padding_mode=zero)
            weights = ct.transpose(ct.gather(table, odd if half else even))
            part = ct.mma(ct.reshape(inputs, (TM, BYTES)), weights, part)
        factor = ct.load(scale, (n, step // GROUP), (TN, 1), padding_mode=zero)
        total = total + part * ct.transpose(ct.astype(factor, ct.float32))
    ct.store(y, (m, n), ct.astype(total, y.dtype))


def cubin(arch: str, dtype: str, nested: bool, group: int = 1) -> bytes:
    """The kernel's machine code, compiled ahead of time, without a GPU. A driver launches it, by
    the name `linear`, with a thread for each block, and for each of its arrays an address, sizes
    and strides (int32).

    Args:
        arch: of the GPU, e.g. `sm_90`.
        dtype: of inputs and outputs.
        nested: two passes.
        group: steps that share a scale.
    """
    codes, table = _array("uint8", 2, BYTES), _array(dtype, 1)
    arrays = [_array(dtype, 3, BYTES), codes, codes, table, _array("float16", 2), _array(dtype, 2)]
    parameters = [*arrays, TOKENS, ROWS, group, int(nested)]
    convention = compilation.CallingConvention.cutile_python_v1()
    signature = compilation.KernelSignature(parameters, convention, symbol="linear")
    out = io.BytesIO()
    compilation.export_kernel(linear_kernel, [signature], out, gpu_code=arch, output_format="cubin")
    return out.getvalue()


def _array(dtype: str, dimensions: int, divisor: int = 1) -> Any:
    """A parameter whose rows are multiples of `divisor` numbers, which lie side by side."""
    return compilation.ArrayConstraint(
        getattr(ct, dtype),
        dimensions,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=("codes",) if dtype == "uint8" else (),  # one pass is given twice
        may_alias_internally=False,
        stride_constant=(None,) * (dimensions - 1) + (1,),
        stride_divisible_by=(divisor,) * (dimensions - 1) + (1,),
        shape_divisible_by=(1,) * (dimensions - 1) + (divisor,),
        base_addr_divisible_by=16,
    )
