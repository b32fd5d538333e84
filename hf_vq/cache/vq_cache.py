"""`VQCache`: a KV cache for Transformers that stores codebook indices."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)

from .. import patches
from ..errors import VQCacheError
from ..formats.catalog import (
    Allocation,
    KVScheme,
    kv_allocation,
    scheme_name,
)
from .codebooks import SINKS, KVCodebooks, cure, find, learned, needs_codebooks, title
from .key_means import Calibrated
from .layer import LayerOptions, VQCacheLayer
from .prompt import Prompt
from .rotary import RopeFrequencies
from .sliding_layer import VQSlidingCacheLayer
from .static_layer import VQStaticLayer


class VQCache(Cache):
    """Keys and values as vector-quantization codes, with sinks and the recent window as floats.

    Keys are centred by means that are frozen per row and head (one of them turns with the position,
    as rotary embeddings turn the keys), multiplied by what the prompt's queries say (`transforms.
    key_smoothing`), rotated by a Hadamard matrix over head_dim, and coded with a universal codebook
    and one unbiased fp16 scale |x|^2 / <x, q> per token and head; values likewise, without means
    and factors. Codes are written once, but for keys of a prompt. Full-attention layers are coded;
    sliding-window layers stay in the model's dtype unless `quantize_sliding`; Mamba, linear
    attention and shared layers are those of `DynamicCache`.

        model.generate(**inputs, past_key_values=VQCache(model.config))

    Attention reads the codes with the attention implementations `sdpa`, `eager`, flash and `vq`;
    where it cannot, it decodes them at every step, which is right but slow (`fallbacks` counts it,
    `strict` forbids it).

    An encoder-decoder model needs `EncoderDecoderCache(VQCache(config), DynamicCache(config=
    config))`: cross-attention over a `VQCache` works too, but is decoded at every step.

    Args:
        config: of the model.
        scheme: `u4` (4 bits), `u3`, `u2`, `k4v2` (keys 4 bits, values 2), another name of the
            catalogue, or a `KVScheme`; or a list with one for each layer (`allocate_kv` finds it).
            Universal codebooks add one fp16 scale per token and head.
        sinks: tokens at the start of each row that stay floats.
        window: the newest tokens that stay floats, for each query.
        max_cache_len: allocate for this many tokens at once, and refuse more; None = grow.
        static: with `max_cache_len`, whether the memory never moves, so that decoding compiles
            (`model.generate` does it by itself on a GPU; docs/kv_cache.md). Such a cache keeps its
            rows, and goes back by a few tokens only. None = on a GPU, where it can be.
        strict: raise instead of decoding for an attention that cannot read codes.
        quantize_sliding: code sliding-window layers too.
        offloading: keep all layers but the running one on the CPU (needs a GPU, else ignored).
        key_means: calibrated mean of each layer's keys [heads, head_dim] (None for a layer that has
            none), instead of measuring it, and factors, on the prompt.
        codebooks: what `hf-vq calibrate` learned of this model; needed by schemes such as
            `nomad-4`, whose codebooks are not universal. `from_pretrained` finds them.

    Raises:
        VQCacheError: an argument has the wrong type or value, or the codebooks are missing or not
            of this scheme and model.
        VQSchemeError: the scheme is unknown.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        scheme: str | KVScheme | Sequence[str | KVScheme] = "u4",
        sinks: int = SINKS,
        window: int = 64,
        max_cache_len: int | None = None,
        strict: bool = False,
        *,
        static: bool | None = None,
        quantize_sliding: bool = False,
        offloading: bool = False,
        key_means: Sequence[Tensor | Calibrated | None] | None = None,
        codebooks: KVCodebooks | None = None,
    ) -> None:
        patches.apply(patches.CACHE)
        if not isinstance(config, PreTrainedConfig):
            raise VQCacheError(
                f"VQCache needs the model's config as its first argument (VQCache(model.config)); "
                f"got {type(config).__name__}."
            )
        _check_int("sinks", sinks, 0)
        _check_int("window", window, 0)
        if max_cache_len is not None:
            _check_int("max_cache_len", max_cache_len, 1)
        for name, flag in (
            ("strict", strict), ("quantize_sliding", quantize_sliding), ("offloading", offloading)
        ):  # fmt: skip
            if not isinstance(flag, bool):
                raise VQCacheError(f"VQCache({name}=...) must be True or False; got {flag!r}.")
        if static is not None and not isinstance(static, bool):
            raise VQCacheError(f"VQCache(static=...) must be True, False or None; got {static!r}.")
        self.options = LayerOptions(
            _usable(kv_allocation(scheme)), sinks, window, max_cache_len, strict,
            RopeFrequencies(config),
        )  # fmt: skip
        self.quantize_sliding = quantize_sliding
        self.prompt = Prompt()
        # DynamicCache knows, in every version of Transformers, which layer of a config is what.
        layers = DynamicCache(config=config).layers
        _check_count(self.options.scheme, len(layers))
        means, books = _calibrated(self.options, len(layers), key_means, codebooks)
        self.codebooks = codebooks
        for index, layer in enumerate(layers):
            arguments = self.options, self.prompt, index, means[index], books[index]
            if type(layer) is DynamicLayer:
                layers[index] = VQCacheLayer(*arguments)
            elif type(layer) is DynamicSlidingWindowLayer and quantize_sliding:
                layers[index] = VQSlidingCacheLayer(*arguments, sliding_window=layer.sliding_window)
            if isinstance(layers[index], VQCacheLayer):
                _check_complete(layers[index].scheme, index, books[index])
        if not any(isinstance(layer, VQCacheLayer) for layer in layers):
            warnings.warn(
                f"VQCache codes no layer of {type(config).__name__}: none has full attention. "
                "quantize_sliding=True codes sliding-window layers.",
                stacklevel=2,
            )
        super().__init__(layers=layers, offloading=offloading and torch.cuda.is_available())
        self._static: list[Any] = []  # layers that can be compiled, until it is decided to use them
        if static is not False:
            problem = self._make_static(config, means, books)
            if static and problem:
                raise VQCacheError(f"VQCache(static=True) is not possible: {problem}.")
        if static:
            self.decide(static)

    def __setstate__(self, state: dict[str, Any]) -> None:
        patches.apply(patches.CACHE)  # a cache may come from another process
        self.__dict__.update(state)

    def _make_static(self, config: PreTrainedConfig, means: Any, books: Any) -> str | None:
        """Make the layers that can be compiled, or say why there are none."""
        if self.options.max_cache_len is None:
            return "it needs max_cache_len"
        if self.quantize_sliding or self.offloading:
            return f"it has no {'offloading' if self.offloading else 'quantize_sliding'}"
        try:
            layers = StaticCache(config=config, max_cache_len=self.options.max_cache_len).layers
        except KeyError as kind:
            return f"Transformers has no static layer of the kind {kind}"
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_attention_heads", None)
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        groups = 1  # unless all layers have as many
        if isinstance(heads, int) and isinstance(kv_heads, int):
            groups = max(heads // kv_heads, 1)
        for index, layer in enumerate(layers):
            if not layer.is_compileable:
                return f"layer {index} is a {type(layer).__name__}, which does not compile"
            if type(layer) is StaticLayer:
                own = VQStaticLayer(self.options, self.prompt, index, means[index], books[index])
                own.groups = groups
                layers[index] = own
        self._static = layers
        return None

    def decide(self, static: bool) -> None:
        """Settle for memory that never moves, or for memory that grows, where both are possible.

        `model.generate` does this by itself, and so does the first `update`.
        """
        if static and self._static:
            self.layers = self._static
        self._static = []

    @classmethod
    def from_pretrained(
        cls,
        model_or_dir: PreTrainedModel | str | os.PathLike[str],
        scheme: str | KVScheme | Sequence[str | KVScheme] | None = None,
        **options: Any,
    ) -> VQCache:
        """A cache with the codebooks that were calibrated for a model: kv_codebooks.safetensors.

            VQCache.from_pretrained(model)                  # with the scheme of that file
            VQCache.from_pretrained("out", "nomad-4", window=128)

        Args:
            model_or_dir: a model that was loaded, its folder, or its name on the Hub.
            scheme: as in `VQCache`; None = that of the file, `u4` without one.
            **options: of `VQCache`.

        Raises:
            VQCacheError: the scheme needs codebooks and there are none, or none of this scheme.
            VQFormatError: the file is damaged.
        """
        if isinstance(model_or_dir, (str, os.PathLike)):
            name = os.fspath(model_or_dir)
            config = AutoConfig.from_pretrained(name)
        elif isinstance(model_or_dir, PreTrainedModel):
            config, name = model_or_dir.config, model_or_dir.config.name_or_path
        else:
            raise VQCacheError(
                "VQCache.from_pretrained needs a model, its folder or its name on the Hub; got "
                f"{type(model_or_dir).__name__}."
            )
        path = find(name, getattr(config, "_commit_hash", None))
        codebooks = None if path is None else KVCodebooks.load(path)
        if scheme is None:
            scheme = "u4" if codebooks is None else codebooks.scheme
        wanted = kv_allocation(scheme)
        if codebooks is not None and codebooks.scheme != wanted:
            if needs_codebooks(wanted):
                raise VQCacheError(
                    f"{path} holds codebooks of {title(codebooks.scheme)}, not of {title(wanted)}; "
                    f"{cure(wanted)}."
                )
            codebooks = None
        return cls(config, scheme, codebooks=codebooks, **options)

    def expect_prompt(
        self, attention_mask: Tensor | None = None, length: int | None = None
    ) -> None:
        """Tell an empty cache about the prompt that comes; `model.generate` does this by itself.

        Call it before a forward with left padding, so that each row's first real tokens become its
        sinks and padding stays out of the mean of its keys.

        Args:
            attention_mask: [batch, tokens], nonzero for real tokens.
            length: tokens of the prompt, if the first forward brings more than it.
        """
        if self.get_seq_length() == 0:
            self.prompt.expect(attention_mask, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to one layer; see `VQCacheLayer.update`."""
        if layer_idx >= len(self.layers):
            raise VQCacheError(
                f"the cache has {len(self.layers)} layers, the model has a layer {layer_idx}; make "
                "the cache from the config of this model."
            )
        if self._static:
            self.decide(key_states.device.type == "cuda")
        if not self.offloading or key_states.device.type != "cuda":
            # On the CPU everything is where offloading would move it, and there are no streams.
            states: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
                key_states, value_states, *args, **kwargs
            )
            return states
        # Transformers 5.17 fetches a layer while its copy to the CPU may still be under way.
        self.prefetch_stream.wait_stream(torch.cuda.current_stream(key_states.device))
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def reset(self) -> None:
        """Forget all tokens and what was said of the prompt."""
        super().reset()
        self.prompt.expect(None, None)
        self.stop_past_recording()

    def stop_past_recording(self) -> None:
        """Undo `activate_past_recording`, which lets the floats grow from crop to crop.

        `model.generate` does this by itself: assisted decoding leaves the recording on.
        """
        for layer in self.layers:
            if isinstance(layer, VQCacheLayer):
                layer.stop_past_recording()
            elif isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = False

    @property
    def coded_layers(self) -> list[VQCacheLayer]:
        """The layers that hold codes."""
        layers = [layer for layer in self.layers if isinstance(layer, VQCacheLayer)]
        for layer in layers:
            layer.sync_length()
        return layers

    @property
    def fallbacks(self) -> dict[int, int]:
        """How often each coded layer was decoded to dense keys or values, by layer number."""
        return {layer.index: layer.fallbacks for layer in self.coded_layers}

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held: codes, scales, floats, means."""
        coded = sum(layer.k.nbytes + layer.v.nbytes for layer in self._started())
        return coded + sum(_dense_bytes(layer) for layer in self.layers)

    @property
    def allocated_nbytes(self) -> int:
        """`nbytes` plus the room that is kept ahead of the tokens."""
        coded = sum(layer.k.allocated + layer.v.allocated for layer in self._started())
        return coded + sum(_dense_bytes(layer) for layer in self.layers)

    @property
    def bits_per_element(self) -> float:
        """Stored bits of a coded number, scales included; 0.0 before the first update."""
        bits = elements = 0
        for layer in self._started():
            heads = layer.k.sinks.shape[1]
            bits += heads * (layer.k.token_bits + layer.v.token_bits)
            elements += heads * (layer.k.dim + layer.v.dim)
        return bits / elements if elements else 0.0

    @property
    def overall_bits_per_element(self) -> float:
        """8 `nbytes` over the numbers of all tokens of the coded layers, floats included."""
        elements = sum(
            math.prod(layer.k.sinks.shape[:2]) * (layer.k.dim + layer.v.dim) * layer.held
            for layer in self._started()
        )
        stored = sum(layer.k.nbytes + layer.v.nbytes for layer in self._started())
        return 8 * stored / elements if elements else 0.0

    def _started(self) -> list[VQCacheLayer]:
        return [layer for layer in self.coded_layers if layer.is_initialized]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file: a prefilled prompt that can be shipped.

        Raises:
            VQCacheError: a layer is of a kind that cannot be saved, or the file cannot be written.
        """
        from .file import save

        save(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        *,
        device: str | torch.device = "cpu",
        strict: bool = False,
    ) -> VQCache:
        """Read what `save` wrote; generation goes on as if it had not been saved.

        Args:
            config: of the model that goes on; its layers must be those of the saved cache.
            device: of the model.
            strict: as in `VQCache`.

        Raises:
            VQFormatError: the file is not a saved cache, is damaged, newer, or of another model.
        """
        from .file import load

        return load(Path(path), config, torch.device(device), strict)

    def __repr__(self) -> str:
        scheme = scheme_name(self.options.scheme) or title(self.options.scheme)
        coded, layers = len(self.coded_layers), len(self.layers)
        return (
            f"VQCache(scheme={scheme!r}, sinks={self.options.sinks}, window={self.options.window}, "
            f"{coded} of {layers} layers coded, {int(self.get_seq_length())} tokens, "
            f"{self.nbytes} bytes)"
        )


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise VQCacheError(f"VQCache({name}=...) must be an integer >= {low}; got {value!r}.")


def _usable(allocation: Allocation) -> Allocation:
    for scheme in allocation if isinstance(allocation, tuple) else (allocation,):
        _check_usable(scheme)
    return allocation


def _check_usable(scheme: KVScheme) -> None:
    for part in (scheme.key, scheme.value):
        problem = {
            f"a codebook per {part.codebook}": part.codebook == "tile",
            "a codebook of integers": part.largest_entry > 0,
            "residual stages": part.residuals != 1,
            "a lattice": part.lattice is not None,
            f"a stored rotation ({part.rotation})": part.rotation not in ("none", "hadamard"),
        }
        for what, wrong in problem.items():
            if wrong:
                raise VQCacheError(
                    f"{scheme_name(scheme) or part.notation()} needs {what}, which VQCache cannot "
                    "use. Use u4, u3, u2 or k4v2."
                )


def _check_count(scheme: Allocation, layers: int) -> None:
    if isinstance(scheme, tuple) and len(scheme) != layers:
        raise VQCacheError(
            f"VQCache(scheme=[...]) lists {len(scheme)} schemes; the model has {layers} layers."
        )


def _calibrated(
    options: LayerOptions,
    layers: int,
    key_means: Sequence[Tensor | Calibrated | None] | None,
    codebooks: KVCodebooks | None,
) -> tuple[Sequence[Calibrated | None], Sequence[tuple[Tensor | None, Tensor | None]]]:
    """Of each layer: the means of its keys, and the codebooks of its keys and its values."""
    means, scheme = _checked_means(key_means, layers), options.scheme
    if codebooks is None:
        if needs_codebooks(scheme):
            raise VQCacheError(f"{title(scheme)} needs learned codebooks: {cure(scheme)}.")
        return means, [(None, None)] * layers
    if not isinstance(codebooks, KVCodebooks):
        raise VQCacheError(
            f"VQCache(codebooks=...) must be KVCodebooks; got {type(codebooks).__name__}."
        )
    if key_means is not None:
        raise VQCacheError("VQCache takes key_means or codebooks, which hold means, but not both.")
    if needs_codebooks(scheme) and not options.sinks and codebooks.sinks:
        warnings.warn(
            f"nothing was learned of the first {codebooks.sinks} tokens of sequences, whose keys "
            "are unlike all others, and a cache with sinks=0 codes them: it may lose much. Learn "
            "with `hf-vq calibrate --sinks 0`, or keep sinks where the cache can.",
            stacklevel=3,
        )
    return codebooks.for_model(scheme, layers)


def _check_complete(
    scheme: KVScheme, layer: int, books: tuple[Tensor | None, Tensor | None]
) -> None:
    for side, part, book in zip(("keys", "values"), (scheme.key, scheme.value), books, strict=True):
        if learned(part) and book is None:
            raise VQCacheError(
                f"there are no codebooks for the {side} of layer {layer}, which {title(scheme)} "
                f"needs; {cure(scheme)}."
            )


def _checked_means(
    means: Sequence[Tensor | Calibrated | None] | None, layers: int
) -> list[Calibrated | None]:
    if means is None:
        return [None] * layers
    bad = not isinstance(means, Sequence) or len(means) != layers
    if bad or any(m is not None and not isinstance(m, (Tensor, Calibrated)) for m in means):
        raise VQCacheError(
            f"VQCache(key_means=...) must list one tensor [heads, head_dim] or None for each of "
            f"the {layers} layers."
        )
    return [Calibrated(mean) if isinstance(mean, Tensor) else mean for mean in means]


def _dense_bytes(layer: Any) -> int:
    if isinstance(layer, VQCacheLayer):
        return 0
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        tensors += list((getattr(layer, name, None) or {}).values())
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
