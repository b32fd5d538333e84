"""Plans of kernels/cuda/kv/append.cu: the lanes that own a row. Pure functions, no GPU."""

from __future__ import annotations

from ...errors import VQSchemeError
from ...formats.scheme import VQScheme
from ..kv_plan import AppendPlan, StorePlan
from ..plan import Dtype

VECTOR_SIZES = (1, 2, 4)
MOST_BITS = 8
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
CELLS = {6: 32, 8: 64}  # cells per side of the grid over the plane, by bits of a code
_THREADS = 256
_WARP = 32
_MOST_NUMBERS, _MOST_VECTORS = 24, 16  # of a row, in the registers of a thread
_MOST_ENTRIES = 64  # numbers of codebooks and norms, in the registers of a thread


def appendable(scheme: VQScheme, dim: int) -> str | None:
    """None if the kernel encodes rows of `dim` numbers in this scheme, else the reason why not."""
    if scheme.residuals != 1 or scheme.lattice or scheme.codebook == "tile":
        return "KV codes have one stage, and a codebook for all rows or one per channel group"
    if scheme.mode != "unbiased":
        return f"mode {scheme.mode!r} is not computed by kernels"
    if scheme.vector_size not in VECTOR_SIZES or scheme.entry_bits > MOST_BITS:
        return f"{scheme.notation()} has no kernel: x is 1, 2 or 4, codes have up to 8 bits"
    if scheme.rotation not in ("none", "hadamard"):
        return f"rotation {scheme.rotation!r}"
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is none of {HEAD_DIMS}"
    if dim // scheme.vector_size % _unit(scheme):
        return f"{dim // scheme.vector_size} codes of {scheme.entry_bits} bits are not whole bytes"
    if not scheme.has_scale:
        each = max(1, scheme.entries // _WARP) * (scheme.vector_size + 1) * _unit(scheme)
        if scheme.rotation != "none":
            return "rotated rows with a codebook per channel group"
        return None if each <= _MOST_ENTRIES else f"{scheme.notation()} needs too many registers"
    if scheme.scale_group:
        return "several scales per token"
    try:
        scheme.block(dim)
    except VQSchemeError as error:
        return str(error)
    return None


def append_plan(
    scheme: VQScheme,
    dim: int,
    dtype: Dtype,
    *,
    centred: bool,
    aligned: bool,
    few: bool,
    grid: bool = False,
    page: int = 0,
    rotary: bool = False,
) -> AppendPlan:
    """Plan of an appendable scheme.

    Args:
        dtype: of the keys or values.
        centred: whether a mean is subtracted.
        aligned: whether rows begin at multiples of 16 bytes.
        few: whether rows are so few that threads shall share the search for one.
        grid: whether there is a grid over the plane.
        page: tokens of a page; 0 = a tape. Codebooks per channel group have no pages.
        rotary: whether a rotary mean is subtracted; not in pages.
    """
    x, bits = scheme.vector_size, scheme.entry_bits
    if not scheme.has_scale:
        # Without local memory. With many rows, what turns is loaded next to several of them; at
        # head_dim 192, of a store's two sides, the numbers of blocks take more registers.
        resident = 2 if x == 4 or (rotary and not few) or dim == 192 else 3
        return AppendPlan(
            _THREADS, resident, dtype, x, bits, dim, 1, centred, aligned, True, False, few, 0,
            _WARP, _unit(scheme), 0, rotary,
        )  # fmt: skip
    lanes, width = _few_lanes(dim // x, _unit(scheme)) if few else _many_lanes(scheme, dim)
    cells = CELLS.get(bits, 0) if grid and x == 2 else 0
    numbers = -(-dim // (x * lanes * width)) * width * x  # of a lane
    resident = 3 if cells and numbers <= 16 else 2  # without local memory
    if rotary and numbers >= 8:
        resident = 2 if few or cells else 1  # what turns takes more registers
    return AppendPlan(
        _THREADS, resident, dtype, x, bits, dim, scheme.block(dim), centred, aligned, False,
        scheme.has_zero, few, cells, lanes, width, page, rotary,
    )  # fmt: skip


def store_plan(keys: AppendPlan, values: AppendPlan) -> StorePlan:
    """The plan of a step of a static cache, of those for `few` keys and values."""
    return StorePlan(keys.threads, keys.blocks_per_sm, keys, values)


def _unit(scheme: VQScheme) -> int:
    """Codes that are whole bytes."""
    return 8 // (scheme.entry_bits & -scheme.entry_bits)


def _few_lanes(vectors: int, unit: int) -> tuple[int, int]:
    """Lanes of a row and neighbouring vectors of a lane: as many lanes as there are."""
    width = unit
    while width * _WARP < vectors and vectors % (2 * width) == 0:
        width *= 2
    lanes = 1
    while lanes < _WARP and lanes * width < vectors:
        lanes *= 2
    return lanes, width


def _many_lanes(scheme: VQScheme, dim: int) -> tuple[int, int]:
    """So that few slots are empty, then 8 lanes, then wide loads."""
    x, unit = scheme.vector_size, _unit(scheme)
    vectors = dim // x
    widths = [
        w for w in (1, 2, 4, 8) if w % unit == 0 and vectors % w == 0 and w * x <= max(8, unit * x)
    ]

    def cost(choice: tuple[int, int]) -> tuple[int, int, int]:
        lanes, width = choice
        slots = -(-vectors // (lanes * width)) * width
        crowded = slots > _MOST_VECTORS or slots * x > _MOST_NUMBERS
        return lanes * slots + 1000 * crowded, abs(lanes - 8), -width

    return min(((lanes, w) for lanes in (2, 4, 8, 16, 32) for w in widths), key=cost)
