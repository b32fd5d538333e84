"""Codebooks of a KV cache that were learned from recorded keys and values: `KVCodebooks`.

kv_codebooks.safetensors, beside a model:

layers.<i>.key, layers.<i>.value    fp16, of learned schemes: [heads, head_dim / x, entries, x] per
                                    channel group, [1, entries, x] per tensor
layers.<i>.key_mean                 float32 [heads, head_dim], of centred keys
layers.<i>.key_rotary_mean          float32 [heads, head_dim], of those that turn; version 2
layers.<i>.key_smoothing            float32 [heads, head_dim], of those that are smoothed; version 3
metadata["hf_vq_kv"]                JSON: format_version, key_scheme, value_scheme, centre_keys;
                                    lists of schemes, if each layer has one of its own, and then
                                    sensitivity, see `KVCodebooks`; with rotary means
                                    rotary_interleaved; sinks, if they are not 4
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from ..errors import VQCacheError, VQError, VQFormatError, shown
from ..formats.catalog import Allocation, KVScheme, of_layer, scheme_name
from ..formats.scheme import VQScheme
from ..formats.shared import universal_tensor
from ..formats.tensors import kv_codebook_spec
from ..transforms.key_smoothing import MOST, in_range
from . import safetensors_file
from .key_means import Calibrated, smoothable

FILE_NAME = "kv_codebooks.safetensors"
FORMAT_VERSION = 3
"""Without smoothed keys a file is of version 2; without rotary means either, of version 1."""
KEY = "hf_vq_kv"
SINKS = 4
"""First tokens of each sequence that a cache keeps as floats, unless it is told otherwise."""
_SIDES = "key", "value", "key_mean", "key_rotary_mean", "key_smoothing"
_NAME = re.compile(rf"layers\.(0|[1-9][0-9]{{0,3}})\.({'|'.join(_SIDES)})")
_CURE = "Make the file again with `hf-vq calibrate`"


def learned(scheme: VQScheme) -> bool:
    """Whether rows of this scheme need codebooks of their own model."""
    return scheme.codebook in ("channel_group", "tensor")


def needs_codebooks(scheme: Allocation) -> bool:
    """Whether keys or values of this scheme need learned codebooks."""
    if isinstance(scheme, tuple):
        return any(map(needs_codebooks, scheme))
    return learned(scheme.key) or learned(scheme.value)


def title(scheme: Allocation) -> str:
    """The scheme for a message: its name, else what keys and values are."""
    if isinstance(scheme, tuple):
        return f"one scheme for each of {len(scheme)} layers"
    name = scheme_name(scheme)
    return name or f"keys {scheme.key.notation()} and values {scheme.value.notation()}"


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for callers that will want gradients
def universal(scheme: VQScheme, device: torch.device) -> Tensor:
    """The universal codebook of a scheme on a device: all layers share it."""
    return universal_tensor(scheme).to(device)


def codebook_for(scheme: VQScheme, own: Tensor | None, like: Tensor, where: str) -> Tensor:
    """What a layer's keys or values [B, H, n, D] are coded with, on the device of `like`.

    Args:
        own: the layer's learned codebooks; None = the universal one.
        where: the layer, for messages.

    Raises:
        VQCacheError: the learned ones are for other heads.
    """
    if own is None:
        return universal(scheme, like.device)
    heads, dim = like.shape[1], like.shape[3]
    if scheme.has_scale:  # one codebook, whatever the heads
        return own.to(like.device)
    if tuple(own.shape) != kv_codebook_spec(scheme, heads, dim, where).shape:
        raise VQCacheError(
            f"the codebooks of {where} are for {own.shape[0]} heads of "
            f"{own.shape[1] * own.shape[3]}, the model has {heads} heads of {dim}. Make them with "
            "`hf-vq calibrate` and this model."
        )
    return own.to(like.device)


def cure(scheme: Allocation) -> str:
    """What to do where the codebooks of this scheme are missing."""
    name = scheme_name(scheme)
    return (
        f"learn them with `hf-vq calibrate{f' --kv {name}' if name else ''}` and make the cache "
        "with VQCache.from_pretrained"
    )


def find(name: str, revision: str | None = None) -> Path | None:
    """The file of codebooks in a model's folder or repository on the Hub; None if there is none."""
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    try:
        path = name and cached_file(
            name, FILE_NAME, revision=revision,
            **{f"_raise_exceptions_for_{kind}": False for kind in quiet},
        )  # fmt: skip
    except OSError:  # the folder that the model was loaded from is gone
        return None
    return Path(path) if path else None


