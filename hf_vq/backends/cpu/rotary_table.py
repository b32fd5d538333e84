"""Cosines and sines of rotary frequencies, as kernels of the CPU read them (`hf_vq_rotary_table` of
`kernels/cpu/api.h`)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...ops.kv import KVCacheView
from . import library as native


def table_of(view: KVCacheView) -> Tensor:
    """The table of a view's frequencies: all heads and layers with the same ones share it."""
    inv_freq = view.rotary_inv_freq
    assert inv_freq is not None
    return _table(inv_freq.float().numpy().tobytes(), view.rotary_interleaved)


@lru_cache(maxsize=16)  # by what the frequencies are: a model has one or two, of .2 MB each
def _table(inv_freq: bytes, interleaved: bool) -> Tensor:
    library, pairs = native.load(), len(inv_freq) // 4
    assert library is not None
    table = torch.empty(library.hf_vq_rotary_table_size(pairs), device="cpu")
    library.hf_vq_rotary_table(inv_freq, pairs, int(interleaved), table.data_ptr())
    return table


class OfLayer:
    """The table of the layer that a kernel is bound to. Frequencies are not written to: others are
    another tensor, of which the table is looked up once."""

    def __init__(self) -> None:
        self._inv_freq: Tensor | None = None
        self._table: Tensor | None = None

    def of(self, view: KVCacheView) -> Tensor | None:
        """The table of a view's frequencies."""
        if view.rotary_inv_freq is not self._inv_freq:
            self._table = table_of(view)
            self._inv_freq = view.rotary_inv_freq
        return self._table
