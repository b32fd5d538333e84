"""`linear` on a GPU in cuTile: codes of 4 bits, or of two nested passes of 4 + 4 bits.

    y[m, n] = sum_g scale[n, g] * sum_(j in g) x[m, j] table[code[n, j]]        x rotated before

A block has TM x TN outputs and takes 128 columns at a time: 64 bytes of every row and pass, whose
lower halves are codes of even columns, the upper ones of odd columns. So x lies in halves, too,
[2, tokens, in_features / 2], and there are two products on tensor cores. Bytes: the codes once for
every TM tokens, x once for every TN rows. Bound by gathers, one for each weight: cuTile cannot say
that a table should lie in shared memory.

What is rounded beside the codes: entries and rotated inputs, to the dtype of x. Imported on request
only: cuTile is an optional package.
"""

from __future__ import annotations

import io
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import compilation
from torch import Tensor

from ...dispatch import Implementation
from ...errors import VQFormatError
from ...formats.scheme import VQScheme
from ...formats.tensors import tensor_specs
from ...ops.reference import (
    codes as reference,  # no op: this entry is all that runs where HF_VQ_BACKEND asks for it
)
from .supports import ROWS, STEP, TOKENS, supports

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


def linear(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    codes_2: Tensor | None,
    codebook_2: Tensor | None,
    scale_2: Tensor | None,
    rotation_2: Tensor | None,
    bias: Tensor | None,
    scheme: VQScheme,
) -> Tensor:
    """y = W x + b (`ops.reference.linear`).

    Raises:
        VQFormatError: sizes do not belong together.
    """
    in_features, nested = x.shape[-1], int(scheme.two_passes)
    given: dict[str, Tensor | None] = {"codes": codes, "codebook": codebook, "scale": scale}
    if nested:  # one table for both passes
        given = {"codes": codes, "codes_2": codes_2, "codebook_2": codebook_2, "scale": scale}
    specs = tensor_specs(scheme, len(codes), in_features)
    for key, tensor in given.items():
        if tensor is None or tensor.shape != specs[key].shape:
            raise VQFormatError(
                f"{len(codes)} rows of {in_features} weights as {scheme.spec()} have {key} "
                f"{list(specs[key].shape)}; got {None if tensor is None else list(tensor.shape)}."
            )
    second, book = (codes_2, codebook_2) if nested else (codes, codebook)
    assert second is not None and book is not None
    rotated = (
        reference.rotate(x.float(), rotation, scheme, False).to(x.dtype).reshape(-1, in_features)
    )
    halves = rotated.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()
    y = x.new_empty(*x.shape[:-1], len(codes))
    if not y.numel():
        return y
    rows = y.view(-1, len(codes))
    table = book.flatten().to(x.dtype)
    group = scheme.group(in_features) // STEP
    grid = (-(-len(rows) // TOKENS), -(-len(codes) // ROWS), 1)
    arguments = (halves, codes, second, table, scale, rows, TOKENS, ROWS, group, nested)
    with torch.cuda.device(x.device):
        ct.launch(torch.cuda.current_stream(), grid, linear_kernel, arguments)
    return y if bias is None else y.add_(bias)


LINEAR = Implementation(linear, supports)
