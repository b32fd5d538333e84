"""`kv_append` on a GPU: keys and values to codes in rows, or in pages, by one generated kernel."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....codegen.families.kv_append import CELLS, append_plan
from ....codegen.jit.device import device_arch
from ....codegen.jit.kernel_store import default_store
from ....codegen.jit.launch import LoadedKernel, Prepared
from ....codegen.kv_plan import AppendPlan
from ....dispatch import Implementation
from ....errors import VQBackendError, VQFormatError
from ....formats.packing import packed_size
from ....formats.scheme import VQScheme
from ....ops.kv import KVCacheView, KVSide, append_index
from ..linear.dequantize import DTYPES, on_device
from . import supports
from .rotary_mean import FIELDS, rotary_mean

FEW_ROWS = 8  # of a multiprocessor: as many blocks share the search for one
FEW_TOKENS = 32  # of a head, under codebooks per channel group
_TOKENS_OF_A_WARP = 128  # under codebooks per channel group
_ALIGNED = 16  # bytes of the widest load
_REACH = 1.25  # of the grid, in the largest number of a codebook
_MOST_CANDIDATES = 4
_MORE = 1  # a list that says: try all
_SCALE = 2  # bytes


class AppendArguments(ctypes.Structure):
    """struct Arguments of kernels/cuda/kv/append.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("smoothing", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("x_batch", ctypes.c_int64),
        ("x_head", ctypes.c_int64),
        ("x_token", ctypes.c_int64),
        ("mean_batch", ctypes.c_int64),
        ("mean_head", ctypes.c_int64),
        ("codes_batch", ctypes.c_int64),
        ("codes_head", ctypes.c_int64),
        ("scale_batch", ctypes.c_int64),
        ("scale_head", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("cells_per_unit", ctypes.c_float),
    ]


class RotaryAppendArguments(ctypes.Structure):
    """The same of keys that have a rotary mean."""

    _fields_ = [*AppendArguments._fields_, *FIELDS]


def candidates(codebook: Tensor, cells: int) -> tuple[Tensor, float]:
    """Entries that may be nearest in each cell of a square around a codebook of the plane.

    An entry is left out if another one is nearer by more than float32 scores may be wrong, in all
    four corners of the cell: the difference of two squared distances is linear, so also inside.

    Args:
        codebook: [entries, 2] on the CPU, up to 256 entries.
        cells: of a side.

    Returns:
        int32 [cells (second coordinate), cells (first)]: up to four entries, a byte each, ascending
        from the lowest byte on, the last one repeated; 1 where there are more. And cells per unit.
    """
    book = codebook.double()
    reach = float(book.abs().max()) * _REACH
    size, slack = 2 * reach / cells, 1e-5 * reach**2
    edges = torch.arange(cells + 1, dtype=torch.float64) * size - reach
    low, high = edges[:-1] - 1e-3 * size, edges[1:] + 1e-3 * size  # a cell's number is rounded
    sides = torch.stack([low, high], 1)
    lists = torch.empty(cells, cells, dtype=torch.int64)
    for row in range(cells):
        y = sides[row].expand(cells, 2, 2)  # [cell, side of x, side of y]
        corners = torch.stack([sides[:, :, None].expand(cells, 2, 2), y], -1).flatten(1, 2)
        distance = (corners[:, :, None] - book).square().sum(-1)  # [cell, corner, entry]
        possible = torch.ones(cells, len(book), dtype=torch.bool)
        middle = (corners.mean(1, keepdim=True) - book).square().sum(-1).argmin(1, keepdim=True)
        for rival in torch.cat([distance.argmin(2), middle], 1).unbind(1):
            other = distance.gather(2, rival[:, None, None].expand(-1, 4, 1))
            possible &= ~(distance - other > slack).all(1)
        count = possible.sum(1)
        ranked = torch.where(possible, torch.arange(len(book)), len(book)).sort(1).values
        for k in range(1, _MOST_CANDIDATES):
            ranked[:, k] = torch.where(count > k, ranked[:, k], ranked[:, k - 1])
        words = sum(ranked[:, k] << 8 * k for k in range(_MOST_CANDIDATES))
        lists[row] = torch.where(count > _MOST_CANDIDATES, _MORE, words)
    signed = torch.where(lists >= 1 << 31, lists - (1 << 32), lists)
    return signed.to(torch.int32), 1 / size


_grids: dict[int, tuple[weakref.ref[Tensor], Tensor, float]] = {}  # by identity of a codebook


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers outside inference mode
def _of_bytes(data: bytes, cells: int, device: str) -> tuple[Tensor, float]:
    book = torch.frombuffer(bytearray(data), dtype=torch.float16).view(-1, 2)
    lists, per_unit = candidates(book, cells)
    return lists.to(device), per_unit


def grid_of(codebook: Tensor, scheme: VQScheme) -> tuple[Tensor, float] | None:
    """The candidates of a codebook on its device, kept as long as the tensor is; None if there is
    no grid, or none yet and this is no time to read the codebook."""
    if scheme.vector_size != 2 or scheme.entry_bits not in CELLS or not scheme.has_scale:
        return None
    key = id(codebook)
    known = _grids.get(key)
    if known is not None and known[0]() is codebook:
        return known[1:]
    for same, lists, per_unit in _grids.values():  # compiled graphs pass other tensors of a memory
        other = same()
        if other is not None and other.data_ptr() == codebook.data_ptr():
            return lists, per_unit
    if torch.cuda.is_current_stream_capturing():
        return None
    data = codebook.detach().half().cpu().contiguous().numpy().tobytes()
    lists, per_unit = _of_bytes(data, CELLS[scheme.entry_bits], str(codebook.device))
    _grids[key] = weakref.ref(codebook, lambda _: _grids.pop(key, None)), lists, per_unit
    return lists, per_unit


@functools.lru_cache(maxsize=256)
def _appender(plan: AppendPlan, ordinal: int) -> LoadedKernel:
    arguments = RotaryAppendArguments if plan.rotary else AppendArguments
    return LoadedKernel(plan, arguments, ordinal, default_store())


class _Shapes(NamedTuple):
    """All that decides a launch but addresses."""

    x: torch.Size
    x_strides: tuple[int, ...]
    mean: torch.Size | None
    mean_strides: tuple[int, ...]
    codebook: torch.Size
    codes: torch.Size
    codes_strides: tuple[int, ...]
    scale: torch.Size
    scale_strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    grid: bool
    rotary: bool


@functools.lru_cache(maxsize=4096)  # every layer asks this twice for every token
def _prepare(shapes: _Shapes, scheme: VQScheme, ordinal: int) -> tuple[Prepared, int]:
    """A launch of which addresses are missing, and the bytes of a token's codes."""
    _check(shapes, scheme)
    batch, heads, tokens, dim = shapes.x
    pairs, sms = batch * heads, device_arch(ordinal).sms
    few = tokens <= FEW_TOKENS if not scheme.has_scale else pairs * tokens <= FEW_ROWS * sms
    size = shapes.dtype.itemsize
    x_strides = [size * stride for stride in shapes.x_strides[:3]]
    aligned = shapes.aligned and not any(stride % _ALIGNED for stride in x_strides)
    plan = append_plan(
        scheme, dim, DTYPES[shapes.dtype], centred=shapes.mean is not None, aligned=aligned,
        few=few, grid=shapes.grid, rotary=shapes.rotary,
    )  # fmt: skip
    blocks, parts = _blocks(plan, batch, heads, tokens, sms)
    prepared = _appender(plan, ordinal).prepare(
        blocks, x_batch=x_strides[0], x_head=x_strides[1], x_token=x_strides[2],
        mean_batch=shapes.mean_strides[0], mean_head=shapes.mean_strides[1],
        codes_batch=shapes.codes_strides[0], codes_head=shapes.codes_strides[1],
        scale_batch=shapes.scale_strides[0], scale_head=shapes.scale_strides[1],
        batch=batch, heads=heads, tokens=tokens, parts=parts,
    )  # fmt: skip
    return prepared, shapes.codes[3]


def _check(shapes: _Shapes, scheme: VQScheme) -> None:
    """Raise unless all sizes belong together: a kernel would write anywhere."""
    batch, heads, _, dim = shapes.x
    vectors = dim // scheme.vector_size
    width, scales = packed_size(vectors, scheme.entry_bits), scheme.row_numbers
    books = (1,) if scheme.has_scale else (heads, vectors)
    room = shapes.codes[2]
    if (
        shapes.codes != (batch, heads, room, width)
        or shapes.scale != (batch, heads, room if scales else shapes.scale[2], scales)
        or shapes.codebook != (*books, scheme.entries, scheme.vector_size)
        or shapes.mean not in (None, (batch, heads, 1, dim))
    ):
        raise VQFormatError(
            f"{list(shapes.x)} numbers as {scheme.spec()} do not go to codes {list(shapes.codes)} "
            f"and scales {list(shapes.scale)} with a codebook {list(shapes.codebook)}."
        )
    if (
        shapes.codes_strides[2:] != (width, 1)
        or (scales and room > 1 and shapes.scale_strides[2] != scales)
        or (scales > 1 and shapes.scale_strides[3] != 1)
        or any(stride % width for stride in shapes.codes_strides[:2])
    ):
        raise VQBackendError("append needs a buffer whose tokens lie one after another.")


def append(
    key: Tensor | None, value: Tensor | None, view: KVCacheView, slot_mapping: Tensor | None
) -> None:
    """`ops.reference.kv_append` to rows. The same codes for a token whatever comes with it.

    Raises:
        VQFormatError: sizes do not belong together.
        VQBackendError: tokens of the buffer, or of a page, do not lie one after another.
    """
    for x, side in ((key, view.key), (value, view.value)):
        if x is None or not x.numel():
            continue
        x = x if x.stride(3) == 1 else x.contiguous()
        if slot_mapping is None:
            rotary: dict[str, Any] = {}
            if side is view.key and view.key_rotary_mean is not None:
                begin = view.num_coded - x.shape[2]
                turning = rotary_mean(view._replace(rotary_start=view.rotary_start + begin))
                rotary = {name: of for (name, _), of in zip(FIELDS, turning, strict=True)}
            _append(x, side, append_index(view, side, x.shape[2]), rotary)
        else:
            _append_paged(x, side, slot_mapping)


def mean_and_smoothing(side: KVSide) -> tuple[Tensor | None, Tensor | None]:
    """What rows lose and are multiplied by, as kernels read them: with the same strides."""
    mean, smoothing = side.mean, side.smoothing
    if mean is not None and (mean.stride(3) != 1 or mean.data_ptr() % _ALIGNED):
        mean = mean.clone(memory_format=torch.contiguous_format)
    if smoothing is None:
        return mean, None
    if mean is None or smoothing.shape != mean.shape or smoothing.dtype != torch.float32:
        raise VQFormatError(
            f"{smoothing.dtype} {list(smoothing.shape)} do not multiply rows whose mean is "
            f"{None if mean is None else list(mean.shape)}. Give both, float32 [B, H, 1, D]."
        )
    if not side.parsed.has_scale or side.parsed.has_zero:  # kernels would leave factors out
        raise VQFormatError(
            f"keys of {side.scheme} have no factors: their codes are learned or integers. Use a "
            "universal scheme such as u4, or a view without `key_smoothing`."
        )
    if smoothing.stride() != mean.stride() or smoothing.data_ptr() % _ALIGNED:
        mean, smoothing = (
            x.clone(memory_format=torch.contiguous_format) for x in (mean, smoothing)
        )
    return mean, smoothing


def _append(x: Tensor, side: KVSide, at: int, rotary: dict[str, Any]) -> None:
    """Encode `x` to tokens `at`, `at` + 1, ... of a buffer in rows.

    Args:
        rotary: members of `RotaryAppendArguments`, of keys with a rotary mean.
    """
    codes, scale, scheme = side.codes, side.scale, side.parsed
    mean, smoothing = mean_and_smoothing(side)
    grid, codebook = grid_of(side.codebook, scheme), _ready(side.codebook)
    place, ordinal = x.data_ptr(), x.device.index
    shapes = _Shapes(
        x.shape, x.stride(), None if mean is None else mean.shape,
        (0, 0) if mean is None else mean.stride(), codebook.shape, codes.shape, codes.stride(),
        scale.shape, scale.stride(), x.dtype, place % _ALIGNED == 0, grid is not None,
        bool(rotary),
    )  # fmt: skip
    with on_device(ordinal):
        prepared, width = _prepare(shapes, scheme, ordinal)
        buffer = codes.data_ptr()
        if (
            not 0 <= at <= at + x.shape[2] <= codes.shape[2]
            or codes.dtype is not torch.uint8
            or buffer % (width & -width)
        ):
            raise VQFormatError(
                f"{x.shape[2]} tokens do not go to place {at} and on of {codes.dtype} codes of "
                f"{codes.shape[2]} tokens."
            )
        addresses = {
            "x": place, "mean": None if mean is None else mean.data_ptr(),
            "smoothing": None if smoothing is None else smoothing.data_ptr(),
            "codebook": codebook.data_ptr(), "codes": buffer + at * width,
            "scale": scale.data_ptr() + _SCALE * scheme.row_numbers * at, **rotary,
        }  # fmt: skip
        _launch(prepared, ordinal, grid, addresses)


def _launch(
    prepared: Prepared,
    ordinal: int,
    grid: tuple[Tensor, float] | None,
    addresses: dict[str, int | None],
) -> None:
    """Fill in what `_prepare` does not know, by names of `AppendArguments`, and launch."""
    with prepared.lock:
        arguments = prepared.arguments
        for name, address in addresses.items():
            setattr(arguments, name, address)
        if grid is not None:
            arguments.lists, arguments.cells_per_unit = grid[0].data_ptr(), grid[1]
        prepared.start(torch._C._cuda_getCurrentRawStream(ordinal), True)


class _PagedShapes(NamedTuple):
    """All that decides a launch to pages but addresses."""

    x: torch.Size
    x_strides: tuple[int, ...]
    mean: torch.Size | None
    codebook: torch.Size
    codes: torch.Size
    codes_strides: tuple[int, ...]
    scale: torch.Size
    scale_strides: tuple[int, ...]
    slots: torch.Size
    dtype: torch.dtype
    aligned: bool
    grid: bool


@functools.lru_cache(maxsize=4096)
def _prepare_paged(shapes: _PagedShapes, scheme: VQScheme, ordinal: int) -> Prepared:
    """A launch of which addresses are missing."""
    batch, heads, tokens, dim = shapes.x
    pages, page, width = shapes.codes[0], shapes.codes[2], shapes.codes[3]
    numbers = scheme.row_numbers
    if (
        batch != 1
        or shapes.slots != (tokens,)
        or shapes.codes[1] != heads
        or width != packed_size(dim // scheme.vector_size, scheme.entry_bits)
        or shapes.scale != (pages, heads, page, numbers)
        or shapes.codebook != (1, scheme.entries, scheme.vector_size)
        or shapes.mean not in (None, (1, heads, 1, dim))
    ):
        raise VQFormatError(
            f"{list(shapes.x)} numbers as {scheme.spec()} do not go to {list(shapes.slots)} slots "
            f"of codes {list(shapes.codes)} and scales {list(shapes.scale)}."
        )
    if (
        shapes.codes_strides[1:] != (page * width, width, 1)
        or shapes.scale_strides[1:] != (page * numbers, numbers, 1)
        or shapes.codes_strides[0] % _ALIGNED
    ):
        raise VQBackendError("append needs pages whose tokens lie one after another.")
    sms = device_arch(ordinal).sms
    x_strides = [shapes.dtype.itemsize * stride for stride in shapes.x_strides[:3]]
    aligned = shapes.aligned and not any(stride % _ALIGNED for stride in x_strides)
    plan = append_plan(
        scheme, dim, DTYPES[shapes.dtype], centred=shapes.mean is not None, aligned=aligned,
        few=heads * tokens <= FEW_ROWS * sms, grid=shapes.grid, page=page,
    )  # fmt: skip
    blocks, parts = _blocks(plan, 1, heads, tokens, sms)
    return _appender(plan, ordinal).prepare(
        blocks, x_head=x_strides[1], x_token=x_strides[2], mean_head=dim,
        codes_batch=shapes.codes_strides[0], codes_head=shapes.codes_strides[1],
        scale_batch=shapes.scale_strides[0], scale_head=shapes.scale_strides[1],
        batch=1, heads=heads, tokens=tokens, parts=parts,
    )  # fmt: skip


def _append_paged(x: Tensor, side: KVSide, slots: Tensor) -> None:
    """Encode `x` to slots of pages, under one codebook for all."""
    codes, scale, scheme = side.codes, side.scale, side.parsed
    mean, smoothing = mean_and_smoothing(side)
    if mean is not None and not mean.is_contiguous():
        mean = mean.contiguous()
        smoothing = None if smoothing is None else smoothing.contiguous()
    grid, codebook = grid_of(side.codebook, scheme), _ready(side.codebook)
    place, ordinal = x.data_ptr(), x.device.index
    shapes = _PagedShapes(
        x.shape, x.stride(), None if mean is None else mean.shape, codebook.shape, codes.shape,
        codes.stride(), scale.shape, scale.stride(), slots.shape, x.dtype, place % _ALIGNED == 0,
        grid is not None,
    )  # fmt: skip
    apart = codes.data_ptr() % _ALIGNED or scale.data_ptr() % _ALIGNED
    if slots.dtype != torch.int64 or not slots.is_contiguous() or apart:
        raise VQBackendError("slots are int64, side by side; pages begin at multiples of 16 bytes.")
    with on_device(ordinal):
        addresses = {
            "x": place, "mean": None if mean is None else mean.data_ptr(),
            "smoothing": None if smoothing is None else smoothing.data_ptr(),
            "codebook": codebook.data_ptr(), "codes": codes.data_ptr(),
            "scale": scale.data_ptr(), "slots": slots.data_ptr(),
        }  # fmt: skip
        _launch(_prepare_paged(shapes, scheme, ordinal), ordinal, grid, addresses)


def _ready(codebook: Tensor) -> Tensor:
    """A codebook as kernels read it."""
    if (
        codebook.dtype is not torch.float16
        or not codebook.is_contiguous()
        or codebook.data_ptr() % _ALIGNED
    ):
        return codebook.half().clone(memory_format=torch.contiguous_format)
    return codebook


def _blocks(plan: AppendPlan, batch: int, heads: int, tokens: int, sms: int) -> tuple[int, int]:
    """Blocks of a launch, and how many share the tokens of one head."""
    if plan.learned and plan.few:
        parts = shares_of(batch * tokens, heads * plan.blocks_across, sms)
        return heads * plan.blocks_across * parts, parts
    pairs, at_a_time = batch * heads, plan.rows_at_a_time
    if plan.learned:
        pairs, at_a_time = pairs * plan.blocks_across, _TOKENS_OF_A_WARP
    parts = -(-tokens // at_a_time)
    if not plan.shared_search:
        parts = max(1, min(parts, plan.blocks_per_sm * sms // pairs))
    return pairs * parts, parts


def shares_of(rows: int, blocks: int, sms: int) -> int:
    """How many blocks share few rows under learned codebooks, which each of them reads.

    Args:
        blocks: that it takes for all codebooks; 0 = none is learned.
    """
    return min(rows, max(1, 2 * sms // max(blocks, 1)))


APPEND = Implementation(append, supports.append)
