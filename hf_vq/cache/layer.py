"""One layer of `VQCache`: which tokens are floats, which are codes, and when.

    query at position i reads   floats of the sinks, of every j > i - window, and of its own update
                                codes of all other tokens
    encoded                     when a token leaves the window of the newest query; once, but for a
                                prompt's, whose queries have its keys encoded again
    tail of floats              window + SLACK tokens, so that a crop finds its window whole

A token's codes depend on the token and the frozen means and factors of its row alone, so beams and
rejected candidates change nothing. Three things depend on how the tokens arrived:

    the means of the keys   of the prompt if the first update brings it whole, else of half a window
                            (`key_means.freeze_means`); calibrated ones depend on nothing
    the factors of the keys of the first update, with its queries; or calibrated
    a query's own update    is read as floats even beyond the window, so updates of more than
                            `window` tokens (a prompt, large chunks, more than window - 1
                            candidates) read more floats than token by token

A crop deeper than SLACK (and not announced by `activate_past_recording`) finds some tokens of the
window as codes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import VQCacheError
from ..formats.catalog import Allocation, of_layer
from ..ops import KVCacheView, KVSide, kv_append
from ..ops.kv_ops import BoundKV, bound_to
from ..ops.layout import layouts_for
from . import key_means
from .codebooks import codebook_for
from .key_means import Calibrated, Rotary
from .kv_side import LOOKED_AT, SideBuffers, check_head_dim, problem_with
from .lazy_kv import KEY, VALUE, KVUpdate, LazyKV
from .prompt import Prompt
from .rotary import RopeFrequencies
from .token_buffer import storing

SLACK = 32  # floats kept beyond the window


def _dense(states: Tensor) -> Tensor:
    return states.decode() if isinstance(states, LazyKV) else states


@dataclass(frozen=True)
class LayerOptions:
    """The options of `VQCache` that a layer needs; see there. `rope`: how the model's keys turn."""

    scheme: Allocation
    sinks: int
    window: int
    max_cache_len: int | None = None
    strict: bool = False
    rope: RopeFrequencies = field(default_factory=RopeFrequencies)


