"""`calibrate_kv`: learn codebooks and key means of a KV cache from a model that runs on text.

The model runs with its own attention, and a recording cache samples the keys (after RoPE) and
values of its updates. Learned schemes (`nomad-*`, `cq-*`, `learned-*`) get codebooks. Schemes that
centre keys (`u4`, `u3`, ...) get the means of each head's keys; one of them turns with the position
(`ops.rotary_mean`), unless codebooks are learned, which are of keys less one mean. Then they also
get what keys are multiplied by (`transforms.key_smoothing`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .. import patches
from ..cache.argument import cache_argument
from ..cache.codebooks import SINKS, KVCodebooks, learned, title
from ..cache.key_means import ask_for_queries, smoothable
from ..cache.rotary import inverse_frequencies, least_strength, turning_together
from ..errors import VQCacheError, shown
from ..fit.kv import TokenSample, fit_kv_codebook
from ..formats.catalog import KVScheme, kv_scheme
from ..hf.calibration_options import MIN_CONTEXT
from ..ops.rotary_mean import KeyMoments, interleave
from ..progress import bar
from ..transforms.key_smoothing import key_smoothing, squares
from ..transforms.smoothing import partners
from .text import context_of, sequences_of

TOKENS = 8192
_MIN_PER_ENTRY = 8  # tokens for each entry of a codebook; with fewer it overfits


@torch.no_grad()
def calibrate_kv(
    model: Any,
    scheme: str | KVScheme = "nomad-4",
    text: str | Sequence[int] | Tensor | None = None,
    tokenizer: Any = None,
    *,
    tokens: int = TOKENS,
    context: int | None = None,
    samples: int = TOKENS,
    fisher: bool = False,
    sinks: int = SINKS,
    seed: int = 0,
    progress: bool = True,
) -> KVCodebooks:
    """Learn a KV cache's codebooks, or the means of its keys, from a model that runs on text.

        codebooks = calibrate_kv(model, "nomad-4", open("book.txt").read(), tokenizer)
        codebooks.save("model/kv_codebooks.safetensors")
        model.generate(**inputs, past_key_values=VQCache(model.config, "nomad-4",
                                                         codebooks=codebooks))

    Args:
        model: a decoder-only language model, on any device, in any dtype.
        scheme: scheme of the cache.
        text: text like that of the application: a string, its token ids [tokens], or sequences
            of token ids [sequences, tokens]; None = sampled from the model itself.
        tokenizer: the tokenizer, needed for a string.
        tokens: number of tokens to run, in sequences that are spread evenly over the text.
        context: tokens of a sequence; None = 2048, or the model's maximum.
        samples: tokens of each layer for k-means, drawn evenly: bounds the memory.
        fisher: weight vectors by the squared gradient of the text's likelihood, as CQ does; for
            schemes with codebooks per channel group. Needs a backward pass.
        sinks: of the cache: first tokens of each sequence, which it keeps as floats. Their keys are
            outliers, so nothing is learned of them.
        seed: seed of samples, k-means and sampled text. Equal arguments give equal codebooks.
        progress: show progress bars.

    Raises:
        VQCalibrationError: the text is too short or of a wrong kind, or the model cannot read
            `context` tokens.
        VQCacheError: the model has no cache of keys and values or they are not finite, or an
            argument is out of range.
        VQSchemeError: the scheme is unknown, or head_dim cannot be split into its vectors.
    """
    kv = kv_scheme(scheme)
    sides = learned(kv.key), learned(kv.value)
    if not any(sides) and not kv.centre_keys:
        raise VQCacheError(f"there is nothing to calibrate for {title(kv)}: it needs no data.")
    if fisher and not any(part.codebook == "channel_group" for part in (kv.key, kv.value)):
        raise VQCacheError(
            f"fisher=True weights codebooks per channel group, which {title(kv)} does not have."
        )
    context = checked_context(model, context)
    entries = max(part.entries if learned(part) else 1 for part in (kv.key, kv.value))
    check_number("tokens", tokens, max(MIN_CONTEXT, _MIN_PER_ENTRY * entries))
    check_number("samples", samples, _MIN_PER_ENTRY * entries)
    check_number("sinks", sinks, 0)
    context = min(context, tokens)
    was_training = model.training
    model.eval()
    try:
        sequences = sequences_of(model, text, tokenizer, tokens, context, seed, progress)
        shortest = min(map(len, sequences))
        if sinks > SINKS and sinks >= shortest // 2:
            raise VQCacheError(
                f"calibration(sinks={sinks}) leaves out most of a sequence of {shortest} tokens: "
                "give more `context`."
            )
        config = model.config if kv.centre_keys and not sides[0] else None
        sizes = [samples if side else 0 for side in sides]
        record = _Record(sizes, kv.centre_keys, sinks, seed, config)
        for ids in bar(sequences, "recording", progress):
            run_recorded(model, ids, record, fisher)
    finally:
        model.train(was_training)
    if not record.layers:
        raise _no_cache(model)
    return _fit(kv, record, fisher, seed, model.device, progress)


class Listener(Protocol):
    """Receiver of the keys and values of a running model."""

    sinks: int
    """First tokens of a sequence, whose keys and values it does not receive."""

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Receive keys and values [B, H, n, D] of a layer, without the sinks."""


