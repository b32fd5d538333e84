"""`linear` on a GPU in Triton: rotate the input, then decode a tile of W and multiply it at once.

    y[t, n] = sum_g scale[n, g] * sum_(v in g) sum_i codebook[code[n, v]][i] * xr[t, v x + i] + b[n]

Codes are read as they are stored, those of a unit at a time: as many neighbours as an integer of 32
bits holds, with those of a nested second pass, which are lower bits, in another. They are taken out
by shifts, and woven (`tl.join`) into one tile [rows, codes] in the order of the columns. So there
is one lookup for all codes of a step, whose barriers are few, and one product. What a vector's
lookup gives is one integer, whose 16-bit parts are the entries i = 0 .. x - 1.

What is rounded beside the codes: the rotated input, and for bfloat16 the entries, to the dtype of
x. Sums are float32, scales multiply them exactly.

Where a GPU can, a launch begins while the one before it ends (EARLY), and waits for it before it
reads anything but weights.
"""

from __future__ import annotations

import functools
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch import Implementation, bucket
from ...formats.scheme import VQScheme
from ...formats.stored_weight import StoredWeight
from .arguments import check, integers_of, words_of
from .supports import codes_of_unit, step, supports

_PROGRAMS = 1024  # enough to fill a large GPU
_ROWS = 64  # of a tile, about
_STEPS = 4  # of a row, that a program does at least
_TILE, _WIDEST_ROTATION = 32, 128  # outputs of a program of the rotation, inputs of one product
_SMALLEST_DOT = 16
_LARGEST_TABLE = 8  # bits of a code
_ADDED = 512  # numbers of a program


