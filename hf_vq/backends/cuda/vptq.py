"""`published_linear` on a GPU for weights as VPTQ publishes them: generated CUDA kernels.

Up to 16 tokens are multiplied with entries as they are looked up (vptq.cu). For more, some rows at
a time are decoded (vptq_dequantize.cu), and cuBLAS multiplies.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ...codegen.families import vptq as choose_vptq
from ...codegen.families.vptq import VptqProblem
from ...codegen.jit.device import device_arch
from ...codegen.jit.kernel_store import default_store
from ...codegen.jit.launch import LoadedKernel
from ...codegen.plan import Plan
from ...codegen.vptq_plan import VptqPlan
from ...dispatch import Implementation
from ...errors import VQBackendError
from ...formats.published import VptqLayout
from ...ops import published
from ...ops.published import PublishedWeight
from . import weight_supports
from .linear.dequantize import DECODED_BYTES, DTYPES, _ready

_LANES = 32


def _arguments(name: str, pointers: str, integers: str) -> type[ctypes.Structure]:
    """struct Arguments of a kernel: addresses, then integers of 32 bits."""
    fields: list[tuple[str, Any]] = [(one, ctypes.c_void_p) for one in pointers.split()]
    fields += [(one, ctypes.c_int32) for one in integers.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


VptqArguments = _arguments(
    "VptqArguments",
    "codes book rest outlier_codes outlier_book x outlier_x factors bias y",
    "rows columns groups outliers tokens",
)
VptqInputsArguments = _arguments(
    "VptqInputsArguments",
    "x order scale offset arranged outlier_x factors",
    "in outliers columns groups",
)
VptqDecodeArguments = _arguments(
    "VptqDecodeArguments",
    "codes book rest outlier_codes outlier_book scale offset place out",
    "first rows in columns groups outliers",
)


@functools.cache  # problems share plans
def _kernel(plan: Plan, arguments: type[ctypes.Structure], ordinal: int) -> LoadedKernel:
    return LoadedKernel(plan, arguments, ordinal, default_store())


@functools.lru_cache(maxsize=1024)
def _few(
    layout: VptqLayout, wide: bool, rows: int, dtype: torch.dtype, ordinal: int
) -> tuple[VptqPlan, LoadedKernel, LoadedKernel]:
    problem = VptqProblem(layout, 16 if wide else 8, rows, DTYPES[dtype], device_arch(ordinal))
    plan = choose_vptq.choose(problem)
    if plan is None:
        raise VQBackendError(f"{layout.name()} has no kernel for {problem}.")
    return prepare(plan, layout, ordinal)


def prepare(
    plan: VptqPlan, layout: VptqLayout, ordinal: int
) -> tuple[VptqPlan, LoadedKernel, LoadedKernel]:
    """A plan, its kernel and that of its inputs, loaded."""
    inputs = _kernel(choose_vptq.inputs_plan(plan, layout), VptqInputsArguments, ordinal)
    return plan, inputs, _kernel(plan, VptqArguments, ordinal)


@functools.lru_cache(maxsize=1024)
def _many(layout: VptqLayout, in_features: int, dtype: torch.dtype, ordinal: int) -> LoadedKernel:
    plan = choose_vptq.decode_plan(layout, in_features, DTYPES[dtype])
    return _kernel(plan, VptqDecodeArguments, ordinal)


class DeviceWeight:
    """The tensors of a layer, checked and ready for kernels on the current device.

    Raises:
        VQFormatError: tensors do not belong together.
    """

    def __init__(self, weight: PublishedWeight, bias: Tensor | None, device: torch.device) -> None:
        _, layout, self.rows, self.columns = weight
        assert isinstance(layout, VptqLayout)
        self.layout = layout
        found = published.checked(weight, bias, device)
        self.held = {key: _ready(tensor, tensor.dtype) for key, tensor in found.items()}

    def address(self, key: str) -> int | None:
        """Of a stored tensor; None where the layout has none."""
        tensor = self.held.get(key)
        return None if tensor is None else tensor.data_ptr()

    @property
    def books(self) -> tuple[int | None, ...]:
        """Addresses of codes and codebooks, in the order of the kernels' arguments."""
        keys = "codes", "centroids", "res_centroids", "outlier_indices", "outlier_centroids"
        return tuple(self.address(key) for key in keys)