class _Record:
    """Samples of every layer's keys and values.

    Args:
        sizes: numbers of tokens to sample, of keys and of values.
        means: compute the mean of the keys.
        sinks: first tokens of a sequence, which are left out.
        config: of the model whose keys turn with the position; None = do not look.
    """

    def __init__(
        self, sizes: Sequence[int], means: bool, sinks: int, seed: int, config: Any = None
    ) -> None:
        self.sizes, self.sinks, self.seed, self.config = sizes, sinks, seed, config
        self.moments: dict[int, tuple[KeyMoments, KeyMoments] | None] = {}
        self.wanted = (means or sizes[0] > 0, sizes[1] > 0)
        self.layers: dict[int, tuple[TokenSample, TokenSample]] = {}
        self.squares: dict[int, list[Tensor]] = {}  # sums: of queries, of keys; float32 [H, D]

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Sample from keys and values [B, H, n, D] of a layer, without the sinks."""
        if layer not in self.layers:
            key, value = (TokenSample(size, self.seed) for size in self.sizes)
            self.layers[layer] = key, value
        states = keys, values
        for sample, tokens, wanted in zip(self.layers[layer], states, self.wanted, strict=True):
            if wanted:
                sample.add(tokens)
        if layer not in self.moments:
            self.moments[layer] = self._moments(layer, keys)
        end = self.sinks + keys.shape[2]
        positions = torch.arange(self.sinks, end, device=keys.device)
        for moments in self.moments[layer] or ():
            moments.add(keys, positions)

    def see_queries(self, layer: int, query: Tensor, keys: Tensor) -> None:
        """Count queries [B, Hq, n, D] over keys [B, H, n, D] of a layer that turn, without the
        sinks."""
        if self.moments.get(layer) is None:
            return
        heads, tokens = keys.shape[1], keys.shape[2]
        found = [tokens * squares(x, heads).mean(0)[:, 0] for x in (query, keys)]
        known = self.squares.setdefault(layer, [torch.zeros_like(x) for x in found])
        for total, x in zip(known, found, strict=True):
            total += x

    def smoothing(
        self, layer: int, mean: Tensor, turning: Tensor | None, interleaved: bool
    ) -> Tensor | None:
        """By what the keys of a layer are multiplied, given their means [H, D]: float32 [H, D];
        None = 1."""
        if layer not in self.squares:
            return None
        pairs = self.moments[layer]
        assert pairs is not None
        tokens, dim = pairs[0].tokens, mean.shape[1]
        queries, keys = (x.cpu() / max(tokens, 1) for x in self.squares[layer])
        means = mean.square() if turning is None else mean.square() + turning.square()
        pairing = "interleaved" if interleaved else "half"
        partner = partners(dim, 2 * len(pairs[0].inv_freq), pairing)
        factors = key_smoothing(queries, keys, means, partner)
        return factors if bool((factors != 1).any()) else None

    def _moments(self, layer: int, keys: Tensor) -> tuple[KeyMoments, KeyMoments] | None:
        length, dim = self.sinks + keys.shape[2], keys.shape[3]
        found = inverse_frequencies(self.config, layer, dim, length)
        if found is None or least_strength(keys.device) == math.inf:
            return None
        inv_freq = found.to(keys.device)
        return KeyMoments(inv_freq, False), KeyMoments(inv_freq, True)

    def turning(self) -> tuple[dict[int, tuple[Tensor, Tensor]], bool]:
        """Mean and rotary mean float32 [H, D] of the layers that turn, and whether neighbouring
        channels are a pair."""
        pairs = {layer: each for layer, each in self.moments.items() if each is not None}
        if not pairs:
            return {}, False
        halves, neighbours = (
            torch.stack([each[i].left.sum().cpu() for each in pairs.values()]) for i in (0, 1)
        )
        tokens = min(each[0].tokens for each in pairs.values())
        interleaved = interleave(halves, neighbours, tokens)
        found = {}
        for layer, each in pairs.items():
            moments = each[interleaved]
            device = moments.inv_freq.device
            means = moments.means(least_strength(device), turning_together(device))
            mean, turning = (x.mean(0)[:, 0].cpu() for x in means)
            if turning.any():
                found[layer] = mean, turning
        return found, interleaved


class _Asking:
    """Receiver of the queries of one layer, with the sinks (`cache.see_queries`)."""

    version = 0

    def __init__(self, record: _Record, layer: int) -> None:
        self.record, self.layer = record, layer

    def see_queries(self, query: Tensor, keys: Tensor) -> None:
        """Pass them on."""
        first = self.record.sinks
        self.record.see_queries(self.layer, query[:, :, first:], keys[:, :, first:])


class _RecordingCache(DynamicCache):
    """The model's usual cache, which also passes its updates to `listener`."""

    def __init__(self, config: Any, listener: Listener) -> None:
        super().__init__(config=config)
        self.listener = listener
        self.asking: dict[int, _Asking] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record all tokens but the sinks, the first ones: an update is a whole sequence."""
        first = self.listener.sinks
        self.listener.add(layer_idx, key_states[:, :, first:], value_states[:, :, first:])
        states: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        if isinstance(self.listener, _Record):
            self.asking[layer_idx] = asking = _Asking(self.listener, layer_idx)
            ask_for_queries(states[0], asking)
        return states


class _DifferentiatedCache(DynamicCache):
    """The model's usual cache, which adds zeros to its updates: their gradients are those of the
    keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, list[Tensor]] = {}
        self.zeros: dict[int, list[Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record keys and values, and return all of them with gradients."""
        given = key_states, value_states
        self.seen[layer_idx] = [state.detach() for state in given]
        zeros = [torch.zeros_like(state, requires_grad=True) for state in given]
        self.zeros[layer_idx] = zeros
        key, value = (state + zero for state, zero in zip(given, zeros, strict=True))
        states: tuple[Tensor, Tensor] = super().update(key, value, layer_idx, *args, **kwargs)
        return states


def run_recorded(model: Any, ids: Tensor, listener: Listener, fisher: bool = False) -> None:
    """Run the model on one sequence and pass its keys and values to `listener`.

    Args:
        ids: token ids [tokens].
        fisher: also run backwards, and pass float32 [B, H, n, 2 D]: states, then gradients.
    """
    if fisher:
        _run_backwards(model, ids, listener)
        return
    known = inspect.signature(model.forward).parameters
    # The logits of a whole sequence can be larger than all keys and values.
    options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    patches.apply(patches.CACHE)  # attention shows queries
    cache = _RecordingCache(model.config, listener)
    model(ids[None].to(model.device), **{cache_argument(model): cache}, use_cache=True, **options)


@torch.enable_grad()
def _run_backwards(model: Any, ids: Tensor, listener: Listener) -> None:
    ids, cache = ids[None].to(model.device), _DifferentiatedCache(model.config)
    logits = model(ids, **{cache_argument(model): cache}, use_cache=True).logits
    loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
    zeros = [zero for pair in cache.zeros.values() for zero in pair]
    gradients = iter(torch.autograd.grad(loss, zeros))
    for layer, states in cache.seen.items():
        key, value = (torch.cat([s.float(), next(gradients).float()], -1) for s in states)
        listener.add(layer, key[:, :, listener.sinks :], value[:, :, listener.sinks :])


def _fit(
    kv: KVScheme, record: _Record, fisher: bool, seed: int, device: Any, progress: bool
) -> KVCodebooks:
    count = max(record.layers, default=-1) + 1
    keys: list[Tensor | None] = [None] * count
    values: list[Tensor | None] = [None] * count
    means: list[Tensor | None] = [None] * count
    rotary_means: list[Tensor | None] = [None] * count
    smoothings: list[Tensor | None] = [None] * count
    turning, interleaved = record.turning()
    for layer in bar(sorted(record.layers), "fitting", progress):
        samples = record.layers[layer]
        where = f"layer {layer}"
        tokens, gradients = _split(samples[0], fisher)
        tokens = None if tokens is None else tokens.float()
        if kv.centre_keys:
            means[layer] = mean = samples[0].mean.chunk(2 if fisher else 1, -1)[0]
            if not bool(mean.isfinite().all()):
                raise VQCacheError(
                    f"the keys of {where} hold NaN or infinity. Load the model in bfloat16 or "
                    "float32."
                )
            tokens = None if tokens is None else tokens - mean[:, None]
            if layer in turning:
                means[layer], rotary_means[layer] = turning[layer]
            if smoothable(kv.key):
                standing, moving = turning.get(layer, (mean, None))
                smoothings[layer] = record.smoothing(layer, standing, moving, interleaved)
        options: dict[str, Any] = {"seed": seed, "device": device}
        if tokens is not None:
            keys[layer] = fit_kv_codebook(
                tokens, kv.key, gradients=gradients, where=f"{where}, keys", **options
            )
        tokens, gradients = _split(samples[1], fisher)
        if tokens is not None:
            values[layer] = fit_kv_codebook(
                tokens, kv.value, gradients=gradients, where=f"{where}, values", **options
            )
    smooths = any(factors is not None for factors in smoothings)
    return KVCodebooks(
        kv, keys, values, means,
        key_rotary_means=rotary_means if turning else None, rotary_interleaved=interleaved,
        sinks=record.sinks, key_smoothings=smoothings if smooths else None,
    )  # fmt: skip


def _split(sample: TokenSample, fisher: bool) -> tuple[Tensor | None, Tensor | None]:
    """Split a sample into states [H, n, D] and gradients; None for those it does not have."""
    if not sample.size:
        return None, None
    if not fisher:
        return sample.tokens, None
    tokens, gradients = sample.tokens.chunk(2, -1)
    return tokens, gradients


def checked_context(model: Any, context: int | None) -> int:
    """Tokens of a sequence, see `context_of`.

    Raises:
        VQCacheError: the model has no cache of keys and values, or `context` is too small.
        VQCalibrationError: `context` is more than the model reads.
    """
    generates = getattr(model, "can_generate", lambda: False)()
    if not generates or model.config.is_encoder_decoder or not _takes(model, cache_argument(model)):
        raise _no_cache(model)
    if context is not None:
        check_number("context", context, MIN_CONTEXT)
    return context_of(model, context)


def _takes(model: Any, name: str) -> bool:
    known = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    return takes_any or name in known


def _no_cache(model: Any) -> VQCacheError:
    return VQCacheError(
        f"{type(model).__name__} is no decoder-only model that generates with a cache of keys "
        "and values: there is nothing to calibrate."
    )


def check_number(name: str, value: object, low: int) -> None:
    """Raise VQCacheError unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise VQCacheError(f"calibration({name}=...) must be at least {low}; got {shown(value)}.")