@triton.jit
def _rotate(
    out: tl.tensor,
    x: tl.tensor,
    diagonal: tl.tensor,
    tokens: tl.tensor,
    in_features: tl.tensor,
    width: tl.tensor,
    norm: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    # out[t, place of c] = norm * sum_k x[t, k] d[k] H[k, c],  H[k, c] = (-1)^|k & c| in a block
    #
    # A program: BLOCK_TOKENS x TILE outputs, from all inputs of their rotation blocks, PART at a
    # time. Signs d[k] H[k, c] are 1, -1 or 0, exact in every dtype, and made where they are used,
    # by integer operations; x d of a SCALED scheme is rounded. Places are those of `_multiply`.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1) * TILE // BLOCK * BLOCK
    x_rows = x + token[:, None] * in_features
    token_here = token[:, None] < tokens
    total = tl.full([BLOCK_TOKENS, TILE], 0.0, tl.float32)
    for start in range(0, max(BLOCK, TILE), PART):
        source = first + start + tl.arange(0, PART)
        here = source < in_features
        part = tl.load(x_rows + source[None, :], mask=token_here & here[None, :], other=0.0)
        ones = (source % BLOCK)[:, None] & (column % BLOCK)[None, :]
        if BLOCK > 65536:
            ones ^= ones >> 16
        if BLOCK > 256:
            ones ^= ones >> 8
        if BLOCK > 16:
            ones ^= ones >> 4
        odd = 0x6996 >> (ones & 15)  # bit 0: whether four bits have an odd number of ones
        if SCALED:
            factor = tl.load(diagonal + source, mask=here, other=0.0).to(tl.float32)
            part = (part.to(tl.float32) * factor[None, :]).to(part.dtype)
        elif diagonal is not None:
            byte = tl.load(diagonal + (source >> 3), mask=here, other=0).to(tl.int32)
            odd ^= (byte >> (source & 7))[:, None]
        hadamard = 1.0 - 2.0 * (odd & 1)
        if max(PART, TILE) > BLOCK:
            same_block = (source // BLOCK)[:, None] == (column // BLOCK)[None, :]
            hadamard = tl.where(same_block, hadamard, 0.0)
        total = tl.dot(part, hadamard.to(part.dtype), total, input_precision="ieee")
    place = column // STEP * STEP + _place(column % STEP, STEP)
    tl.store(
        out + token[:, None] * width + place[None, :],
        (total * norm).to(out.dtype.element_ty),
        mask=token_here & (column < in_features)[None, :],
    )


@triton.jit
def _place(column: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    # Where a column of a step is in a product: [4, STEP / 16, 2, 2] -> [STEP / 16, 2, 4, 2].
    lane, at = column // (STEP // 4), column % (STEP // 4)
    return at // 4 * 16 + at // 2 % 2 * 8 + lane * 2 + at % 2


@triton.jit
def _words(
    codes: tl.tensor,
    row: tl.tensor,
    row_here: tl.tensor,
    width: tl.tensor,
    unit: tl.tensor,
    units: tl.tensor,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    # [rows, units] int32: the BITS bits of each unit, others above. A row has `width` numbers: one
    # for each unit, neighbours for the compiler too, which then reads several at once, or bytes.
    code_rows = codes + row[:, None] * width
    if codes.dtype.element_ty.primitive_bitwidth == BITS:
        here = row_here[:, None]
        if not WHOLE:
            here &= (unit < units)[None, :]
        found = tl.load(code_rows + unit[None, :], mask=here, other=0).to(tl.int32)
    else:
        byte = unit * BITS >> 3
        found = tl.full([row.shape[0], unit.shape[0]], 0, tl.int32)
        for k in tl.static_range((BITS + 15 - min(BITS & -BITS, 8)) // 8):
            here = row_here[:, None] & ((unit < units) & (byte + k < width))[None, :]
            more = tl.load(code_rows + (byte + k)[None, :], mask=here, other=0)
            found |= more.to(tl.int32) << (8 * k)
        found = found >> (unit * BITS & 7)[None, :]
    return found


@triton.jit
def _field(word: tl.tensor, AT: tl.constexpr, BITS: tl.constexpr, UP: tl.constexpr) -> tl.tensor:
    # BITS bits from bit AT on, times 2^UP.
    if AT >= UP:  # noqa: SIM108, both sides of an expression would be compiled
        moved = word >> (AT - UP)
    else:
        moved = word << (UP - AT)
    return moved & (((1 << BITS) - 1) << UP)


@triton.jit
def _index(
    first: tl.tensor,
    lower: tl.tensor,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    UP: tl.constexpr,
) -> tl.tensor:
    # Code K of every unit, above that of a second pass, times 2^UP.
    if BITS == 4 and SECOND_BITS == 4:  # four at a time, as the bytes of a word
        if K % 2 == 0:
            both = ((first & 0x0F0F0F0F) << 4) | (lower & 0x0F0F0F0F)
        else:
            both = (first & -0x0F0F0F10) | ((lower >> 4) & 0x0F0F0F0F)
        found = _field(both, K // 2 * 8, 8, UP)
    elif SECOND_BITS:
        found = _field(first, K * BITS, BITS, SECOND_BITS + UP)
        found |= _field(lower, K * SECOND_BITS, SECOND_BITS, UP)
    else:
        found = _field(first, K * BITS, BITS, UP)
    return found


@triton.jit
def _indices(
    first: tl.tensor,
    lower: tl.tensor,
    K: tl.constexpr,
    EACH: tl.constexpr,
    CODES: tl.constexpr,
    BITS: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    UP: tl.constexpr,
) -> tl.tensor:
    # [rows, units, 2, 2, ..]: codes K, K + EACH, .. of every unit, in their order.
    if EACH == CODES:
        found = _index(first, lower, K, BITS, SECOND_BITS, UP)
    else:
        found = tl.join(
            _indices(first, lower, K, 2 * EACH, CODES, BITS, SECOND_BITS, UP),
            _indices(first, lower, K + EACH, 2 * EACH, CODES, BITS, SECOND_BITS, UP),
        )
    return found


@triton.jit
def _weights(
    entry: tl.tensor, K: tl.constexpr, EACH: tl.constexpr, VECTOR: tl.constexpr
) -> tl.tensor:
    # [rows, codes, 2, 2, ..] int16: weights K, K + EACH, .. of every entry, in their order.
    if EACH == VECTOR:
        found = (entry >> (16 * K)).to(tl.int16)
    else:
        found = tl.join(
            _weights(entry, K, 2 * EACH, VECTOR), _weights(entry, K + EACH, 2 * EACH, VECTOR)
        )
    return found


@triton.jit
def _rounded(entry: tl.tensor, VECTOR: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    # The halves of entries in another 16-bit dtype.
    found = entry
    if DTYPE == tl.bfloat16:  # noqa: SIM300, the constant is on the right
        found = entry * 0
        for k in tl.static_range(VECTOR):
            half = (entry >> (16 * k)).to(tl.int16).to(tl.float16, bitcast=True)
            bits = half.to(DTYPE).to(tl.int16, bitcast=True).to(entry.dtype)
            if VECTOR > 1:
                bits = (bits & 0xFFFF) << (16 * k)
            found |= bits
    return found


@triton.jit
def _multiply(
    out: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    second: tl.tensor,
    codebook: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    in_features: tl.tensor,
    width: tl.tensor,
    second_width: tl.tensor,
    group: tl.tensor,
    steps: tl.tensor,
    CODES: tl.constexpr,
    VECTOR: tl.constexpr,
    BITS: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    TABLE: tl.constexpr,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    COPIES: tl.constexpr,
) -> None:
    # out[s, t, n] = the part s of the sum for y[t, n] (see the module)
    #
    # A program: BLOCK_TOKENS tokens x BLOCK_ROWS rows x `steps` times STEP weights of a row. Those
    # of the same rows follow each other, so that only the first reads its codes from DRAM. Bound
    # by lookups: in shared memory, where Triton writes the table anew for every step, 2^COPIES
    # times, and eight rows, which eight threads of a warp have, read copies of their own; a large
    # table is looked up in L1, which is slower.
    WEIGHTS: tl.constexpr = CODES * VECTOR  # of a unit
    UNITS: tl.constexpr = STEP // WEIGHTS
    INDEX: tl.constexpr = BITS + SECOND_BITS
    UP: tl.constexpr = COPIES if TABLE else 0
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    row_here, token_here = row < rows, token < tokens
    units, last = in_features // WEIGHTS, (in_features + STEP - 1) // STEP
    x_rows = x + token[None, :] * (last * STEP)
    # Rows [n, 2, WARPS, 8] are multiplied as [n, WARPS, 2, 8], columns as `_place` says: then what
    # a thread has of the codes is what tensor cores want of it, and no weight changes threads.
    at = tl.arange(0, BLOCK_ROWS)
    at = at // (16 * WARPS) * (16 * WARPS) + (at // 8 % 2 * WARPS + at // 16 % WARPS) * 8 + at % 8
    out_row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + at
    out_here = out_row < rows
    scale_rows = scale + out_row * (in_features // group)
    dtype = x.dtype.element_ty

    if TABLE:
        table = tl.load(codebook + (tl.arange(0, 1 << (INDEX + UP)) >> UP))
        table = _rounded(table, VECTOR, dtype)
        if VECTOR == 1:
            table = table.to(tl.int32)  # a bank has one copy
    # The threads of a warp have eight rows, of each four parts of a step.
    part_of_step = tl.arange(0, UNITS * CODES) // (UNITS * CODES // 4)
    copy = (tl.arange(0, BLOCK_ROWS) & 7)[:, None] | (part_of_step << 3)[None, :]
    copy &= (1 << UP) - 1
    total = tl.full([BLOCK_ROWS, BLOCK_TOKENS], 0.0, tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for i in range(split * steps, min(split * steps + steps, last)):
        unit = i * UNITS + tl.arange(0, UNITS)
        first = _words(codes, row, row_here, width, unit, units, CODES * BITS, WHOLE)
        lower = first
        if SECOND_BITS:
            lower = _words(
                second, row, row_here, second_width, unit, units, CODES * SECOND_BITS, WHOLE
            )
        index = _indices(first, lower, 0, 1, CODES, BITS, SECOND_BITS, UP)
        index = tl.reshape(index, [BLOCK_ROWS, UNITS * CODES]) | copy
        if TABLE:
            flat = tl.gather(table, tl.reshape(index, [BLOCK_ROWS * UNITS * CODES]), 0)
            entry = tl.reshape(flat, [BLOCK_ROWS, UNITS * CODES])
        else:
            entry = tl.load(codebook + index)  # any code is that of an entry
            entry = _rounded(entry, VECTOR, dtype)
        weight = tl.reshape(
            _weights(entry, 0, 1, VECTOR),
            [BLOCK_ROWS // (16 * WARPS), 2, WARPS, 8, 4, STEP // 16, 2, 2],
        )
        weight = tl.permute(weight, (0, 2, 1, 3, 5, 6, 4, 7))
        weight = tl.reshape(weight, [BLOCK_ROWS, STEP])
        if dtype == tl.float32:
            weight = weight.to(tl.float16, bitcast=True).to(dtype)
        else:
            weight = weight.to(dtype, bitcast=True)
        column = i * STEP + tl.arange(0, STEP)
        inputs = tl.load(x_rows + column[:, None], mask=token_here[None, :], other=0.0)
        part = tl.dot(weight, inputs, input_precision="ieee")
        factor = tl.load(scale_rows + i * STEP // group, mask=out_here, other=0.0)
        total += part * factor.to(tl.float32)[:, None]

    if bias is not None:
        added = tl.load(bias + out_row, mask=out_here, other=0.0).to(tl.float32)
        total += tl.where(split == 0, added, 0.0)[:, None]
    first_out = out + split.to(tl.int64) * tokens * rows
    tl.store(
        first_out + token[None, :] * rows + out_row[:, None],
        total.to(out.dtype.element_ty),
        mask=out_here[:, None] & token_here[None, :],
    )


@triton.jit
def _add(
    out: tl.tensor,
    parts: tl.tensor,
    numel: tl.tensor,
    splits: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    # out[i] = sum_s parts[s, i], always in this order
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for s in range(splits):
        total += tl.load(parts + s * numel + at, mask=at < numel, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < numel)


def _configs() -> list[triton.Config]:
    """Tiles to choose from by measurement; the first fits the smallest GPU."""
    configs = [
        triton.Config(
            {"BLOCK_ROWS": rows, "WARPS": warps, "COPIES": copies},
            num_warps=warps,
            num_stages=stages,
        )
        for rows, warps, stages, copies in (
            (32, 2, 2, 0), (64, 4, 3, 0), (64, 4, 3, 4), (128, 4, 3, 4), (128, 8, 3, 5),
        )
    ]  # fmt: skip
    compiled = isinstance(_multiply, triton.JITFunction)
    return configs if compiled else configs[:1]  # nothing to measure under the interpreter


_KEY = ["rows", "in_features", "VECTOR", "BITS", "SECOND_BITS", "BLOCK_TOKENS"]
_tuned = triton.autotune(_configs(), _KEY)(_multiply)
_tuning = threading.Lock()  # the tuner keeps the arguments of a call in itself


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b (`ops.reference.linear`).

    The first call for a size measures tiles, which a CUDA graph cannot capture: call once before.

    Raises:
        VQFormatError: sizes do not belong together. A kernel would read what is not there.
    """
    (codes, codebook, scale, rotation), residual, scheme, in_features = weight
    rows = codes.shape[0]
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    check(weight, bias)
    second = None
    if residual is not None:
        second, codebook = residual.codes, residual.codebook  # the table of both
    together, a_step = codes_of_unit(scheme, in_features), step(scheme, in_features)
    inputs = x.reshape(-1, in_features).contiguous()
    tokens = len(inputs)
    most = 128 if x.dtype.itemsize == 2 else 64
    block_tokens = min(max(bucket(tokens), _SMALLEST_DOT), most)
    tiles = triton.cdiv(tokens, block_tokens), triton.cdiv(rows, _ROWS)
    steps = _steps(tiles[0] * tiles[1], triton.cdiv(in_features, a_step))
    splits = triton.cdiv(in_features, a_step * steps)
    first = words_of(codes, together * scheme.entry_bits)
    lower = None if second is None else words_of(second, together * scheme.second_bits)
    early = _early(x.device)
    options = {"launch_pdl": True} if early else {}
    with torch.accelerator.device_index(x.device.index):
        table = integers_of(codebook, scheme)
        # The last launch before the product, which reads the table without waiting for it.
        inputs = _rotated(inputs, rotation, scheme, a_step, early)
        out = y.view(1, tokens, rows)
        if splits > 1:
            out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
        with _tuning:
            _tuned[lambda meta: (tiles[0], triton.cdiv(rows, meta["BLOCK_ROWS"]), splits)](
                out,
                inputs,
                first,
                lower,
                table,
                scale.contiguous(),
                None if bias is None else bias.contiguous(),
                tokens,
                rows,
                in_features,
                first.shape[1],
                0 if lower is None else lower.shape[1],
                scheme.group(in_features),
                steps,
                CODES=together,
                VECTOR=scheme.vector_size,
                BITS=scheme.entry_bits,
                SECOND_BITS=scheme.second_bits,
                TABLE=scheme.entry_bits + scheme.second_bits <= _LARGEST_TABLE,
                STEP=a_step,
                WHOLE=in_features % a_step == 0,
                BLOCK_TOKENS=block_tokens,
                EARLY=early,
                **options,
            )
        if splits > 1:
            _add[(triton.cdiv(y.numel(), _ADDED),)](
                y, out, y.numel(), splits, BLOCK=_ADDED, EARLY=early, **options
            )
    return y


@functools.cache
def _early(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended: NVIDIA's, from Hopper on, and
    not those of Triton's interpreter."""
    if device.type != "cuda" or torch.version.hip or not hasattr(tl.extra, "cuda"):
        return False
    if not isinstance(_multiply, triton.JITFunction):
        return False
    known = hasattr(tl.extra.cuda, "gdc_wait")  # from Triton 3.4 on
    return known and torch.cuda.get_device_capability(device)[0] >= 9


def _steps(tiles: int, steps: int) -> int:
    """How many of a row's steps one program does: fewer than all where tiles are too few."""
    splits = min(max(_PROGRAMS // tiles, 1), max(steps // _STEPS, 1))
    return -(-steps // splits)


def _rotated(
    x: Tensor, rotation: Tensor | None, scheme: VQScheme, a_step: int, early: bool
) -> Tensor:
    """x [tokens, in_features], rotated, each step's columns at the places of `_multiply`: [tokens,
    whole steps]."""
    tokens, in_features = x.shape
    block = scheme.block(in_features) if scheme.rotation != "none" else 1
    width = triton.cdiv(in_features, a_step) * a_step
    diagonal = None
    if rotation is not None:
        diagonal = rotation.to(torch.float16 if scheme.is_scaled else torch.uint8).contiguous()
    out = (x.new_empty if width == in_features else x.new_zeros)(tokens, width)
    _rotate[(triton.cdiv(tokens, _SMALLEST_DOT), triton.cdiv(in_features, _TILE))](
        out,
        x,
        diagonal,
        tokens,
        in_features,
        width,
        block**-0.5,
        BLOCK=block,
        TILE=_TILE,
        PART=min(max(block, _TILE), _WIDEST_ROTATION),
        STEP=a_step,
        BLOCK_TOKENS=_SMALLEST_DOT,
        EARLY=early,
        SCALED=scheme.is_scaled,
    )
    return out


LINEAR = Implementation(linear, supports)