class VQCacheLayer(CacheLayerMixin):
    """A full-attention layer stored as codes.

    Args:
        options: shared by all layers.
        prompt: what the cache was told about the prompt; shared by all layers.
        index: number of the layer, for messages.
        calibrated: means and factors of this layer's keys; None = measured on the prompt.
        codebooks: of this layer's keys and of its values, if they were learned.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    past: int | None = None  # tokens in front of an update that it sees; None = all
    _few = SLACK  # tokens of an update that are appended to the tail first

    def __init__(
        self,
        options: LayerOptions,
        prompt: Prompt,
        index: int,
        calibrated: Calibrated | None = None,
        codebooks: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.options, self.prompt, self.index = options, prompt, index
        self.scheme = of_layer(options.scheme, index)
        self.sinks, self.window = options.sinks, options.window
        self.tail_length = self.window + SLACK  # floats kept
        self.calibrated, self.codebooks = calibrated, codebooks
        self.record_past = False
        self.reserve = True  # memory for max_cache_len; that of a file may be any number
        self.fallbacks = 0
        self.version = 0
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.length = 0  # tokens seen; the position of the next one
        self.first_code = 0  # position of the first code held
        self.k: SideBuffers
        self.v: SideBuffers
        self._start: list[int] | None = None
        self._start_tensor: Tensor | None = None
        self._bound: BoundKV | None = None
        self._rotary: Rotary | None = None
        self._pairs: Rotary | None = None  # of keys that may be smoothed
        self._frozen: list[bool] = []

    def __getstate__(self) -> dict[str, Any]:
        """Everything but bound kernels, which the next token finds again."""
        return {**self.__dict__, "_bound": None}

    @property
    def where(self) -> str:
        """The layer's name in messages."""
        return f"layer {self.index} of the cache"

    @property
    def tail_start(self) -> int:
        """Position of the oldest token of the tail."""
        return self.length - len(self.k.tail)

    @property
    def coded(self) -> int:
        """Position after the last coded token."""
        return self.first_code + len(self.k.codes)

    @property
    def held(self) -> int:
        """Tokens that are still in the layer, as floats or codes."""
        return self.length - self.first_code

    # -- writing ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys [B, H, n, D] and values [B, H, n, Dv]."""
        self._check_states(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        with storing(self.device):
            self._allocate(key_states, value_states)
        self.is_initialized = True

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        scheme, limit = self.scheme, self.options.max_cache_len
        capacity = limit or 0 if self.reserve else 0
        sides = (scheme.key, key_states), (scheme.value, value_states)
        for part, like in sides:
            check_head_dim(part, like.shape[3], self.where)
        layouts = self._layouts(key_states, value_states)
        centred = scheme.centre_keys or self.calibrated is not None, False
        self.k, self.v = (
            SideBuffers(
                like, part, codebook_for(part, self.codebooks[index], like, self.where),
                layout=layouts[index], centred=centred[index],
                sinks=self.sinks, capacity=capacity, limit=limit,
            )
            for index, (part, like) in enumerate(sides)
        )  # fmt: skip
        self._set_start(self.prompt.starts_for(key_states.shape[0]))
        self._frozen = [not scheme.centre_keys] * (1 if self._start is None else len(self._start))
        if centred[0]:
            of = self.options.rope, self.index, key_states, (self.k, self.v), self.calibrated
            self._rotary = key_means.rotary_of(*of)
            self._pairs = key_means.pairs_of(self, key_states)
        if self.calibrated is not None:
            key_means.use_calibrated(
                self.k, self.calibrated, self._rotary, self._start_tensor, self.where
            )
            self._frozen = [True] * len(self._frozen)
        self._remember_sizes()

    def _layouts(self, key_states: Tensor, value_states: Tensor) -> tuple[str, str]:
        dims = key_states.shape[3], value_states.shape[3]
        return layouts_for(self.scheme.key, self.scheme.value, *dims, key_states)

    def _set_start(self, start: list[int] | None) -> None:
        self._start = start
        self._start_tensor = None if start is None else torch.tensor(start, device=self.device)
        self._sinks_end = self.sinks + max(start or [0])

    def _remember_sizes(self) -> None:
        """What every update must have again."""
        keys, values = self.k.tail.data, self.v.tail.data
        self._sizes = (*keys.shape[:2], self.k.dim), (*keys.shape[:2], self.v.dim)
        self._dtypes = keys.dtype, values.dtype

    def _check_states(self, k: Tensor, v: Tensor) -> None:
        of_k, of_v = k.shape, v.shape
        if (
            self.is_initialized
            and len(of_k) == len(of_v) == 4
            and of_k[2] == of_v[2]
            and (of_k[0], of_k[1], of_k[3]) == self._sizes[0]
            and (of_v[0], of_v[1], of_v[3]) == self._sizes[1]
            and (k.dtype, v.dtype) == self._dtypes
            and k.device == v.device == self.device
        ):
            return
        before = (*self._sizes, *self._dtypes, self.device) if self.is_initialized else None
        if problem := problem_with(k, v, before):
            raise VQCacheError(f"{self.where} was updated with {problem}.")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys [B, H, n, D] and values [B, H, n, Dv]; return all that attention may see.

        Returns:
            The tensors themselves if the layer was empty, else two `LazyKV`s [B, H, length, D];
            decoded, if gradients shall flow into the new tokens (older ones are constants).

        Raises:
            VQCacheError: shape, dtype or device changed, or the cache is full.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_states(key_states, value_states)
        new = key_states.shape[2]
        gradients = torch.is_grad_enabled() and self.length > 0 and new > 0
        gradients = gradients and (key_states.requires_grad or value_states.requires_grad)
        if gradients and self.options.strict:
            raise VQCacheError(
                f"{self.where} would be decoded: gradients are enabled, and codes have none. Run "
                "the model under torch.no_grad(), or use VQCache(strict=False) to accept the cost."
            )
        with storing(self.device):
            keys, values = self._append(key_states, value_states)
        if not gradients:
            return keys, values
        return (
            torch.cat([_dense(keys)[:, :, :-new], key_states], 2),
            torch.cat([_dense(values)[:, :, :-new], value_states], 2),
        )

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        before, count = self.length, key_states.shape[2]
        limit = self.options.max_cache_len
        if limit is not None and before + count > limit:
            raise VQCacheError(
                f"{self.where} is full: {before + count} tokens, max_cache_len={limit}. Make the "
                "cache larger or shorten the prompt."
            )
        if count == 0:
            return self._held(KEY), self._held(VALUE)
        window = []  # floats of everything that is not encoded yet, and of the window
        for store, tokens in ((self.k, key_states), (self.v, value_states)):
            if before < self._sinks_end:
                store.remember_sinks(tokens, before, self._start_tensor)
            if before == 0:
                window.append(tokens)
            elif count <= self._few:
                window.append(store.tail.append(tokens))
            else:  # they do not enter the buffer: `_trim` keeps the last
                window.append(torch.cat([store.tail.view(), tokens], 2))
        keys, values = window
        self.length = before + count
        codes = self.k.codes
        leaving = self.length - self.window - (self.first_code + codes.end - codes.begin)
        if leaving > 0:  # the window of the newest query
            if False in self._frozen:
                prompt = count if before == 0 else 0
                key_means.freeze_means(self, keys, min(prompt, self.prompt.length or prompt))
            for side in (codes, self.v.codes):
                if side.end + leaving > side.scale.shape[2] or side.data.is_inference():
                    side.reserve(leaving)
        first = 0 if self.past is None else max(before - self.past, 0)
        view = self._view(keys, values, first, count, max(leaving, 0))
        bound = None
        if count == 1 and self._start_tensor is None:
            self._bound = bound = bound_to(self._bound, key_states, view)
        if leaving > 0:
            self._encode(keys, values, view, leaving, bound)
        result: tuple[Tensor, Tensor] = (key_states, value_states)
        if before:
            result = KVUpdate(view, self, bound).lazy()
        elif self._pairs is not None:
            key_means.ask_for_queries(key_states, self)
        self._trim(keys, values)
        return result

    def see_queries(self, query: Tensor, keys: Tensor) -> None:
        """Let the queries [B, Hq, n, D] of the prompt decide what its keys [B, H, n, D] are
        multiplied by (`key_means.smooth`). Attention calls it, as an update brings no queries."""
        key_means.smooth(self, query, keys)

    def _encode(
        self, keys: Tensor, values: Tensor, view: KVCacheView, leaving: int, bound: BoundKV | None
    ) -> None:
        """Encode the tokens that left the window of the newest query.

        Args:
            keys: floats [B, H, n, D] of the n newest tokens.
            values: floats [B, H, n, Dv].
            view: of the layer, in which these tokens count as coded.
            leaving: how many they are.
            bound: the layer's kernels.
        """
        codes, at = self.k.codes, keys.shape[2] - self.window - leaving
        keys, values = keys.narrow(2, at, leaving), values.narrow(2, at, leaving)
        kv_append(keys, values, view, None, bound if leaving == 1 else None)
        codes.end += leaving
        self.v.codes.end += leaving
        self._look_at(keys, values, self.length - self.window)

    def _look_at(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Warn of tokens before position `end` that have no right code."""
        due = keys.shape[2] > 1 or end % LOOKED_AT == 0
        idle = not due and self.k.has_scale and self.v.has_scale
        if idle or self.prompt.warned or self.device.type != "cpu":  # a GPU would have to wait
            return
        for name, store, floats in ("keys", self.k, keys), ("values", self.v, values):
            if (due or not store.has_scale) and not self.prompt.warned:
                self.prompt.warned = store.warn_of_newest(floats, end, name, self.index)

    def _trim(self, keys: Tensor, values: Tensor) -> None:
        """Forget floats that no query will read, unless a crop was announced."""
        count = keys.shape[2]
        gone = 0 if self.record_past else max(count - self.tail_length, 0)
        for store, floats in ((self.k, keys), (self.v, values)):
            tail = store.tail
            if tail.end - tail.begin == count:
                tail.begin += gone
            else:
                tail.replace(floats[:, :, gone:])

    # -- reading ---------------------------------------------------------------------------------

    def _view(
        self, keys: Tensor, values: Tensor, first: int, num_new: int, leaving: int = 0
    ) -> KVCacheView:
        """The tokens from position `first` on, given the floats [B, H, n, D] of the n newest.

        Args:
            leaving: tokens that count as coded, and will be at once.
        """
        k, v = self.k, self.v
        of_k, of_v = k.codes, v.codes
        visible = self.length - first
        coded = max(self.first_code + of_k.end - of_k.begin + leaving - first, 0)
        hidden = keys.shape[2] - visible
        if hidden > 0:
            keys, values = keys[:, :, hidden:], values[:, :, hidden:]
        turning: tuple[Any, ...] = ()
        if k.rotary_mean is not None and (rotary := self._rotary) is not None:
            turning = k.rotary_mean, rotary.inv_freq, rotary.interleaved, first
        # By position: names cost more than all the rest.
        return KVCacheView(
            KVSide(of_k.data, of_k.scale, k.codebook, k.mean, k.sinks, keys,
                   of_k.end + leaving - coded, k.spec, of_k.layout, k.smoothing),
            KVSide(of_v.data, of_v.scale, v.codebook, v.mean, v.sinks, values,
                   of_v.end + leaving - coded, v.spec, of_v.layout),
            self._start_tensor, None, None, None, visible, self.window, num_new, coded, *turning,
        )  # fmt: skip

    def _held(self, which: str) -> Tensor:
        view = self._view(self.k.tail.view(), self.v.tail.view(), self.first_code, 0)
        return LazyKV(KVUpdate(view, self), which)

    @property
    def keys(self) -> Tensor | None:
        """All keys held; None before the first update."""
        return self._held(KEY) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """All values held; None before the first update."""
        return self._held(VALUE) if self.is_initialized else None

    def count_fallback(self) -> None:
        """Record that a lazy tensor was decoded because an operation asked for dense numbers.

        Raises:
            VQCacheError: the cache is `strict`.
        """
        if self.options.strict:
            raise VQCacheError(
                f"{self.where} would be decoded: the model's attention does not read codes, or a "
                "forward hook of its layer may read attention weights, which codes do not give. "
                'Use model.set_attn_implementation("vq") and torch.no_grad(), remove the hook, or '
                "use VQCache(strict=False) to accept the cost."
            )
        self.fallbacks += 1

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that an update with `query_length` tokens will return."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """`max_cache_len`, -1 without one."""
        return self.options.max_cache_len or -1

    # -- rows and ends ---------------------------------------------------------------------------

    def sync_length(self) -> None:
        """Learn what compiled steps did; only a `VQStaticLayer` has any."""

    def reset(self) -> None:
        """Forget everything."""
        self.version += 1
        self._clear()

    def activate_past_recording(self) -> None:
        """Keep all floats until the next `crop`, so that it finds its window whole."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens.

        A positive number is the length to keep (the meaning before Transformers 5.20).
        """
        if not self.is_initialized:
            return
        tokens_to_remove = int(tokens_to_remove)  # generate may count with tensors
        remove = (
            max(self.length - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove
        )
        if remove >= self.length > 0:
            self.reset()
        elif remove:
            self.version += 1
            self.length -= remove
            for store in (self.k, self.v):
                extra = self.first_code + len(store.codes) - self.length
                store.codes.pop(max(extra, 0))
                store.tail.pop(remove)
        self._forget_past()

    def stop_past_recording(self) -> None:
        """Undo `activate_past_recording`."""
        self.record_past = False
        self._forget_past()

    def _forget_past(self) -> None:
        """Drop what `record_past` kept."""
        if self.is_initialized:
            for store in (self.k, self.v):
                store.tail.drop(len(store.tail) - self.tail_length)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        with storing(self.device):
            for store in (self.k, self.v):
                store.map(function)
            if self._start_tensor is not None:
                self._start_tensor = function(self._start_tensor)

    def _select(self, function: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        if self._start_tensor is not None:
            frozen = torch.tensor(self._frozen, device=self.device)
            self._frozen = function(frozen).tolist()
        self._map(function)
        self._remember_sizes()
        if self._start_tensor is not None:
            self._start = self._start_tensor.tolist()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes row `beam_idx[b]`."""
        self._select(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._select(lambda rows: rows[indices.to(rows.device)])

    def offload(self) -> None:
        """Move to the CPU."""
        if self.is_initialized:
            self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back to the device of the model."""
        if self.is_initialized:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def __repr__(self) -> str:
        if not self.is_initialized:
            return f"{type(self).__name__}(empty)"
        return f"{type(self).__name__}({self.length} tokens, {len(self.k.codes)} coded)"
