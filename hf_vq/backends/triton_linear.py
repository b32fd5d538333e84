"""`linear` on a GPU in Triton: rotate the input, then decode a tile of W and multiply it at once.

    y[t, n] = sum_g scale[n, g] * sum_(v in g) sum_i codebook[code[n, v]][i] * xr[t, v x + i] + b[n]

Codes are read as they are stored: at a time those of p neighbouring weights, a vector, or as many
scalar codes as there are in a byte. What a vector's lookup gives is one integer, whose 16-bit parts
are the entries i = 0 .. x - 1; scalar codes are looked up one by one, with those of a nested second
pass as lower bits. Either way there are p products of tiles, each of one weight of every p, and no
shuffle. So the rotated input lies in planes, [tokens, p, in_features / p].

What is rounded beside the codes: the rotated input, and for bfloat16 the entries, to the dtype of
x. Sums are float32, scales multiply them exactly.
"""

from __future__ import annotations

import functools
import math
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import VQFormatError
from ..formats.packing import packed_size
from ..formats.scheme import VQScheme
from ..formats.tensors import tensor_specs
from ..ops import dispatch
from .triton import planes, step

_ENTRIES = {1: torch.int16, 2: torch.int32, 4: torch.int64}
_PROGRAMS = 512  # enough to fill a large GPU
_ROWS = 32  # of the smallest tile
_STEPS = 4  # of a row, that a program does at least
_WIDEST_ROTATION = 64  # inputs and outputs of one product
_SMALLEST_DOT = 16
_LARGEST_TABLE = 8  # bits of a code
_ADDED = 512  # numbers of a program


