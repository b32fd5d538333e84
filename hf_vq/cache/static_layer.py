"""One layer of a `VQCache` with `max_cache_len` whose memory never moves, so that it compiles.

              eager: prompts, several turns, single tokens      compiled: up to SLACK tokens
length        known here, written to the device                 on the device; here it is `stale`
update()      `VQCacheLayer`, on a ring instead of a tail       ops `kv_append`, then `kv_attention`
              -> the prompt itself, or `LazyKV`                 -> `CompiledKV`

The values are those of `VQCacheLayer`, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import env
from ..dispatch import selection
from ..errors import VQCacheError
from ..ops import KVCacheView, KVSide, kv_append, kv_attention
from ..ops.kv import flatten
from .codebooks import universal
from .key_means import Rotary, pairs_of, use_calibrated
from .layer import SLACK, VQCacheLayer
from .lazy_kv import KEY, VALUE, CompiledKV
from .rotary import least_strength
from .token_buffer import TokenBuffer, storing

TELLING = 4  # tokens of a prompt that tell how strong a constant part of keys is
GROWING = "make it with VQCache(..., static=False), which grows and cannot be compiled"


_rehearsed: set[tuple[Any, ...]] = set()
"""What was rehearsed in this process (`VQStaticLayer._kind`)."""


class RingBuffer(TokenBuffer):
    """The newest floats of a layer [B, H, slots, D]: the token at position p is in slot p % slots.

    `begin` and `end` are the positions held.
    """

    def __init__(self, like: Tensor, slots: int) -> None:
        super().__init__(like)
        self.data = like.new_zeros(*like.shape[:2], slots, like.shape[3])

    def view(self) -> Tensor:
        """The tokens in order, a copy: [B, H, len(self), D]."""
        return self.data.index_select(2, self._slots(self.begin))

    def append(self, tokens: Tensor) -> Tensor:
        """Write `tokens` [B, H, n, D] behind the last and return them; the oldest are forgotten."""
        slots = self.data.shape[2]
        self.end += tokens.shape[2]
        self.begin = max(self.begin, self.end - slots)
        newest = tokens[:, :, -slots:]
        self.data.index_copy_(2, self._slots(self.end - newest.shape[2]), newest)
        return tokens

    def _slots(self, begin: int) -> Tensor:
        return torch.arange(begin, self.end, device=self.data.device) % self.data.shape[2]


class VQStaticLayer(VQCacheLayer):
    """A full-attention layer stored as codes, with room for `max_cache_len` tokens from the start.

    Arguments as for `VQCacheLayer`. `groups`: query heads that share a head of keys.
    """

    is_compileable = True
    is_croppable = False  # by no more than SLACK tokens
    _few = 0  # a ring overwrites what the queries of an update still read
    static: KVCacheView
    groups = 1

    def _clear(self) -> None:
        self.stale = self._turned = False
        super()._clear()

    # -- what is known here, and what on the device ----------------------------------------------

    @property
    def length(self) -> int:
        """Tokens seen; after compiled steps the device is asked, once."""
        self.sync_length()
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        self._length = value

    def sync_length(self) -> None:
        """Learn what compiled steps did.

        Raises:
            VQCacheError: they stored more than there is room for.
        """
        if not self.stale:
            return
        assert self.static.cache_seqlens is not None
        self._length, limit = int(self.static.cache_seqlens), self.get_max_length()
        if self._length > limit:
            raise VQCacheError(
                f"compiled steps stored {self._length} tokens, max_cache_len={limit}: those beyond "
                f"are lost. Make the cache larger, and reset {self.where}."
            )
        self.stale = False
        for side in (self.k, self.v):
            side.codes.end = max(side.codes.end, self._length - self.window)
            side.tail.end = self._length
            side.tail.begin = max(side.tail.begin, self._length - side.tail.data.shape[2])
        if self.static.key_mean_known is not None:
            known: list[bool] = self.static.key_mean_known[:, 0].tolist()
            self._frozen = known[: len(self._frozen)]
            self._told = list(self._frozen)

    def _publish(self) -> None:
        """Tell the device what an eager update did, without moving anything."""
        static, known = self.static, self.static.key_mean_known
        self._set_length()
        if known is not None and self._told != self._frozen:
            known.copy_(torch.tensor(self._frozen, device=self.device)[:, None])
        self._publish_rotary_mean()
        self._told = list(self._frozen)
        for side, sinks in ((self.k, static.key.sinks), (self.v, static.value.sinks)):
            if side.sinks is not sinks:
                side.sinks = sinks.copy_(side.sinks)
        mean = static.key.mean
        if mean is not None and self.k.mean is not mean:
            assert self.k.mean is not None
            self.k.mean = mean.copy_(self.k.mean)
        self._publish_smoothing()

    def _publish_smoothing(self) -> None:
        kept = self.static.key.smoothing
        if kept is not None and self.k.smoothing is not kept:
            assert self.k.smoothing is not None
            self.k.smoothing = kept.copy_(self.k.smoothing)

    def _publish_rotary_mean(self) -> None:
        """As `_publish`. Where no head turns, a GPU then has no rotary mean, whose attention takes
        longer; on a CPU zeros cost nothing, and what was compiled for one prompt runs all."""
        kept, turning = self._allocated.key_rotary_mean, self.k.rotary_mean
        if kept is None or self._rotary is None or turning is None:
            return
        if turning is not kept:
            self.k.rotary_mean = kept.copy_(turning)
        interleaved = bool(self._rotary.interleaved)
        if self.static.rotary_interleaved != interleaved:
            self.static = self.static._replace(rotary_interleaved=interleaved)
        known = self._told != self._frozen and False not in self._frozen
        if known and least_strength(self.device) > 0:
            self._turned = self._turned or bool(kept.any())
            self._stand()

    def _stand(self) -> None:
        """Do without a rotary mean until the next prompt, unless there was one: a layer that turns
        for some prompts is compiled once."""
        if not self._turned:
            self.k.rotary_mean = self._rotary = None
            self.static = self.static._replace(key_rotary_mean=None, rotary_inv_freq=None)

    def _shown(self, rotary: Rotary, keys: Tensor) -> tuple[Rotary, bool]:
        """What a prompt [B, H, n, D] that is too short to measure means tells, or its longest row:
        the layout of pairs, and whether some may turn, if it has TELLING tokens."""
        rows, start = slice(None), 0
        if self._start is not None:
            start = min(self._start)
            rows = slice(self._start.index(start), self._start.index(start) + 1)
        first, end = start + self.sinks, self.prompt.length or keys.shape[2]
        tokens = keys[rows, :, first:end]
        if tokens.shape[2] < TELLING:
            return Rotary(rotary.inv_freq, bool(rotary.interleaved)), True
        interleaved, turns = rotary.means(tokens, first).shown.tolist()
        return Rotary(rotary.inv_freq, bool(interleaved)), bool(turns)

    def _set_length(self) -> None:
        assert self.static.cache_seqlens is not None
        self.static.cache_seqlens.fill_(self._length)

    # -- memory ----------------------------------------------------------------------------------

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        super()._allocate(key_states, value_states)
        limit = self.options.max_cache_len
        assert limit is not None
        for side, like in ((self.k, key_states), (self.v, value_states)):
            side.codes.reserve(limit)
            side.tail = RingBuffer(like, self.window + SLACK)
        batch, heads = key_states.shape[:2]
        measured = self.k.mean is not None and self.calibrated is None
        if measured and self._rotary is not None:
            self.k.rotary_mean = torch.zeros(batch, heads, 1, self.k.dim, device=self.device)
        if self._pairs is not None:
            self.k.smoothing = torch.ones(batch, heads, 1, self.k.dim, device=self.device)
        self._told = list(self._frozen)  # what the device knows of it
        key, value = (
            KVSide(side.codes.data, side.codes.scale[:, :, :limit], side.codebook, side.mean,
                   side.sinks, side.tail.data, 0, side.spec, side.codes.layout, side.smoothing)
            for side in (self.k, self.v)
        )  # fmt: skip
        self.static = KVCacheView(
            key, value,
            cache_leftpad=torch.tensor(self._start or [0] * batch, device=self.device),
            cache_seqlens=torch.zeros((), dtype=torch.int64, device=self.device),
            page_table=None,
            key_mean_known=torch.zeros(batch, heads, dtype=torch.bool, device=self.device)
            if measured else None,
            max_seqlen=limit, window=self.window, num_new=0, num_coded=0,
        )  # fmt: skip
        if self.k.rotary_mean is not None and (rotary := self._rotary) is not None:
            self.static = self.static._replace(
                key_rotary_mean=self.k.rotary_mean, rotary_inv_freq=rotary.inv_freq,
                rotary_interleaved=bool(rotary.interleaved),
            )  # fmt: skip
        self._allocated = self.static
        for tensor in self._tensors():
            # Without a guard: a new cache has CUDA graphs captured again, and nothing compiled.
            torch._dynamo.mark_static_address(tensor, guard=False)
        if self.device.type == "cuda":
            kind = self._kind()
            if kind not in _rehearsed:
                self._rehearse(key_states, value_states)
            if kind is not None:
                _rehearsed.add(kind)

    def _kind(self) -> tuple[Any, ...] | None:
        """What decides the kernels of a layer; None for codebooks of its own, of which kernels keep
        tables."""
        for side in (self.k, self.v):
            shared = side.scheme.codebook == "universal"
            if not shared or side.codebook is not universal(side.scheme, self.device):
                return None
        return (
            *((part.shape, part.dtype, part.device) if isinstance(part, Tensor) else part
              for part in flatten(self.static)),
            self.groups, env.BACKEND.get(), selection.generation,
            id(self.k.codebook), id(self.v.codebook),
        )  # fmt: skip

    def _rehearse(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store a token, attend to it as a model does, and forget it: what kernels compile or keep
        for ever, they must not make first where memory belongs to a CUDA graph."""
        static = self.static
        key, value = static.key, static.value
        written = [
            key.mean, static.key_mean_known, key.sinks, value.sinks, static.cache_seqlens,
            static.key_rotary_mean,
        ]  # fmt: skip
        before = [None if part is None else part.clone() for part in written]
        keys, values = (
            x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (key_states, value_states)
        )
        kv_append(keys, values, static)
        query = keys.repeat_interleave(self.groups, 1)
        everything = torch.ones(1, 1, 1, self.get_max_length(), dtype=torch.bool)
        kv_attention(query, static, softmax_scale=1.0, mask=everything.to(self.device))
        for part, was in zip(written, before, strict=True):
            if part is not None and was is not None:
                part.copy_(was)

    def _tensors(self) -> list[Tensor]:
        return [part for part in flatten(self.static) if isinstance(part, Tensor)]

    def reset(self) -> None:
        """Forget everything, and keep the memory for a prompt of the same shape."""
        if not self.is_initialized:
            return
        self.version += 1
        self.stale, self._length = False, 0
        for side in (self.k, self.v):
            for tape in (side.codes, side.tail):
                tape.begin = tape.end = 0
        if self.static.key_mean_known is not None:
            self._frozen, self._told = [False], [False]
            self.static = self._allocated
            self.k.rotary_mean = self.static.key_rotary_mean
            for part in (self.static.key_mean_known, self.static.key.mean, self.k.rotary_mean):
                if part is not None:
                    part.zero_()
            if self.k.smoothing is not None:
                self.k.smoothing.fill_(1)
        self._set_length()

    def _restart(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin with a prompt in the memory of an earlier one, if it fits."""
        try:
            self._check_states(key_states, value_states)
        except VQCacheError:
            self._clear()
            return
        batch = key_states.shape[0]
        with storing(self.device):
            self._set_start(self.prompt.starts_for(batch))
            self._frozen = self._frozen[:1] * (1 if self._start is None else batch)
            self._told = list(self._frozen)
            assert self.static.cache_leftpad is not None
            self.static.cache_leftpad.copy_(torch.tensor(self._start or [0] * batch))
            if (inv_freq := self._allocated.rotary_inv_freq) is not None:
                now = Rotary.of(self.options.rope, self.index, key_states, self.calibrated)
                if now is not None:  # of a prompt of another length
                    self._rotary = Rotary(inv_freq.copy_(now.inv_freq), now.interleaved)
            if self._pairs is not None:
                self._pairs = pairs_of(self, key_states)
            if self.calibrated is not None:
                use_calibrated(
                    self.k, self.calibrated, self._rotary, self._start_tensor, self.where
                )

    # -- writing ---------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As `VQCacheLayer.update`; while compiling, two `CompiledKV`s.

        Raises:
            VQCacheError: as there; or the prompt is compiled, or many tokens at once.
        """
        if not is_compiling():
            if self.is_initialized and self.length == 0:
                self._restart(key_states, value_states)
            graded = key_states.requires_grad or value_states.requires_grad
            if graded and torch.is_grad_enabled() and self.is_initialized and self._length:
                self.count_fallback()
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            raise VQCacheError(
                f"{self.where} has no memory yet: run the prompt without torch.compile, as "
                "generate does."
            )
        kv_append(key_states, value_states, self.static)
        self.stale = True
        num_new = key_states.shape[2]
        return CompiledKV(self.static, num_new, KEY), CompiledKV(self.static, num_new, VALUE)

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        first = self._rotary if self._length == 0 and self.calibrated is None else None
        end, may_turn = key_states.shape[2] - self.window, True
        if first is not None and end <= min(self._start or [0]) + self.sinks:
            # Compiled steps will be the ones to measure means, in pairs that are known.
            self._rotary, may_turn = self._shown(first, key_states)
            self._pairs = None if self._pairs is None else self._rotary
        result = super()._append(key_states, value_states)
        self._publish()
        if not may_turn and least_strength(self.device) > 0:
            self._stand()
        return result

    def see_queries(self, query: Tensor, keys: Tensor) -> None:
        """As `VQCacheLayer.see_queries`."""
        super().see_queries(query, keys)
        self._publish_smoothing()

    def _trim(self, keys: Tensor, values: Tensor) -> None:
        for side, floats in ((self.k, keys), (self.v, values)):
            side.tail.append(floats[:, :, side.tail.end - self._length :])

    # -- reading ---------------------------------------------------------------------------------

    def count_fallback(self) -> None:
        """A mask over a static cache is longer than what would be decoded: there is no fallback.

        Raises:
            VQCacheError: always.
        """
        raise VQCacheError(
            f"{self.where} would be decoded: the model's attention does not read codes. Use "
            f'model.set_attn_implementation("vq") and torch.no_grad(), or {GROWING}.'
        )

    def _held(self, which: str) -> Tensor:
        self.sync_length()
        return super()._held(which)

    def get_seq_length(self) -> Any:
        """Tokens seen: int, or what compiled steps go by, a tensor."""
        if self.is_initialized and (self.stale or is_compiling()):
            return self.static.cache_seqlens
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys: of the prompt itself, later of all that may ever come."""
        if not is_compiling() and not self.stale and self._length == 0:
            return query_length, 0
        return self.get_max_length(), 0

    # -- rows and ends ---------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Not possible.

        Raises:
            VQCacheError: always.
        """
        raise VQCacheError(
            f"{self.where} has memory for {SLACK} tokens beyond the window and no more, so it "
            f"cannot keep candidates of assisted decoding; {GROWING}."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; at most SLACK, or all.

        Raises:
            VQCacheError: floats of the window are gone.
        """
        if not self.is_initialized:
            return
        remove = -int(tokens_to_remove)
        remove = remove if remove >= 0 else max(self.length + remove, 0)
        left = self.length - remove
        if left > 0 and self.k.tail.begin > max(left - self.window, 0):
            raise VQCacheError(
                f"{self.where} cannot forget its last {remove} tokens: it keeps {SLACK} floats "
                f"beyond the window. Crop less, or {GROWING}."
            )
        super().crop(tokens_to_remove)
        self._set_length()

    def _forget_past(self) -> None:
        pass  # the ring has forgotten by itself

    def _select(self, function: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.sync_length()
        static, batch = self.static, self.static.key.sinks.shape[0]
        kept = len(function(torch.arange(batch, device=self.device)))
        if kept != batch:
            raise VQCacheError(
                f"{self.where} has memory for {batch} rows and would get {kept}; {GROWING}."
            )
        with storing(self.device):
            sides = [
                part
                for side in (static.key, static.value)
                for part in (
                    side.codes, side.scale, side.mean, side.sinks, side.recent, side.smoothing
                )
            ]  # fmt: skip
            others = static.cache_leftpad, static.key_mean_known, static.key_rotary_mean
            for part in (*sides, *others):
                if part is not None:
                    part.copy_(function(part))
        if self._start is not None:
            assert static.cache_leftpad is not None
            self._set_start(static.cache_leftpad.tolist())
            self._frozen = function(torch.tensor(self._frozen)).tolist()
            self._told = list(self._frozen)
