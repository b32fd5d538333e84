"""Learned codebooks as tables, in the order in which attention.cu copies them to shared memory.

A row of a table has one index of every group of channels, in panels of 128 bytes. Lanes that want
the same group at the same time take their groups in turn (attention_swizzle.cuh), and
groups that are looked up together lie in different banks: side by side.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ....codegen.attention_plan import panels, parts
from ....codegen.families.table_layout import BANKS, fused
from ....formats.scheme import VQScheme

KEYS, VALUES = 4, 8  # lanes that share a token

# By the identity of the codebook, as long as it lives.
_tables: dict[tuple[int, int], tuple[weakref.ref[Tensor], Tensor]] = {}


def tables(codebook: Tensor, scheme: VQScheme, sharers: int) -> Tensor:
    """A layer's learned codebooks as tables, made once for as long as they live.

    Args:
        codebook: fp16 [H, D / x, entries, x], which nobody writes.
        scheme: whose codebooks they are.
        sharers: KEYS or VALUES.

    Returns:
        fp16 [H, panels, entries of a table, 64].
    """
    key = (id(codebook), sharers)
    known = _tables.get(key)
    if known is not None and known[0]() is codebook:
        return known[1]
    made = arranged(codebook, scheme, sharers)
    if not torch.cuda.is_current_stream_capturing():  # else it is the graph's, and made every time
        _tables[key] = weakref.ref(codebook, lambda _: _tables.pop(key, None)), made
    return made


def arranged(codebook: Tensor, scheme: VQScheme, sharers: int) -> Tensor:
    """What `tables` returns, made now."""
    heads, groups, stored, x = codebook.shape
    if fused(scheme) == 2:  # index = first code + stored * second code
        first = codebook[:, 0::2, None].expand(-1, -1, stored, -1, -1)
        second = codebook[:, 1::2, :, None].expand(-1, -1, -1, stored, -1)
        codebook = torch.cat([first, second], -1).flatten(2, 3)
    dim, (_, _, entries, width) = groups * x, codebook.shape
    found = []
    for part in codebook.split([size // width for size in parts(dim)], 1):
        indexes = max(part.shape[1] // sharers, 1)  # of a lane, which takes `turns` of them in turn
        turns = min(4 if sharers == VALUES else 16 // width, indexes)
        owners = part.shape[1] // indexes
        part = part.reshape(heads, owners, -1, turns, entries, width).transpose(1, 2)
        found.append(part.flatten(1, 3))
    positions = BANKS // 2 // width  # of a panel
    missing = panels(dim) * positions - dim // width
    found.append(codebook.new_zeros(heads, missing, entries, width))
    rows = torch.cat(found, 1).reshape(heads, panels(dim), positions, entries, width)
    return rows.transpose(2, 3).reshape(heads, panels(dim), entries, BANKS // 2)