@triton.jit
def _rotate(
    out: tl.tensor,
    x: tl.tensor,
    signs: tl.tensor,
    tokens: tl.tensor,
    in_features: tl.tensor,
    norm: tl.tensor,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    # out[t, c % p, c // p] = norm * sum_k x[t, k] s[k] H[k, c],  H[k, c] = (-1)^|k & c| in a block
    #
    # A program: BLOCK_TOKENS x TILE outputs, from all inputs of their rotation blocks. s[k] H[k, c]
    # is 1, -1 or 0, exact in every dtype, and made where it is used, by integer operations.
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.program_id(1) * TILE // BLOCK * BLOCK
    x_rows = x + token[:, None] * in_features
    token_here = token[:, None] < tokens
    total = tl.full([BLOCK_TOKENS, TILE], 0.0, tl.float32)
    for start in range(0, max(BLOCK, TILE), TILE):
        source = first + start + tl.arange(0, TILE)
        here = source < in_features
        part = tl.load(x_rows + source[None, :], mask=token_here & here[None, :], other=0.0)
        ones = (source % BLOCK)[:, None] & (column % BLOCK)[None, :]
        ones ^= ones >> 16
        ones ^= ones >> 8
        ones ^= ones >> 4
        ones ^= ones >> 2
        ones ^= ones >> 1
        if signs is not None:
            byte = tl.load(signs + (source >> 3), mask=here, other=0).to(tl.int32)
            ones ^= (byte >> (source & 7))[:, None]
        same_block = (source // BLOCK)[:, None] == (column // BLOCK)[None, :]
        hadamard = tl.where(same_block, 1.0 - 2.0 * (ones & 1), 0.0).to(part.dtype)
        total = tl.dot(part, hadamard, total, input_precision="ieee")
    plane = column % PLANES * (in_features // PLANES) + column // PLANES
    tl.store(
        out + token[:, None] * in_features + plane[None, :],
        (total * norm).to(out.dtype.element_ty),
        mask=token_here & (column < in_features)[None, :],
    )


@triton.jit
def _bits(
    codes: tl.tensor,
    row: tl.tensor,
    row_here: tl.tensor,
    row_bytes: tl.tensor,
    unit: tl.tensor,
    units: tl.tensor,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    # [rows, units] int32: BITS bits of each unit, which lie in BYTES bytes at most; others above.
    code_rows = codes + row[:, None] * row_bytes
    if BITS == 8:  # neighbours for the compiler too, which then reads several at once
        here = row_here[:, None] & (unit < units)[None, :]
        found = tl.load(code_rows + unit[None, :], mask=here, other=0).to(tl.int32)
    else:
        byte = unit * BITS >> 3
        found = tl.full([row.shape[0], unit.shape[0]], 0, tl.int32)
        for k in tl.static_range(BYTES):
            here = row_here[:, None] & ((unit < units) & (byte + k < row_bytes))[None, :]
            more = tl.load(code_rows + (byte + k)[None, :], mask=here, other=0)
            found |= more.to(tl.int32) << (8 * k)
        found = found >> (unit * BITS & 7)[None, :]
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
    row_bytes: tl.tensor,
    second_bytes: tl.tensor,
    group: tl.tensor,
    steps: tl.tensor,
    PLANES: tl.constexpr,
    VECTOR: tl.constexpr,
    BITS: tl.constexpr,
    SECOND_BITS: tl.constexpr,
    BYTES: tl.constexpr,
    TABLE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    # out[s, t, n] = the part s of the sum for y[t, n] (see the module)
    #
    # A program: BLOCK_TOKENS tokens x BLOCK_ROWS rows x `steps` times STEP weights of a row. Those
    # of the same rows follow each other, so that only the first reads its codes from DRAM. Bound,
    # for few tokens, by lookups, one for each code: in shared memory, where Triton writes a small
    # table anew for every step, else in L1, which is slower.
    UNITS: tl.constexpr = STEP // PLANES
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    row_here, token_here = row < rows, token < tokens
    units = in_features // PLANES
    x_rows = x + token[None, :] * in_features
    scale_rows = scale + row * (in_features // group)

    if TABLE:
        table = tl.load(codebook + tl.arange(0, 1 << (BITS + SECOND_BITS)))
    total = tl.full([BLOCK_ROWS, BLOCK_TOKENS], 0.0, tl.float32)
    last = (in_features + STEP - 1) // STEP
    for i in range(split * steps, min(split * steps + steps, last)):
        unit = i * UNITS + tl.arange(0, UNITS)
        first = _bits(codes, row, row_here, row_bytes, unit, units, PLANES // VECTOR * BITS, BYTES)
        if SECOND_BITS:
            lower = _bits(
                second, row, row_here, second_bytes, unit, units, PLANES * SECOND_BITS, BYTES
            )
        part = tl.full([BLOCK_ROWS, BLOCK_TOKENS], 0.0, tl.float32)
        for k in tl.static_range(PLANES):
            if k % VECTOR == 0:
                code = (first >> (k // VECTOR * BITS)) & ((1 << BITS) - 1)
                if SECOND_BITS:
                    code = code << SECOND_BITS | (
                        lower >> (k * SECOND_BITS) & ((1 << SECOND_BITS) - 1)
                    )
                if TABLE:
                    flat = tl.gather(table, tl.reshape(code, [BLOCK_ROWS * UNITS]), 0)
                    entry = tl.reshape(flat, [BLOCK_ROWS, UNITS])
                else:
                    entry = tl.load(codebook + code)  # any code is that of an entry
            weight = (entry >> (16 * (k % VECTOR))).to(tl.int16).to(tl.float16, bitcast=True)
            here = (unit < units)[:, None] & token_here[None, :]
            inputs = tl.load(x_rows + (k * units + unit)[:, None], mask=here, other=0.0)
            part = tl.dot(weight.to(inputs.dtype), inputs, part, input_precision="ieee")
        factor = tl.load(scale_rows + i * STEP // group, mask=row_here, other=0.0)
        total += part * factor.to(tl.float32)[:, None]

    if bias is not None:
        added = tl.load(bias + row, mask=row_here, other=0.0).to(tl.float32)
        total += tl.where(split == 0, added, 0.0)[:, None]
    first = out + split.to(tl.int64) * tokens * rows
    tl.store(
        first + token[None, :] * rows + row[:, None],
        total.to(out.dtype.element_ty),
        mask=row_here[:, None] & token_here[None, :],
    )


@triton.jit
def _add(
    out: tl.tensor, parts: tl.tensor, numel: tl.tensor, splits: tl.tensor, BLOCK: tl.constexpr
) -> None:
    # out[i] = sum_s parts[s, i], always in this order
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for s in range(splits):
        total += tl.load(parts + s * numel + at, mask=at < numel, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < numel)


def _configs() -> list[triton.Config]:
    """Tiles to choose from by measurement; the first fits the smallest GPU."""
    configs = [
        triton.Config({"BLOCK_ROWS": rows}, num_warps=warps, num_stages=stages)
        for rows, warps, stages in ((32, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 3))
    ]
    compiled = isinstance(_multiply, triton.JITFunction)
    return configs if compiled else configs[:1]  # nothing to measure under the interpreter


_KEY = ["rows", "in_features", "PLANES", "BITS", "SECOND_BITS", "BLOCK_TOKENS"]
_tuned = triton.autotune(_configs(), _KEY)(_multiply)
_tuning = threading.Lock()  # the tuner keeps the arguments of a call in itself


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

    The first call for a size measures tiles, which a CUDA graph cannot capture: call once before.

    Raises:
        VQFormatError: sizes do not belong together. A kernel would read what is not there.
    """
    in_features, rows = x.shape[-1], codes.shape[0]
    y = x.new_empty(*x.shape[:-1], rows)
    if not y.numel():
        return y
    second, codebook = codes_2, codebook if codebook_2 is None else codebook_2  # nested: of both
    _check(scheme, in_features, codes, codebook, scale, rotation, bias, second)
    p = planes(scheme, in_features)
    inputs = x.reshape(-1, in_features).contiguous()
    tokens = len(inputs)
    most = 128 if x.dtype.itemsize == 2 else 64
    block_tokens = min(max(dispatch.bucket(tokens), _SMALLEST_DOT), most)
    tiles = triton.cdiv(tokens, block_tokens), triton.cdiv(rows, _ROWS)
    steps = _steps(tiles[0] * tiles[1], triton.cdiv(in_features, step(scheme, in_features)))
    splits = triton.cdiv(in_features, step(scheme, in_features) * steps)
    with torch.accelerator.device_index(x.device.index):
        inputs = _rotated(inputs, rotation, scheme, p)
        out = y.view(1, tokens, rows)
        if splits > 1:
            out = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
        with _tuning:
            _tuned[lambda meta: (tiles[0], triton.cdiv(rows, meta["BLOCK_ROWS"]), splits)](
                out,
                inputs,
                codes.contiguous(),
                None if second is None else second.contiguous(),
                _integers(codebook, scheme),
                scale.contiguous(),
                None if bias is None else bias.contiguous(),
                tokens,
                rows,
                in_features,
                codes.shape[1],
                0 if second is None else second.shape[1],
                scheme.group(in_features),
                steps,
                PLANES=p,
                VECTOR=scheme.vector_size,
                BITS=scheme.entry_bits,
                SECOND_BITS=scheme.second_bits,
                BYTES=_code_bytes(scheme, p),
                TABLE=scheme.entry_bits + scheme.second_bits <= _LARGEST_TABLE,
                STEP=step(scheme, in_features),
                BLOCK_TOKENS=block_tokens,
            )
        if splits > 1:
            _add[(triton.cdiv(y.numel(), _ADDED),)](y, out, y.numel(), splits, BLOCK=_ADDED)
    return y


def _check(
    scheme: VQScheme,
    in_features: int,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    rotation: Tensor | None,
    bias: Tensor | None,
    second: Tensor | None,
) -> None:
    given = [codes, codebook, scale] + ([] if second is None else [second])
    shapes = tuple(tuple(tensor.shape) for tensor in given)
    expected = _shapes(scheme, len(codes), in_features)
    if shapes != expected:
        raise VQFormatError(
            f"{len(codes)} rows of {in_features} weights as {scheme.spec()} have codes, codebook "
            f"and scales {expected}; got {shapes}."
        )
    signs = scheme.rotation == "random_hadamard"
    if signs and (rotation is None or rotation.numel() != packed_size(in_features, 1)):
        raise VQFormatError(f"{scheme.spec()} needs a sign for each of {in_features} inputs.")
    if bias is not None and bias.shape != (len(codes),):
        raise VQFormatError(f"{len(codes)} rows need as many biases; got {tuple(bias.shape)}.")


@functools.lru_cache(maxsize=1024)
def _shapes(scheme: VQScheme, rows: int, in_features: int) -> tuple[tuple[int, ...], ...]:
    specs = tensor_specs(scheme, rows, in_features)
    nested = ("codes", "codebook_2", "scale", "codes_2")
    keys = nested if scheme.two_passes else ("codes", "codebook", "scale")
    return tuple(specs[key].shape for key in keys)


def _steps(tiles: int, steps: int) -> int:
    """How many of a row's steps one program does: fewer than all where tiles are too few."""
    splits = min(max(_PROGRAMS // tiles, 1), max(steps // _STEPS, 1))
    return -(-steps // splits)


def _code_bytes(scheme: VQScheme, p: int) -> int:
    """Bytes that codes of p weights may lie in, wherever they begin: from 1 for 1, 2, 4, 8 bits to
    3."""
    each = (p // scheme.vector_size * scheme.entry_bits, p * scheme.second_bits)
    return max(-(-(8 - math.gcd(bits, 8) + bits) // 8) for bits in each)


def _integers(codebook: Tensor, scheme: VQScheme) -> Tensor:
    """The entries as one integer each."""
    codebook = codebook.to(torch.float16).contiguous()
    if codebook.data_ptr() % 8:
        codebook = codebook.clone()
    return codebook.view(_ENTRIES[scheme.vector_size])


def _rotated(x: Tensor, rotation: Tensor | None, scheme: VQScheme, p: int) -> Tensor:
    """x [tokens, in_features], rotated, in planes [tokens, p, in_features / p]."""
    tokens, in_features = x.shape
    block = scheme.block(in_features)
    tile = min(max(block, _SMALLEST_DOT), _WIDEST_ROTATION)
    out = torch.empty_like(x)
    _rotate[(triton.cdiv(tokens, _SMALLEST_DOT), triton.cdiv(in_features, tile))](
        out,
        x,
        rotation.contiguous() if rotation is not None else None,
        tokens,
        in_features,
        block**-0.5,
        PLANES=p,
        BLOCK=block,
        TILE=tile,
        BLOCK_TOKENS=_SMALLEST_DOT,
    )
    return out
