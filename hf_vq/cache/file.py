"""A cache in one safetensors file.

layers.<i>.{k,v}_{codes,scale,tail,sinks}, layers.<i>.k_mean      coded layers, live tokens only
layers.<i>.k_rotary_mean, layers.<i>.k_inv_freq                   of keys that turn; version 2
layers.<i>.k_smoothing                                            smoothed; version 3
layers.<i>.keys, layers.<i>.values                                layers in the model's dtype
codebook.key, codebook.value                                      what the codes mean: universal,
codebook.<i>.key, codebook.<i>.value                              of layers with their own schemes,
codebooks.layers.<i>.{key,value,key_mean,..}                      or learned, see `codebooks`
metadata["hf_vq_cache"]                                           JSON, see `_description`
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import VQCacheError, VQError, VQFormatError, shown
from ..formats.catalog import Allocation
from ..transforms.key_smoothing import MOST, in_range
from . import safetensors_file
from .codebooks import SINKS, KVCodebooks, described, learned, scheme_in
from .key_means import Rotary, smoothable
from .kv_side import SideBuffers
from .layer import VQCacheLayer
from .safetensors_file import typed
from .sliding_layer import VQSlidingCacheLayer
from .static_layer import VQStaticLayer

if TYPE_CHECKING:
    from .vq_cache import VQCache

FORMAT_VERSION = 3
"""Where no key is smoothed, a file is of version 2; where none turns either, of version 1."""
MOST_SINKS = 1 << 16
"""Of a cache that is read: those of an empty one are allocated by its first update."""
KEY = "hf_vq_cache"
_LEARNED = "codebooks."
_LEARNED_SINKS = "codebooks_sinks"  # of the codebooks; "sinks" are the cache's
_VERSIONS = {"k_rotary_mean": 2, "key_rotary_mean": 2, "k_smoothing": 3, "key_smoothing": 3}
_KINDS = {
    VQCacheLayer: "vq",
    VQStaticLayer: "vq",
    VQSlidingCacheLayer: "vq_sliding",
    DynamicLayer: "dynamic",
    DynamicSlidingWindowLayer: "sliding",
}


def save(cache: VQCache, path: Path) -> None:
    """Write `cache` to `path`: the old file stays whole until the new one is."""
    coded = cache.coded_layers
    tensors: dict[str, Tensor] = {}
    layers = [_layer_state(layer, f"layers.{i}.", tensors) for i, layer in enumerate(cache.layers)]
    for layer in coded:
        if layer.is_initialized:
            tensors |= {
                name: store.codebook.cpu().clone()
                for name, store in _sides(layer)
                if not learned(store.scheme)
            }
    if cache.codebooks is not None:
        tensors |= {_LEARNED + name: part for name, part in cache.codebooks.tensors().items()}
    options, books = cache.options, cache.codebooks
    version = max([1, *(_VERSIONS.get(name.rpartition(".")[2], 1) for name in tensors)])
    description = {
        "format_version": version,
        **described(options.scheme),
        "sinks": options.sinks,
        "window": options.window,
        "max_cache_len": options.max_cache_len,
        "quantize_sliding": cache.quantize_sliding,
        "layers": layers,
    }
    if books is not None and books.key_rotary_means is not None:
        description["rotary_interleaved"] = books.rotary_interleaved
    if books is not None and books.sinks != SINKS:
        description[_LEARNED_SINKS] = books.sinks
    safetensors_file.write(path, tensors, KEY, description)


def _layer_state(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kind = _KINDS.get(type(layer))
    if kind is None:
        raise VQCacheError(
            f"{prefix[:-1]} is a {type(layer).__name__}, which VQCache.save cannot write; only "
            "attention layers can be saved."
        )
    state: dict[str, Any] = {"kind": kind, "length": layer.get_seq_length()}
    if kind.endswith("sliding"):
        state["sliding_window"] = layer.sliding_window
    if not layer.is_initialized:
        return state
    if isinstance(layer, VQCacheLayer):
        state.update(first_code=layer.first_code, start=layer._start, frozen=layer._frozen)
        parts = {f"{side}_{name}": tensor for side, name, tensor in _parts(layer)}
        if "k_rotary_mean" in parts and layer._rotary is not None:
            state["rotary_interleaved"] = bool(layer._rotary.interleaved)
    else:
        parts = {"keys": layer.keys, "values": layer.values}
    for name, part in parts.items():
        _check_finite(prefix + name, part)
    tensors.update(
        {
            prefix + name: part.cpu().clone(memory_format=torch.contiguous_format)
            for name, part in parts.items()
        }
    )
    return state


def _check_finite(name: str, part: Tensor) -> None:
    """Raise, naming a head and a token, where a file would hold what `load` refuses."""
    if not part.is_floating_point() or bool(part.isfinite().all()):
        return
    row, head, token = (~part.isfinite()).any(-1).nonzero()[0].tolist()
    raise VQCacheError(
        f"{name} holds NaN or infinity, in head {head} at {token} of row {row}, and cannot "
        "be saved: the model gave keys or values that are not finite. In float16 they may have "
        "overflown; load it in bfloat16 or float32."
    )


def _sides(layer: VQCacheLayer) -> list[tuple[str, SideBuffers]]:
    name = f"codebook.{layer.index}" if isinstance(layer.options.scheme, tuple) else "codebook"
    return [(f"{name}.key", layer.k), (f"{name}.value", layer.v)]


def _parts(layer: VQCacheLayer) -> list[tuple[str, str, Tensor]]:
    parts = [] if layer.k.mean is None else [("k", "mean", layer.k.mean)]
    if layer.k.rotary_mean is not None and layer._rotary is not None:
        parts += [
            ("k", "rotary_mean", layer.k.rotary_mean),
            ("k", "inv_freq", layer._rotary.inv_freq),
        ]
    if layer.k.smoothing is not None and bool((layer.k.smoothing != 1).any()):
        parts.append(("k", "smoothing", layer.k.smoothing))
    for side, store in (("k", layer.k), ("v", layer.v)):
        parts += [
            (side, "codes", store.codes.rows()),
            (side, "scale", store.codes.scales()),
            (side, "tail", store.tail.view()),
            (side, "sinks", store.sinks),
        ]
    return parts


def load(path: Path, config: PreTrainedConfig, device: torch.device, strict: bool) -> VQCache:
    """Read the cache at `path` for the model of `config`."""
    from .vq_cache import VQCache

    description, tensors = safetensors_file.read(
        path, KEY, FORMAT_VERSION, "a saved VQCache", "VQCache.save"
    )
    try:
        scheme = scheme_in(description)
        limit = description["max_cache_len"]
        cache = VQCache(
            config, scheme, _number(description, "sinks", MOST_SINKS),
            _number(description, "window"),
            None if limit is None else _number(description, "max_cache_len"), strict,
            static=False, quantize_sliding=typed(description, "quantize_sliding", bool),
            codebooks=_learned(scheme, tensors, description),
        )  # fmt: skip
        states = typed(description, "layers", list)
        kinds = [state["kind"] for state in states]
        expected = [_KINDS.get(type(layer)) for layer in cache.layers]
        if kinds != expected:
            raise VQFormatError(
                f"the cache has layers {_short(kinds)} but {type(config).__name__} needs "
                f"{_short(expected)}; load it with the config of the model that made it"
            )
        for index, (layer, state) in enumerate(zip(cache.layers, states, strict=True)):
            if isinstance(layer, VQCacheLayer):
                layer.reserve = False
            _Reader(index, state, tensors, device).fill(layer)
        for name in [name for name in tensors if name.startswith("codebook.")]:
            tensors.pop(name)  # equal to ours, as every layer has checked
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise VQFormatError(f"{path}: its description is damaged ({error!r}).") from None
    except VQFormatError as error:
        raise VQFormatError(f"{path}: {error}.") from None
    except VQError as error:
        raise VQFormatError(f"{path}: {error}") from None
    if tensors:
        raise VQFormatError(f"{path}: unexpected tensors {sorted(tensors)[:4]}.")
    return cache


def _learned(
    scheme: Allocation, tensors: dict[str, Tensor], description: dict[str, Any]
) -> KVCodebooks | None:
    """The learned codebooks among `tensors`, taken out of them."""
    names = [name for name in tensors if name.startswith(_LEARNED)]
    found = {name.removeprefix(_LEARNED): tensors.pop(name) for name in names}
    if not found:
        return None
    known = {"rotary_interleaved": False, _LEARNED_SINKS: SINKS, **description}
    return KVCodebooks.from_tensors(
        scheme, found,
        rotary_interleaved=typed(known, "rotary_interleaved", bool),
        sinks=_number(known, _LEARNED_SINKS, MOST_SINKS),
    )  # fmt: skip


def _number(state: dict[str, Any], name: str, most: int = 1 << 40, where: str = "") -> int:
    value: int = typed(state, name, int)
    if not 0 <= value < most:
        raise VQFormatError(f"{where}{name} is {shown(value)}")
    return value


def _short(kinds: list[Any]) -> str:
    return f"{len(kinds)} x {kinds[0]}" if len(set(kinds)) == 1 else str(kinds)


class _Reader:
    """Checks the tensors of one layer and puts them into it, taking them out of `tensors`."""

    def __init__(
        self, index: int, state: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
    ) -> None:
        self.prefix, self.state, self.tensors, self.device = (
            f"layers.{index}.",
            state,
            tensors,
            device,
        )

    def number(self, name: str) -> int:
        return _number(self.state, name, where=self.prefix)

    def take(self, name: str, dtype: torch.dtype | None, *shape: int | None) -> Tensor:
        """The tensor `name` with this dtype and shape (None = any)."""
        tensor = self.tensors.pop(self.prefix + name, None)
        if tensor is None:
            raise VQFormatError(f"{self.prefix}{name} is missing")
        fits = tensor.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=False)
        )
        if not fits or (dtype is not None and tensor.dtype != dtype):
            raise VQFormatError(
                f"{self.prefix}{name} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{dtype or 'floats'} {['any' if size is None else size for size in shape]}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise VQFormatError(f"{self.prefix}{name} holds NaN or infinity")
        return tensor.to(self.device)

    def fill(self, layer: Any) -> None:
        """Restore `layer`."""
        if self.state.get("sliding_window") != getattr(layer, "sliding_window", None):
            raise VQFormatError(
                f"{self.prefix}sliding_window is {self.state.get('sliding_window')}, the model has "
                f"{getattr(layer, 'sliding_window', None)}"
            )
        length = self.number("length")
        if length == 0:
            return
        if isinstance(layer, VQCacheLayer):
            self._fill_coded(layer, length)
            return
        held = None if layer.is_sliding else length
        keys = self.take("keys", None, None, None, held, None)
        values = self.take("values", None, *keys.shape[:3], None)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = length

    def _fill_coded(self, layer: VQCacheLayer, length: int) -> None:
        tail_k = self.take("k_tail", None, None, None, None, None)
        tail_v = self.take("v_tail", None, *tail_k.shape[:3], None)
        for side, tail in (("k", tail_k), ("v", tail_v)):
            if not tail.is_floating_point() or tail.shape[2] > length:
                raise VQFormatError(f"{self.prefix}{side}_tail is {tail.dtype} {list(tail.shape)}")
        batch, heads = tail_k.shape[:2]
        sinks = [  # first of all: as many as the description says are allocated
            self.take(f"{side}_sinks", tail.dtype, batch, heads, layer.sinks, tail.shape[3])
            for side, tail in (("k", tail_k), ("v", tail_v))
        ]
        layer.lazy_initialization(tail_k, tail_v)
        first, start, frozen = self.number("first_code"), self.state["start"], self.state["frozen"]
        gone = max(length - layer.sliding_window + 1, 0) if layer.is_sliding else 0
        if first > gone:
            raise VQFormatError(f"{self.prefix}first_code is {first}, expected at most {gone}")
        rows = 1 if start is None else batch
        lists = [frozen] if start is None else [frozen, start]
        if any(not isinstance(each, list) or len(each) != rows for each in lists):
            raise VQFormatError(f"{self.prefix}start and frozen do not fit a batch of {batch}")
        if not all(type(flag) is bool for flag in frozen) or not all(
            type(position) is int and 0 <= position <= length for position in start or []
        ):
            raise VQFormatError(f"{self.prefix}start or frozen holds a wrong value")
        if layer.k.mean is not None or f"{self.prefix}k_mean" in self.tensors:
            layer.k.mean = self.take("k_mean", torch.float32, batch, heads, 1, layer.k.dim)
        self._fill_rotary_mean(layer, batch, heads)
        layer.k.smoothing = None
        if f"{self.prefix}k_smoothing" in self.tensors:
            layer.k.smoothing = self._smoothing(layer, batch, heads)
        coded = None
        stores = zip("kv", (layer.k, layer.v), (tail_k, tail_v), sinks, strict=True)
        for side, store, tail, held in stores:
            width, scales = store.codes.width, store.codes.scale.shape[3]
            codes = self.take(f"{side}_codes", torch.uint8, batch, heads, coded, width)
            coded = codes.shape[2]
            scale = self.take(f"{side}_scale", torch.float16, batch, heads, coded, scales)
            store.codes.replace(codes, scale)
            store.tail.replace(tail)
            store.sinks = held
        layer.length, layer.first_code, layer._frozen = length, first, list(frozen)
        layer._set_start(start)
        if not layer.tail_start <= layer.coded <= length or layer.coded < length - layer.window:
            raise VQFormatError(f"{self.prefix}codes cover {layer.coded} of {length} tokens")
        self._check_codebooks(layer)

    def _fill_rotary_mean(self, layer: VQCacheLayer, batch: int, heads: int) -> None:
        """The rotary mean and its frequencies, if there are any: they need not be those that the
        config says of this many tokens."""
        layer.k.rotary_mean, dim = None, layer.k.dim
        if f"{self.prefix}k_rotary_mean" not in self.tensors:
            return
        inv_freq = self.take("k_inv_freq", torch.float32, None)
        interleaved = typed(self.state, "rotary_interleaved", bool)
        if not 0 < 2 * len(inv_freq) <= dim or layer.k.mean is None:
            raise VQFormatError(
                f"{self.prefix}k_inv_freq is {list(inv_freq.shape)} for {dim} numbers"
            )
        mean = self.take("k_rotary_mean", torch.float32, batch, heads, 1, dim)
        if bool(mean[..., 2 * len(inv_freq) :].any()):
            raise VQFormatError(
                f"{self.prefix}k_rotary_mean is not 0 in channels from {2 * len(inv_freq)} on, "
                "which do not turn"
            )
        layer.k.rotary_mean = mean
        layer._rotary = Rotary(inv_freq, interleaved)

    def _smoothing(self, layer: VQCacheLayer, batch: int, heads: int) -> Tensor:
        smoothing = self.take("k_smoothing", torch.float32, batch, heads, 1, layer.k.dim)
        wanted = layer.k.mean is not None and smoothable(layer.k.scheme)
        if not wanted or not in_range(smoothing):
            what = f"not between {1 / MOST} and {MOST:g}" if wanted else "not of this scheme"
            raise VQFormatError(
                f"{self.prefix}k_smoothing of {layer.k.scheme.notation()} is {what}"
            )
        return smoothing

    def _check_codebooks(self, layer: VQCacheLayer) -> None:
        for name, store in _sides(layer):
            if learned(store.scheme):
                continue
            found = self.tensors.get(name)
            if found is None or not torch.equal(found, store.codebook.cpu()):
                raise VQFormatError(
                    f"{name} is not the universal codebook of {store.scheme.notation()} in this "
                    "version of hf_vq; install the version that wrote the file"
                )