@dataclass(frozen=True, eq=False, repr=False)
class KVCodebooks:
    """What `hf-vq calibrate` learned of one model, layer by layer; None where there is nothing.

    Args:
        scheme: of the cache that these codebooks are for, or one of each layer.
        keys: codebooks fp16 of each layer's keys (`kv_codebook_spec`); all None if the scheme of
            the keys is universal.
        values: likewise.
        key_means: float32 [H, head_dim], subtracted from keys before they are coded. A layer whose
            learned codebooks are of centred keys needs one; without `scheme.centre_keys` all are
            None.
        sensitivity: what decided about schemes that differ from layer to layer, for the record: of
            each layer, the divergence that coding its keys alone adds, and its values alone.
        key_rotary_means: float32 [H, head_dim], what is constant in the keys before they turn with
            the position (`ops.rotary_mean`), beside `key_means`; None = there is none.
        rotary_interleaved: keys turn in pairs of channels (2 p, 2 p + 1), else (p, p + r).
        sinks: first tokens of each sequence, of which nothing was learned.
        key_smoothings: float32 [H, head_dim], by which keys less their means are multiplied before
            they are coded (`transforms.key_smoothing`); None = 1.

    Raises:
        VQFormatError: a tensor is missing, too many, of a wrong shape or type, or not finite.
    """

    scheme: Allocation
    keys: list[Tensor | None]
    values: list[Tensor | None]
    key_means: list[Tensor | None]
    sensitivity: list[list[float]] | None = None
    key_rotary_means: list[Tensor | None] | None = None
    rotary_interleaved: bool = False
    sinks: int = SINKS
    key_smoothings: list[Tensor | None] | None = None

    def __post_init__(self) -> None:
        lists = self._lists
        if any(not isinstance(each, list) for each in lists) or len(set(map(len, lists))) != 1:
            raise VQFormatError(
                "KVCodebooks needs lists of one length, with a tensor or None for each layer."
            )
        if isinstance(self.scheme, tuple) and len(self.scheme) != len(self):
            raise VQFormatError(
                f"there are {len(self.scheme)} schemes and tensors for {len(self)} layers. {_CURE}."
            )
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise VQFormatError(
                f"the sinks of KVCodebooks are a number of tokens; got {shown(self.sinks)}."
            )
        for layer, (key, value, mean, turning, smoothing) in enumerate(zip(*lists, strict=True)):
            where, scheme = f"layer {layer}", of_layer(self.scheme, layer)
            _check_codebook(f"{where}, keys", scheme.key, key)
            _check_codebook(f"{where}, values", scheme.value, value)
            _check_mean(where, scheme, key, mean)
            _check_rotary_mean(where, mean, turning)
            _check_smoothing(where, scheme, mean, smoothing)
            both = learned(scheme.key) and learned(scheme.value)
            if both and (key is None) != (value is None):
                raise VQFormatError(
                    f"{where} has codebooks of its {'values' if key is None else 'keys'} only; "
                    f"{title(scheme)} needs both. {_CURE}."
                )
            per_head = both and not (scheme.key.has_scale or scheme.value.has_scale)
            if per_head and key is not None and value is not None and len(key) != len(value):
                raise VQFormatError(
                    f"{where} has codebooks for {key.shape[0]} heads of keys and {value.shape[0]} "
                    f"of values. {_CURE}."
                )
        if all(part is None for each in lists for part in each):
            raise VQFormatError(f"there is no codebook and no mean for any layer. {_CURE}.")

    @property
    def _lists(self) -> tuple[list[Tensor | None], ...]:
        """What each layer has, in the order of `_SIDES`."""
        absent: list[Tensor | None] = [None] * len(self.keys)
        turning, smoothing = (
            absent if found is None else found
            for found in (self.key_rotary_means, self.key_smoothings)
        )
        return self.keys, self.values, self.key_means, turning, smoothing

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"KVCodebooks({title(self.scheme)}, {len(self)} layers)"

    def for_model(
        self, scheme: Allocation, layers: int
    ) -> tuple[list[Calibrated | None], list[tuple[Tensor | None, Tensor | None]]]:
        """Means of the keys, and codebooks of keys and of values, for each of a model's layers.

        Raises:
            VQCacheError: they are of another scheme, or of a model with more layers.
        """
        if self.scheme != scheme:
            raise VQCacheError(
                f"the codebooks are of {title(self.scheme)}, the cache is of {title(scheme)}; "
                f"{cure(scheme)}."
            )
        if len(self) > layers:
            raise VQCacheError(
                f"there are codebooks for {len(self)} layers, the model has {layers}: they are of "
                f"another model; {cure(scheme)}."
            )
        more = [None] * (layers - len(self))
        books = zip([*self.keys, *more], [*self.values, *more], strict=True)
        return [*self.means, *more], list(books)

    @property
    def means(self) -> list[Calibrated | None]:
        """The means of each layer's keys."""
        return [
            None if mean is None else Calibrated(mean, turning, self.rotary_interleaved, smoothing)
            for mean, turning, smoothing in zip(*self._lists[2:], strict=True)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names they have in a file."""
        sides = dict(zip(_SIDES, self._lists, strict=True))
        return {
            f"layers.{layer}.{side}": part.detach().cpu().contiguous().clone()
            for side, parts in sides.items()
            for layer, part in enumerate(parts)
            if part is not None
        }

    @classmethod
    def from_tensors(
        cls,
        scheme: Allocation,
        tensors: dict[str, Tensor],
        sensitivity: list[list[float]] | None = None,
        rotary_interleaved: bool = False,
        sinks: int = SINKS,
    ) -> KVCodebooks:
        """The inverse of `tensors`, but for layers without any behind the last that has some (with
        a scheme of each layer all are there).

        Raises:
            VQFormatError: as the constructor, or a name is not one of `tensors`.
        """
        found = {name: _NAME.fullmatch(name) for name in tensors}
        if wrong := sorted(name for name, match in found.items() if match is None):
            raise VQFormatError(f"unexpected tensors {wrong[:4]}. {_CURE}.")
        numbers = [int(match[1]) for match in found.values() if match is not None]
        last = max(numbers, default=-1) + 1
        layers = range(max(last, len(scheme)) if isinstance(scheme, tuple) else last)
        key, value, mean, turning, smoothing = (
            [tensors.get(f"layers.{layer}.{side}") for layer in layers] for side in _SIDES
        )
        turns, smooths = (any(x is not None for x in parts) for parts in (turning, smoothing))
        return cls(
            scheme, key, value, mean, sensitivity, turning if turns else None, rotary_interleaved,
            sinks, smoothing if smooths else None,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the file `path`: the old one stays whole until the new one is.

        Raises:
            VQCacheError: it cannot be written.
        """
        turns = self.key_rotary_means is not None
        description = {
            "format_version": FORMAT_VERSION if self.key_smoothings is not None else 1 + turns,
            **described(self.scheme),
            **({} if self.sensitivity is None else {"sensitivity": self.sensitivity}),
            **({"rotary_interleaved": self.rotary_interleaved} if turns else {}),
            **({} if self.sinks == SINKS else {"sinks": self.sinks}),
        }
        safetensors_file.write(Path(path), self.tensors(), KEY, description)

    @classmethod
    def load(cls, path: Path) -> KVCodebooks:
        """Read the file that `save` wrote.

        Raises:
            VQFormatError: it is missing, damaged, newer, or not such a file.
        """
        description, tensors = safetensors_file.read(
            Path(path), KEY, FORMAT_VERSION, "KV codebooks", "`hf-vq calibrate`"
        )
        try:
            known = {"rotary_interleaved": False, "sinks": SINKS, **description}
            return cls.from_tensors(
                scheme_in(description), tensors, description.get("sensitivity"),
                safetensors_file.typed(known, "rotary_interleaved", bool),
                safetensors_file.typed(known, "sinks", int),
            )  # fmt: skip
        except KeyError as error:
            raise VQFormatError(f"{path}: its description lacks {error}. {_CURE}.") from None
        except VQError as error:
            raise VQFormatError(f"{path}: {error}") from None


def described(scheme: Allocation) -> dict[str, Any]:
    """A scheme, or one of each layer, as JSON types."""
    if not isinstance(scheme, tuple):
        return {
            "key_scheme": scheme.key.spec(),
            "value_scheme": scheme.value.spec(),
            "centre_keys": scheme.centre_keys,
        }
    each = [described(one) for one in scheme]
    return {name: [one[name] for one in each] for name in each[0]} if each else {}


def scheme_in(description: dict[str, Any]) -> Allocation:
    """The inverse of `described`.

    Raises:
        KeyError: a part is missing.
        VQFormatError, VQSchemeError: a part is of a wrong type, or no scheme.
    """
    names = "key_scheme", "value_scheme", "centre_keys"
    if not isinstance(description["key_scheme"], list):
        key, value, centre = (
            safetensors_file.typed(description, name, kind)
            for name, kind in zip(names, (str, str, bool), strict=True)
        )
        return KVScheme(VQScheme.parse(key), VQScheme.parse(value), centre)
    lists = [safetensors_file.typed(description, name, list) for name in names]
    if len(set(map(len, lists))) != 1:
        raise VQFormatError("its schemes are not one for each layer")
    layers = (dict(zip(names, each, strict=True)) for each in zip(*lists, strict=True))
    found = [scheme_in(layer) for layer in layers]
    if not all(isinstance(each, KVScheme) for each in found):
        raise VQFormatError("its schemes are not one for each layer")
    return tuple(each for each in found if isinstance(each, KVScheme))


def _check_codebook(where: str, scheme: VQScheme, codebook: Tensor | None) -> None:
    if codebook is None:
        return
    if not learned(scheme):
        raise VQFormatError(
            f"{where}: codebooks were given, but {scheme.notation()} has a universal one."
        )
    shape = tuple(codebook.shape) if isinstance(codebook, Tensor) else ()
    size, entries = scheme.vector_size, scheme.entries
    books = "1" if scheme.has_scale else f"heads, head_dim / {size}"
    fits = len(shape) == (3 if scheme.has_scale else 4) and 0 not in shape
    if fits:
        heads, dim = (1, size) if scheme.has_scale else (shape[0], shape[1] * size)
        fits = shape == kv_codebook_spec(scheme, heads, dim, where).shape
    if not fits or codebook.dtype != torch.float16:
        got = f"{codebook.dtype} {list(shape)}" if shape else type(codebook).__name__
        raise VQFormatError(
            f"{where}: codebooks of {scheme.notation()} are float16 [{books}, {entries}, {size}]; "
            f"got {got}. {_CURE}."
        )
    _check_finite(where, codebook)


def _check_mean(where: str, scheme: KVScheme, key: Tensor | None, mean: Tensor | None) -> None:
    if mean is None:
        if key is not None and scheme.centre_keys:
            raise VQFormatError(
                f"{where} has codebooks of centred keys but no mean of its keys. {_CURE}."
            )
        return
    if not scheme.centre_keys:
        raise VQFormatError(
            f"{where}: a mean of the keys was given, but {title(scheme)} does not centre keys."
        )
    fits = isinstance(mean, Tensor) and mean.ndim == 2 and mean.dtype == torch.float32
    if fits and key is not None and not scheme.key.has_scale:
        fits = tuple(mean.shape) == (key.shape[0], key.shape[1] * key.shape[3])
    if not fits:
        got = f"{mean.dtype} {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean)
        raise VQFormatError(
            f"{where}: the mean of the keys is float32 [heads, head_dim]; got {got}. {_CURE}."
        )
    _check_finite(f"{where}, mean of the keys", mean)


def _check_rotary_mean(where: str, mean: Tensor | None, turning: Tensor | None) -> None:
    if turning is None:
        return
    fits = isinstance(turning, Tensor) and turning.dtype == torch.float32
    if mean is None or not fits or turning.shape != mean.shape:
        got = f"{turning.dtype} {list(turning.shape)}" if fits else type(turning).__name__
        wanted = "none" if mean is None else f"float32 {list(mean.shape)}, as their mean"
        raise VQFormatError(
            f"{where}: the rotary mean of the keys must be {wanted}; got {got}. {_CURE}."
        )
    _check_finite(f"{where}, rotary mean of the keys", turning)


def _check_smoothing(
    where: str, scheme: KVScheme, mean: Tensor | None, smoothing: Tensor | None
) -> None:
    if smoothing is None:
        return
    fits = isinstance(smoothing, Tensor) and smoothing.dtype == torch.float32
    if not fits or mean is None or smoothing.shape != mean.shape or not smoothable(scheme.key):
        got = f"{smoothing.dtype} {list(smoothing.shape)}" if fits else type(smoothing).__name__
        known = mean is not None and smoothable(scheme.key)
        wanted = f"float32 {list(mean.shape)}" if known and mean is not None else "none"
        raise VQFormatError(
            f"{where}: the smoothing of the keys of {title(scheme)} must be {wanted}; got {got}. "
            f"{_CURE}."
        )
    if not in_range(smoothing):
        raise VQFormatError(
            f"{where}: the smoothing of the keys is not between {1 / MOST} and {MOST:g}. {_CURE}."
        )


def _check_finite(where: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise VQFormatError(f"{where}: NaN or infinity. {_CURE}.")
