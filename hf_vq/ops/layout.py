"""The order of a KV cache's codes in memory: canonical rows, or blocks that one kernel reads.

Codes on a tape [batch, heads, ...] of tokens; S sub-quantizers per token of 4, 6 or 8 bits.

rows     uint8 [B, H, tokens, bytes]: one token after the other, packed as in formats/packing.py.
         Files hold nothing else.
blocks   uint8 [B, H, blocks, S * 32 * bits]: 256 tokens after the other. A block is S packets of
         256 codes, one sequential stream for a kernel that looks up 64 codes at a time.

planes   packet s is sub-quantizer s of all tokens:           code i   token i
quads    4 strips of 64 tokens; packet u * S/4 + r is 4 sub-quantizers of strip u (S % 4 == 0):
             code i   token 64 u + 16 (i / 64) + (i % 64) / 4,  sub-quantizer 4 r + i % 4

             64 codes of a quad     t0 s0 s1 s2 s3  t1 s0 s1 s2 s3  ...  t15 s0 s1 s2 s3

The 256 codes c of a packet lie in 32 * bits bytes:

    8 bits   byte j = c[j]
    4 bits   byte j = c[j] | c[64 + j] << 4;  byte 64 + j = c[128 + j] | c[192 + j] << 4    j < 64
    6 bits   the low 4 bits of all codes like 4 bits, then 64 bytes of their high ones:
             byte j = c[j] >> 4 | c[64 + j] >> 4 << 2 | c[128 + j] >> 4 << 4 | c[192 + j] >> 4 << 6

A tape is longer than its tokens: what lies behind the last one means nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQBackendError
from ..formats.packing import pack_bits, unpack_bits
from ..formats.scheme import VQScheme
from .library import attention_problem

BLOCK = 256  # tokens of a block; codes of a packet
ROWS, QUADS, PLANES = "rows", "quads", "planes"
BLOCK_BITS = (4, 6, 8)  # code widths that have blocks


def layouts_for(
    keys: VQScheme, values: VQScheme, head_dim: int, value_dim: int, like: Tensor
) -> tuple[str, str]:
    """The layouts of keys and of values that the kernel wants which will run attention over them:
    `rows` where no kernel computes on codes.

    Args:
        keys: scheme of the keys, rows of `head_dim` numbers.
        values: scheme of the values, rows of `value_dim` numbers.
        like: decides device and dtype of the queries.
    """
    problem = attention_problem(
        like.device, like.dtype, keys.spec(), values.spec(), head_dim, value_dim
    )
    layouts = dispatch.select(problem).implementation.layouts(problem)
    for layout, scheme, dim in zip(layouts, (keys, values), (head_dim, value_dim), strict=True):
        check(layout, scheme.entry_bits, dim // scheme.vector_size)
    return layouts


def check(layout: str, bits: int, vectors: int) -> None:
    """Raise VQBackendError if `vectors` codes of `bits` bits per token do not fit a layout."""
    fits = layout == ROWS or (
        bits in BLOCK_BITS and (layout == PLANES or (layout == QUADS and vectors % 4 == 0))
    )
    if not fits:
        raise VQBackendError(
            f"{vectors} codes of {bits} bits per token have no layout {layout!r}; {ROWS} holds any,"
            f" {PLANES} codes of 4, 6 or 8 bits, {QUADS} such codes if their number divides by 4."
        )


def block_bytes(vectors: int, bits: int) -> int:
    """Bytes of a block of 256 tokens with `vectors` codes of `bits` bits each."""
    return vectors * 32 * bits


def allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Memory for blocks: zeros uint8 [shape]."""
    allocator = dispatch.ALLOCATORS.get(device.type)
    if allocator is None:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    blocks: Tensor = dispatch.load(allocator)(shape)
    return blocks


def to_rows(data: Tensor, first: int, count: int, bits: int, layout: str) -> Tensor:
    """Canonical rows uint8 [B, H, count, bytes] of the tokens from `first` on; `rows`: a view.

    Args:
        data: a tape's codes in `layout`, [B, H, tokens, bytes] or [B, H, blocks, bytes].
        first: index on the tape; any.
        bits: of a code.
    """
    if layout == ROWS:
        return data[:, :, first : first + count]
    begin = first // BLOCK
    codes = _codes(data[:, :, begin : _ceil(first + count)], bits, layout)
    first -= begin * BLOCK
    return pack_bits(codes[:, :, first : first + count], bits, check=False)


def write_rows(data: Tensor, at: int, rows: Tensor, bits: int, layout: str) -> None:
    """Write canonical rows [B, H, n, bytes] to the tape `data`, to tokens `at`, `at` + 1, ...

    Other tokens keep their codes. Arguments as in `to_rows`.
    """
    end = at + rows.shape[2]
    if layout == ROWS:
        data[:, :, at:end] = rows
        return
    begin = at // BLOCK
    blocks = data[:, :, begin : _ceil(end)]
    codes = _codes(blocks, bits, layout).clone()  # of one block it may be a view
    vectors, skip = codes.shape[3], begin * BLOCK
    codes[:, :, at - skip : end - skip] = unpack_bits(rows, bits, vectors)
    blocks.copy_(_blocks(codes, bits, layout))


def _ceil(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _codes(blocks: Tensor, bits: int, layout: str) -> Tensor:
    """Codes uint8 [B, H, n * 256, S] of blocks [B, H, n, S * 32 * bits]."""
    batch, heads, count, size = blocks.shape
    vectors = size // (32 * bits)
    check(layout, bits, vectors)
    codes = _unpacked(blocks.reshape(batch, heads, count, vectors, 32 * bits), bits)
    if layout == PLANES:
        codes = codes.transpose(3, 4)
    else:  # strip, quad, 16 tokens, token, sub-quantizer of the quad
        codes = codes.reshape(batch, heads, count, 4, vectors // 4, 4, 16, 4)
        codes = codes.permute(0, 1, 2, 3, 5, 6, 4, 7)
    return codes.reshape(batch, heads, count * BLOCK, vectors)


def _blocks(codes: Tensor, bits: int, layout: str) -> Tensor:
    """The inverse of `_codes`."""
    batch, heads, tokens, vectors = codes.shape
    count = tokens // BLOCK
    if layout == PLANES:
        codes = codes.reshape(batch, heads, count, BLOCK, vectors).transpose(3, 4)
    else:
        codes = codes.reshape(batch, heads, count, 4, 4, 16, vectors // 4, 4)
        codes = codes.permute(0, 1, 2, 3, 6, 4, 5, 7)
    packets = _packed(codes.reshape(batch, heads, count, vectors, BLOCK), bits)
    return packets.reshape(batch, heads, count, block_bytes(vectors, bits))


def _unpacked(packets: Tensor, bits: int) -> Tensor:
    """Codes [..., 256] of packets [..., 32 * bits]."""
    if bits == 8:
        return packets
    halves = packets[..., :128].unflatten(-1, (2, 1, 64))
    codes = torch.cat([halves & 15, halves >> 4], -2).flatten(-3)
    if bits == 4:
        return codes
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=packets.device)[:, None]
    high = (packets[..., None, 128:] >> shift) & 3
    return codes | high.flatten(-2) << 4


def _packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `_unpacked`."""
    if bits == 8:
        return codes
    quarters = codes.unflatten(-1, (4, 64))
    low = (quarters[..., ::2, :] & 15 | quarters[..., 1::2, :] << 4).flatten(-2)
    if bits == 4:
        return low
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)[:, None]
    high = (quarters >> 4 << shift).sum(-2, dtype=torch.uint8)
    return torch.cat([low, high], -1)
