"""The next token of a layer, written by a decoding step that is not PyTorch's (`hf.step`).

refusal         why a layer takes no token this way
take            where its next token goes: tensors and counts, for the library; and
Places          whether they still hold for the one after, and what `update` counts and looks at
WindowPlaces    the same of a sliding-window layer of floats, which Transformers made
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..formats.catalog import kv_allocation
from ..ops import KVCacheView, KVSide
from .kv_side import LOOKED_AT, SideBuffers
from .layer import LayerOptions, VQCacheLayer
from .prompt import Prompt

_MORE = 64  # tokens that memory of floats has room for, at least
_ALL = 1 << 40  # floats that a query of a window reads: no token becomes a code


class Slot(NamedTuple):
    """Where the next token of a layer goes.

    Args:
        view: of the layer; `recent` are the whole memories of the tails, [1, H, room, D].
        length: tokens before.
        coded: position after the last coded one.
        begin: index of the first float in the tails.
        end: index after the last one.
        key_end: index after the last code of the keys; likewise `value_end`.
        window: floats that a query reads.
        keep: floats that a tail holds.
    """

    view: KVCacheView
    length: int
    coded: int
    begin: int
    end: int
    key_end: int
    value_end: int
    window: int
    keep: int


def refusal(layer: object) -> str | None:
    """Why a layer takes no token this way now, or None."""
    if type(layer) is DynamicSlidingWindowLayer:
        return _refusal_of_window(layer)
    if type(layer) is not VQCacheLayer:
        return f"a layer of the cache is a {type(layer).__name__}"
    if not layer.is_initialized:
        return "the cache is empty"
    if layer._start is not None:
        return "rows of the cache are padded"
    if layer.k.sinks.shape[0] != 1:
        return "the cache holds several rows"
    if layer.device.type != "cpu":
        return f"the cache is on {layer.device}"
    if not (layer.k.has_scale and layer.v.has_scale):
        return "codes without scales are looked at one by one"
    return None


def _refusal_of_window(layer: DynamicSlidingWindowLayer) -> str | None:
    if not layer.is_initialized or layer.cumulative_length == 0:
        return "the cache is empty"
    if layer.keys.shape[0] != 1:
        return "the cache holds several rows"
    if layer.keys.device.type != "cpu":
        return f"the cache is on {layer.keys.device}"
    held = min(layer.cumulative_length, layer.sliding_window - 1)
    if layer.record_past or layer.keys.shape[2] != held or layer.values.shape[2] != held:
        return "a layer keeps tokens beyond its window"
    return None


def take(layer: Any) -> tuple[Slot, Places | WindowPlaces] | None:
    """Where the next token of a layer that is not refused goes, and what counts it; None if
    `update` has to take that one."""
    if type(layer) is DynamicSlidingWindowLayer:
        if _refusal_of_window(layer):
            return None
        window = WindowPlaces(layer)
        return window.slot(), window
    return (_slot(layer), Places(layer)) if _ready(layer) else None


def _ready(layer: VQCacheLayer) -> bool:
    """Make room for a token; False if `update` has to take it (the first ones of a prompt, one that
    decides means, one beyond `max_cache_len`, and while floats are kept for a crop)."""
    limit = layer.options.max_cache_len
    leaving = layer.length + 1 - layer.window - layer.coded
    if (
        layer.record_past
        or layer.length < max(layer._sinks_end, 1)
        or leaving > 1
        or (leaving > 0 and False in layer._frozen)
        or (limit is not None and layer.length >= limit)
        or len(layer.k.tail) != len(layer.v.tail)
        or len(layer.k.tail) < min(layer.window, layer.length)
    ):
        return False
    for side in (layer.k, layer.v):
        tail, codes = side.tail, side.codes
        if tail.end + 1 > tail.data.shape[2] or tail.data.is_inference():
            tail._move(len(tail) + _MORE)  # binding a layer again takes as long as a product
        if leaving > 0 and (codes.end + 1 > codes.scale.shape[2] or codes.data.is_inference()):
            codes.reserve(1)
    return layer.k.tail.begin == layer.v.tail.begin


def _slot(layer: VQCacheLayer) -> Slot:
    """Where the next token of a layer that is ready goes."""
    k, v, rotary = layer.k, layer.v, layer._rotary
    turning: tuple[Any, ...] = ()
    if k.rotary_mean is not None and rotary is not None:
        turning = k.rotary_mean, rotary.inv_freq, rotary.interleaved, 0
    view = KVCacheView(
        _side(k, k.codes.end - layer.coded), _side(v, v.codes.end - layer.coded),
        None, None, None, None, layer.length + 1, layer.window, 1, layer.coded, *turning,
    )  # fmt: skip
    return Slot(
        view, layer.length, layer.coded, k.tail.begin, k.tail.end, k.codes.end, v.codes.end,
        layer.window, layer.tail_length,
    )  # fmt: skip


def _side(side: SideBuffers, first: int) -> KVSide:
    """Keys or values whose first code has this index on the tape, and the whole tail."""
    codes = side.codes
    return KVSide(
        codes.data, codes.scale, side.codebook, side.mean, side.sinks, side.tail.data, first,
        side.spec, codes.layout, side.smoothing,
    )  # fmt: skip


class Places:
    """Where a layer writes, as long as nobody but `advance` touches it."""

    def __init__(self, layer: VQCacheLayer) -> None:
        k, v = layer.k, layer.v
        self.layer = layer
        self.parts = k.tail, v.tail, k.codes, v.codes
        self.memories = k.tail.data, v.tail.data, k.codes.data, v.codes.data
        self.fixed = k.mean, k.smoothing, k.sinks
        self.code_room = k.codes.scale.shape[2]
        # First length at which `update` or another memory takes the token.
        self.end = layer.length + self.memories[0].shape[2] - k.tail.end
        if False in layer._frozen:  # the first token that becomes a code decides the means
            self.end = min(self.end, layer.window + layer.coded)
        if layer.options.max_cache_len is not None:
            self.end = min(self.end, layer.options.max_cache_len)
        self.length, self.counts = layer.length, self._counted()

    def _counted(self) -> tuple[int, ...]:
        """Where the floats and codes of the layer begin and end."""
        k_tail, v_tail, k_codes, v_codes = self.parts
        return (
            k_tail.begin, k_tail.end, v_tail.begin, v_tail.end,
            k_codes.begin, k_codes.end, v_codes.begin, v_codes.end,
        )  # fmt: skip

    def hold(self) -> bool:
        """Whether the next token may go there, as the last one did."""
        layer, k, v = self.layer, self.layer.k, self.layer.v
        k_tail, v_tail, k_codes, v_codes = self.parts
        k_floats, v_floats, k_bytes, v_bytes = self.memories
        mean, smoothing, sinks = self.fixed
        return (
            layer.length == self.length < self.end and self._counted() == self.counts
            and k_codes.end < self.code_room
            and k.tail is k_tail and v.tail is v_tail and k.codes is k_codes and v.codes is v_codes
            and k_tail.data is k_floats and v_tail.data is v_floats
            and k_codes.data is k_bytes and v_codes.data is v_bytes
            and k.mean is mean and k.smoothing is smoothing and k.sinks is sinks
            and not layer.record_past
        )  # fmt: skip

    def advance(self) -> bool:
        """Count a token that was written; False: the library counts what leaves the window."""
        layer = self.layer
        k_tail, v_tail, k_codes, v_codes = self.parts
        layer.length = self.length = length = self.length + 1
        k_tail.end += 1
        v_tail.end += 1
        if length - layer.window > layer.first_code + k_codes.end - k_codes.begin:
            k_codes.end += 1
            v_codes.end += 1
            _look_at_newest(layer)
        gone = k_tail.end - k_tail.begin - layer.tail_length
        if gone > 0:
            k_tail.begin += gone
            v_tail.begin += gone
        self.counts = self._counted()
        return False


def _look_at_newest(layer: VQCacheLayer) -> None:
    """Warn of the token that left the window last, if it has no right code."""
    end = layer.length - layer.window
    if end % LOOKED_AT == 0:
        at = layer.k.tail.end - layer.window - 1
        keys, values = (side.tail.data.narrow(2, at, 1) for side in (layer.k, layer.v))
        layer._look_at(keys, values, end)


class WindowPlaces:
    """Where a sliding-window layer writes, as long as nobody but `advance` touches it.

        keys, values    [begin ..  end | room)    a window of a memory, which moves along it

    Transformers makes new tensors of the whole window at every token. Here the token is written
    behind the others, and the layer's tensors become views that begin one token later.
    """

    def __init__(self, layer: DynamicSlidingWindowLayer) -> None:
        self.layer, self.length = layer, layer.cumulative_length
        self.last = layer.sliding_window - 1  # tokens that the next query sees
        self.begin, self.end = 0, layer.keys.shape[2]
        self.room = self.end + max(_MORE, self.end // 4)
        self.memory = _with_room(layer.keys, self.room), _with_room(layer.values, self.room)
        self._show()

    def _show(self) -> None:
        held = self.end - self.begin
        self.keys, self.values = (each.narrow(2, self.begin, held) for each in self.memory)
        self.layer.keys, self.layer.values = self.keys, self.values

    def slot(self) -> Slot:
        """Where the next token goes; positions count from the first one that is held."""
        held = self.end - self.begin
        empty = VQCacheLayer(LayerOptions(kv_allocation("u4"), 0, 0), Prompt(), 0)
        empty.lazy_initialization(self.keys, self.values)
        key, value = (
            _side(side, 0)._replace(recent=memory)
            for side, memory in zip((empty.k, empty.v), self.memory, strict=True)
        )
        view = KVCacheView(key, value, None, None, None, None, held + 1, _ALL, 1, 0)
        return Slot(view, held, 0, self.begin, self.end, 0, 0, _ALL, _ALL)

    def hold(self) -> bool:
        """Whether the next token may go there, as the last one did."""
        layer = self.layer
        return (
            layer.keys is self.keys and layer.values is self.values and self.end < self.room
            and layer.cumulative_length == self.length and not layer.record_past
        )  # fmt: skip

    def advance(self) -> bool:
        """Count a token that was written; True if the window leaves one behind."""
        self.length += 1
        self.layer.cumulative_length = self.length
        self.end += 1
        full = self.end - self.begin > self.last
        self.begin += full
        self._show()
        return full


def _with_room(x: Tensor, tokens: int) -> Tensor:
    """x [1, H, n, D] in a memory for some tokens."""
    with torch.inference_mode(False):  # later steps may write where inference mode is off
        memory = torch.empty(*x.shape[:2], tokens, x.shape[3], dtype=x.dtype)
    with torch.no_grad():
        memory[:, :, : x.shape[2]] = x
    return memory