def linear_few(x: Tensor, weight: PublishedWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b for up to 16 tokens, in 16-bit floats.

    Entries, their sum with a residual and x times the scale of its column are rounded to the dtype
    of the codebooks; sums are float32.
    """
    rows, columns, ordinal = weight.out_features, weight.in_features, x.get_device()
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    tokens = x.numel() // columns
    with torch.cuda.device(ordinal):
        stored = DeviceWeight(weight, bias, x.device)
        found = _few(stored.layout, tokens > 8, rows, x.dtype, ordinal)
        run(found, _ready(x, x.dtype), stored, bias, y, tokens)
    return y


def run(
    found: tuple[VptqPlan, LoadedKernel, LoadedKernel],
    x: Tensor,
    stored: DeviceWeight,
    bias: Tensor | None,
    y: Tensor,
    tokens: int,
) -> None:
    """Launch a prepared plan."""
    (plan, inputs, kernel), layout = found, stored.layout
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    chunk = _LANES * plan.unit
    padded = layout.groups * -(-layout.group_size // chunk) * chunk
    arranged = torch.empty((16 if plan.wide else 8) * padded, dtype=torch.int16, device=x.device)
    floats = torch.empty(tokens * (layout.outliers + 2), dtype=torch.float32, device=x.device)
    factors, outlier_x = floats.data_ptr(), floats.data_ptr() + 8 * tokens
    added = None if bias is None else _ready(bias, x.dtype)
    inputs(
        tokens, stream, x.data_ptr(), stored.address("perm"), stored.address("weight_scale"),
        stored.address("weight_bias"), arranged.data_ptr(), outlier_x, factors,
        stored.columns, layout.outliers, layout.group_size, layout.groups,
    )  # fmt: skip
    # What came before the inputs is complete when they begin, so that codes may be read at once.
    kernel(
        choose_vptq.blocks(plan, stored.rows), stream, *stored.books, arranged.data_ptr(),
        outlier_x, factors, None if added is None else added.data_ptr(), y.data_ptr(),
        stored.rows, layout.group_size, layout.groups, layout.outliers, tokens, dependent=True,
    )  # fmt: skip


def decode_rows(stored: DeviceWeight, place: Tensor | None, first: int, out: Tensor) -> None:
    """Rows `first`, `first` + 1, .. to `out` [rows, in_features], as the published formula says.

    Args:
        place: int32 [in_features], where each column is stored (`places`).
        first: a multiple of the rows of a vector.
    """
    layout, ordinal = stored.layout, out.get_device()
    kernel = _many(layout, stored.columns, out.dtype, ordinal)
    vectors = -(-len(out) // layout.vector)
    kernel(
        vectors,
        torch._C._cuda_getCurrentRawStream(ordinal), *stored.books,
        stored.address("weight_scale"), stored.address("weight_bias"),
        None if place is None else place.data_ptr(), out.data_ptr(), first // layout.vector,
        stored.rows, stored.columns, layout.group_size, layout.groups, layout.outliers,
    )  # fmt: skip


def places(stored: DeviceWeight) -> Tensor | None:
    """Where each column is stored, int32 [in_features]; None: where it is."""
    order = stored.held.get("perm")
    if order is None:
        return None
    place = torch.zeros(len(order), dtype=torch.int32, device=order.device)
    numbers = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return place.scatter_(0, order.long() & 0xFFFF, numbers)


def linear_many(x: Tensor, weight: PublishedWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.published.reference`), with some rows of W at a time."""
    rows, columns = weight.out_features, weight.in_features
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    with torch.cuda.device(x.device):
        stored = DeviceWeight(weight, bias, x.device)
        inputs, products, place = x.reshape(-1, columns), y.view(-1, rows), places(stored)
        vector = stored.layout.vector
        whole = max(DECODED_BYTES // (x.element_size() * columns) // vector, 1)
        dense = x.new_empty(min(whole * vector, rows), columns)
        for first in range(0, rows, len(dense)):
            part = slice(first, min(first + len(dense), rows))
            some = dense[: part.stop - first]
            decode_rows(stored, place, first, some)
            if bias is None:
                torch.mm(inputs, some.T, out=products[:, part])
            else:
                torch.addmm(bias[part].to(x.dtype), inputs, some.T, out=products[:, part])
    return y


LINEAR = Implementation(
    linear_few,
    weight_supports.vptq_linear,
    note=weight_supports.vptq_slower_than_dense,
    is_slow=lambda problem: weight_supports.vptq_slower_than_dense(problem) is not None,
)
DECODED = Implementation(linear_many, weight_supports.vptq_decoded)
