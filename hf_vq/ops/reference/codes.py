"""The specification of every op, in float32, as the papers write it. Fast kernels are compared
with these functions and never with each other.

`[...]` is any leading shape; a row is the last dimension: in_features weights, or the head_dim
numbers of one token and head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...formats import lattice
from ...formats.nearest import nearest_entries, nearest_in_groups
from ...formats.packing import pack_bits, unpack_bits
from ...formats.scheme import VQScheme
from ...formats.stored_weight import Pass, StoredWeight
from ...transforms import rotate as rotate_rows
from .. import projection
from ..kv import KVCacheView, KVSide, append_index
from ..layout import write_rows

LARGEST_ZERO = 1024  # of a row of integers
LARGEST_SCALE = 65504.0  # of fp16
LARGEST_IN_MEAN = 2.0**100  # so that no difference of a float32 and a mean is infinite
HUGE = 2.0**57  # squares of smaller numbers have finite sums,
SHRINK = 2.0**-72  # and those of any number, times this
APPEND_TOKENS = 4096  # tokens encoded at a time: bounds the float32 copies of a long prompt


def rotate(x: Tensor, rotation: Tensor | None, scheme: VQScheme, inverse: bool) -> Tensor:
    """(x * signs) H per block of the row, or its inverse: [..., n] of the dtype of `x`."""
    return rotate_rows(x, scheme, rotation, inverse=inverse)


def lookup(codes: Tensor, codebook: Tensor, scheme: VQScheme) -> Tensor:
    """Entries [..., vectors, x] float32 of one stage's codes [..., vectors].

    Args:
        codebook: [entries, x]; E8P [257, 8]; tile scope [row tiles, column tiles, entries, x];
            channel group scope [heads, vectors, entries, x], codes [..., heads, tokens, vectors].
    """
    if scheme.lattice:
        return lattice.e8p_decode(codes, codebook)
    if scheme.codebook == "tile":
        rows = torch.arange(codes.shape[-2], device=codes.device) // scheme.tile[0]
        columns = torch.arange(codes.shape[-1], device=codes.device)
        columns = columns // (scheme.tile[1] // scheme.vector_size)
        tile = rows[:, None] * codebook.shape[1] + columns
        codes = codes + tile * codebook.shape[2]
    elif scheme.codebook == "channel_group":
        heads, groups, count = codebook.shape[:3]
        group = torch.arange(heads * groups, device=codes.device).reshape(heads, 1, groups)
        codes = codes + group * count
    entries = codebook.reshape(-1, scheme.vector_size).float()
    return entries.index_select(0, codes.reshape(-1)).reshape(*codes.shape, scheme.vector_size)


def decode_rotated(
    codes: Tensor, codebook: Tensor, scale: Tensor, scheme: VQScheme, length: int
) -> Tensor:
    """sum_z codebook[z][code[z]] * scale, not yet rotated back: [..., length] float32.

    Args:
        codes: uint8 [..., streams * bytes].
        scale: fp16 [..., groups]; [..., 0] and not used for a scheme without scales; [..., 2] scale
            and zero for integers.
    """
    if scheme.mode == "product":
        return _decode_product(codes, codebook, scale, scheme, length)
    vectors = length // scheme.vector_size
    streams = codes.unflatten(-1, (scheme.streams, -1)).unbind(-2)
    whole = scheme.codebook in ("tile", "channel_group")
    books = [codebook] if whole else list(codebook.unbind(0))
    rows = sum(
        lookup(unpack_bits(stream, scheme.entry_bits, vectors), book, scheme)
        for stream, book in zip(streams, books, strict=True)
    )
    assert isinstance(rows, Tensor)
    rows = rows.flatten(-2)
    if not scheme.has_scale:
        return rows
    if scheme.has_zero:
        step, zero = scale.float().split(1, -1)
        return (rows - zero) * step
    grouped = rows.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.float()[..., None]).flatten(-2)


def _decode_product(
    codes: Tensor, codebook: Tensor, scale: Tensor, scheme: VQScheme, length: int
) -> Tensor:
    index = unpack_bits(codes, scheme.entry_bits, length)
    rows = lookup(index >> 1, codebook[0], scheme).flatten(-2) * scale[..., :1].float()
    return rows + projection.from_signs(index & 1) * scale[..., 1:].float()


def decode_rows(
    codes: Tensor, codebook: Tensor, scale: Tensor, scheme: VQScheme, length: int
) -> Tensor:
    """`decode` of rows of one pass whose rotation has no tensors, as keys and values are."""
    return decode(StoredWeight(Pass(codes, codebook, scale, None), None, scheme, length))


def decode_nested(
    codes: Tensor, codes_2: Tensor, codebook_2: Tensor, scale: Tensor, scheme: VQScheme, length: int
) -> Tensor:
    """codebook_2[first code, second code] * scale, not yet rotated back: [..., length] float32."""
    first = unpack_bits(codes, scheme.entry_bits, length)
    pair = (first << scheme.second_bits) | unpack_bits(codes_2, scheme.second_bits, length)
    rows = codebook_2[0].float()[:, 0][pair].unflatten(-1, (scale.shape[-1], -1))
    return (rows * scale.float()[..., None]).flatten(-2)


def decode(weight: StoredWeight) -> Tensor:
    """The stored rows, rotated back: R^-1(pass 1) + R_2^-1(pass 2), [..., length] float32; shared
    and nested stages have one rotation."""
    scheme, second = weight.scheme, weight.residual
    rows, rows_2 = _rotated_passes(weight)
    rows = rotate_rows(rows, scheme, weight.first.rotation, inverse=True)
    if rows_2 is None or second is None:
        return rows
    return rows + rotate_rows(rows_2, scheme, second.rotation, inverse=True)


def _rotated_passes(weight: StoredWeight) -> tuple[Tensor, Tensor | None]:
    """The rows of all passes that have the first one's rotation, and those of a rerotated one."""
    (codes, codebook, scale, _), second, scheme, length = weight
    if second is None:
        return decode_rotated(codes, codebook, scale, scheme, length), None
    if scheme.stages == "nested":
        return decode_nested(codes, second.codes, second.codebook, scale, scheme, length), None
    assert second.scale is not None
    rows = decode_rotated(codes, codebook, scale, scheme, length)
    left = decode_rotated(second.codes, second.codebook, second.scale, scheme.second_pass(), length)
    return (rows + left, None) if scheme.stages == "shared" else (rows, left)


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """y = W x + b, [..., in] -> [..., out]; the input is rotated, not the weight (TurboQuant)."""
    scheme, second = weight.scheme, weight.residual
    rows, rows_2 = _rotated_passes(weight)
    y = rotate_rows(x.float(), scheme, weight.first.rotation) @ rows.T
    if rows_2 is not None and second is not None:
        y += rotate_rows(x.float(), scheme, second.rotation) @ rows_2.T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def encode(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: VQScheme
) -> tuple[Tensor, Tensor]:
    """Codes of rows that arrive one by one (keys and values): no search, one scale.

    With u = R(x) and q the entries nearest to u / rms(u), the stored scale is s = |u|^2 / <u, q>,
    so that <s q, u> = |u|^2: logits are not shrunk (EDEN; measured in docs/kv_cache.md). Other
    modes are for comparison (`VQScheme.mode`). A scale beyond fp16 saturates at 65504: the row
    keeps its direction. A row that is not finite gets a scale that is NaN, and decodes to NaN.
    Codebooks per channel group have no scale (`encode_in_groups`), integers a zero as well
    (`encode_integers`).

    Returns:
        codes uint8 [..., bytes], scale fp16 [..., 1], or [..., 0] without scales, or [..., 2]: also
        a zero, or of mode `product` the norm of what the signs stand for.
    """
    if scheme.has_zero:
        return encode_integers(x, rotation, scheme)
    if not scheme.has_scale:
        codes = encode_in_groups(x, codebook, rotation, scheme)
        return codes, x.new_empty(*x.shape[:-1], 0, dtype=torch.float16)
    x, unit_of = in_range(x.float())
    rows = rotate_rows(x, scheme, rotation)
    energy = rows.square().sum(-1, keepdim=True)
    size = (energy / x.shape[-1]).sqrt()
    unit = rows / size.clamp_min(1e-30)
    vectors = unit.reshape(-1, scheme.vector_size)
    index = nearest_entries(codebook)[0].index(vectors)
    chosen = codebook[0].float()[index].reshape(unit.shape)
    if scheme.mode == "unbiased":
        scale = torch.where(energy == 0, 0, energy / (rows * chosen).sum(-1, keepdim=True))
    elif scheme.mode == "norm_corrected":
        scale = (energy / chosen.square().sum(-1, keepdim=True)).sqrt()
    else:
        scale = size
    codes = index.reshape(*x.shape[:-1], x.shape[-1] // scheme.vector_size)
    scale = _saturated(scale / unit_of, energy)
    if scheme.mode == "product":
        left = rows - scale.float() * unit_of * chosen
        codes = codes << 1 | projection.signs(left)
        norm = _saturated(left.norm(dim=-1, keepdim=True) / unit_of, energy)
        scale = torch.cat([scale, norm], -1)
    return pack_bits(codes, scheme.entry_bits, check=False), scale


def in_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 rows whose squares have finite sums, and what 1 is in them, [..., 1]: rows of huge
    numbers are made smaller by a power of two, which changes no code."""
    unit = torch.where(x.abs().amax(-1, keepdim=True) >= HUGE, SHRINK, 1.0)
    return x * unit, unit


def _saturated(scale: Tensor, energy: Tensor) -> Tensor:
    """Scales as stored; NaN of rows that are not finite."""
    return torch.where(energy.isfinite(), scale.clamp(max=LARGEST_SCALE), torch.nan).half()


def encode_integers(x: Tensor, rotation: Tensor | None, scheme: VQScheme) -> tuple[Tensor, Tensor]:
    """c = round(x / s + z), s = (max - min) / (2^y - 1) and z = -min / s in fp16, for each row: KV4
    of QServe (arXiv 2405.04532).

    A row far from zero would have a zero that float16 cannot tell from its neighbours, so that s is
    at least max |x| / 1024: z is right to a quarter of a step. A step beyond fp16 saturates, and
    then the integers have the middle of the row in theirs, as far as 15 steps from zero.

    Returns:
        codes uint8 [..., bytes], s and z fp16 [..., 2].
    """
    x, unit = in_range(x.float())
    rows, top = rotate_rows(x, scheme, rotation), scheme.entries - 1
    low, high = rows.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(low.abs(), high.abs())
    step = torch.maximum((high - low) / top, largest / LARGEST_ZERO)
    step = (step / unit).half().float()
    beyond = (step > LARGEST_SCALE) & largest.isfinite()
    step = torch.where(beyond, LARGEST_SCALE, step)
    held = step * unit  # a step, in the numbers of `rows`
    reach = top * held
    middle = low.clamp(-reach, reach) + high.clamp(-reach, reach)  # twice
    zero = torch.where(beyond, top / 2 - middle / (2 * held), -low / held)
    zero = torch.where(step == 0, 0, zero).half().float()
    codes = torch.where(step == 0, 0, rows / held + zero).round().nan_to_num(0).clamp(0, top)
    packed = pack_bits(codes.to(torch.uint8), scheme.entry_bits, check=False)
    return packed, torch.cat([step, zero], -1).half()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a dtype. What codes of the largest float16 numbers stand for may lie a little beyond
    them: finite numbers stay finite."""
    if dtype == torch.float16:
        x = torch.where(x.isfinite(), x.clamp(-LARGEST_SCALE, LARGEST_SCALE), x)
    return x.to(dtype)


def mean_of(keys: Tensor) -> Tensor:
    """The mean of keys [B, H, n, D] over their tokens: [B, H, 1, D] float32.

    What is not finite, or beyond 2^100, counts as 0: a row of its own, not the whole head, is lost.
    """
    keys = keys.float()
    return torch.where(keys.abs() <= LARGEST_IN_MEAN, keys, 0).mean(2, keepdim=True)


def encode_in_groups(
    x: Tensor, codebook: Tensor, rotation: Tensor | None, scheme: VQScheme
) -> Tensor:
    """c_s = argmin_c |pi_s(x) - b_s,c|, each sub-vector under the codebook of its head and channels
    (NoMAD-Attention, section 3.1; VQ-LLM's CQ). A row that is not finite gets codes all the same.

    Args:
        x: [..., heads, tokens, head_dim].
        codebook: [heads, vectors, entries, x].

    Returns:
        codes uint8 [..., heads, tokens, bytes].
    """
    rows = rotate_rows(x.float(), scheme, rotation)
    heads, groups, entries, size = codebook.shape
    batch, tokens = math.prod(x.shape[:-3]), x.shape[-2]
    vectors = rows.reshape(batch, heads, tokens, groups, size).permute(1, 3, 0, 2, 4)
    vectors = vectors.reshape(heads * groups, batch * tokens, size)
    index = nearest_in_groups(vectors, codebook.float().reshape(-1, entries, size))
    codes = index.reshape(heads, groups, batch, tokens).permute(2, 0, 3, 1)
    codes = codes.reshape(*x.shape[:-1], groups).contiguous()
    return pack_bits(codes, scheme.entry_bits, check=False)


def kv_append(
    key: Tensor | None, value: Tensor | None, view: KVCacheView, slot_mapping: Tensor | None
) -> None:
    """Encode the tokens of a growing or paged cache; shapes and meaning in `ops.kv_ops`."""
    for x, side in ((key, view.key), (value, view.value)):
        if x is None:
            continue
        assert view.key_rotary_mean is None or x is not key, "`ops.kv_ops` subtracts it"
        if slot_mapping is None:
            _append(x, side, append_index(view, side, x.shape[2]))
        else:
            _append_paged(x, side, slot_mapping)


def _append(x: Tensor, side: KVSide, at: int) -> None:
    scheme = side.parsed
    for part in x.split(APPEND_TOKENS, 2):
        rows = part.float() if side.mean is None else part.float() - side.mean
        rows = rows if side.smoothing is None else rows * side.smoothing
        packed, scales = encode(rows, side.codebook, None, scheme)
        write_rows(side.codes, at, packed, scheme.entry_bits, side.layout)
        side.scale[:, :, at : at + part.shape[2]] = scales
        at += part.shape[2]


def _append_paged(x: Tensor, side: KVSide, slots: Tensor) -> None:
    rows = x.float() if side.mean is None else x.float() - side.mean
    rows = rows if side.smoothing is None else rows * side.smoothing
    packed, scales = encode(rows, side.codebook, None, side.parsed)
    kept = slots >= 0
    page, place = slots[kept] // side.codes.shape[2], slots[kept] % side.codes.shape[2]
    side.codes[page, :, place] = packed[0].transpose(0, 1)[kept]
    side.scale[page, :, place] = scales[0].transpose(0, 1)[kept]
