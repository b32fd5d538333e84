"""What `VQCache.save` and `KVCodebooks.save` write for every KV scheme, from seeded codes.

As for weights: a cache is filled and saved, which says which tensors the file has; their numbers
are replaced by seeded ones, in a file without digests, as there once were, which is loaded and
saved.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from hf_vq import KVScheme, VQCache, VQScheme
from hf_vq.cache import KVCodebooks
from hf_vq.formats import KV_SCHEMES, kv_codebook_spec, kv_scheme
from tests.golden.recorded import OLDER
from tests.golden.seeded import seeded_bytes, seeded_floats, seeded_scales, short_text, tensor_row

HEADS, DIM = 2, 16
_SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": HEADS, "head_dim": DIM,
}  # fmt: skip
TURBOQUANT = [
    f"turboquant-{bits}{mode}" for mode in ("", "-nc", "-mse", "-prod") for bits in (4, 3, 2)
]
NAMES = [*KV_SCHEMES, *TURBOQUANT]
CASES: dict[str, list[str]] = {**{name: [name] for name in NAMES}, "u4 and cq-4": ["u4", "cq-4"]}
"""Schemes of the layers, by name: every KV scheme, and a cache with one for each layer."""


def llama(layers: int) -> PreTrainedConfig:
    """A config with layers of full attention."""
    return LlamaConfig(**_SIZES, num_hidden_layers=layers)


def _learned(scheme: VQScheme) -> bool:
    return scheme.codebook in ("channel_group", "tensor")


def _codebook(name: str, shape: tuple[int, ...]) -> Tensor:
    """fp16 entries that are 1/64 of integers of 8 bits, the largest of which is 127."""
    entries = seeded_floats(name, *shape).clamp(min=-127 / 64)
    entries[..., 0, 0] = 127 / 64
    return entries.half()


def codebooks_for(schemes: Sequence[KVScheme]) -> KVCodebooks | None:
    """Seeded codebooks and means, where a scheme has any; a mean in the first layer only."""
    sides: dict[str, list[Tensor | None]] = {"key": [], "value": []}
    for layer, scheme in enumerate(schemes):
        for side, found in sides.items():
            part = getattr(scheme, side)
            name, spec = f"codebook {layer} {side}", kv_codebook_spec(part, HEADS, DIM)
            found.append(_codebook(name, spec.shape) if _learned(part) else None)
    means = [
        seeded_floats(f"mean {layer}", HEADS, DIM) if scheme.centre_keys else None
        for layer, scheme in enumerate(schemes)
    ]
    if all(part is None for part in [*sides["key"], *sides["value"], *means]):
        return None
    scheme = schemes[0] if len(schemes) == 1 else tuple(schemes)
    layers = None if len(schemes) == 1 else [[0.25, 0.5] for _ in schemes]
    return KVCodebooks(scheme, sides["key"], sides["value"], means, layers)


def make_cache(name: str) -> tuple[VQCache, PreTrainedConfig]:
    """An empty cache of a case, and the config of its model."""
    schemes = [kv_scheme(one) for one in CASES[name]]
    config = llama(len(schemes))
    scheme = schemes[0] if len(schemes) == 1 else schemes
    return VQCache(config, scheme, sinks=1, window=4, codebooks=codebooks_for(schemes)), config


def seeded_states(seed: str, tokens: int) -> list[Tensor]:
    """Keys and values [1, heads, tokens, head_dim]."""
    return [seeded_floats(f"{side}{seed}", 1, HEADS, tokens, DIM) for side in ("key", "value")]


def saved_cache(name: str, work: Path, tokens: int = 16, spare: int = 0) -> Path:
    """The file of a case's cache, with seeded numbers (see the module).

    Args:
        tokens: that the cache holds.
        spare: tokens that may be added before one more is coded.
    """
    cache, config = make_cache(name)
    return save_again(cache, config, work, tokens, spare)


def saved_sliding(work: Path) -> Path:
    """The file of a cache with a sliding layer that is coded, and one of full attention."""
    config = Gemma3TextConfig(
        **_SIZES, num_hidden_layers=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return save_again(VQCache(config, sinks=1, window=4, quantize_sliding=True), config, work)


def save_again(
    cache: VQCache, config: PreTrainedConfig, work: Path, tokens: int = 16, spare: int = 0
) -> Path:
    """Fill and save a cache; replace the numbers of the file, load it, and save that."""
    for layer in range(len(cache.layers)):
        cache.update(*seeded_states(f"{layer}", tokens), layer)
    cache.save(work / "filled.safetensors")
    with safe_open(work / "filled.safetensors", "pt") as file:
        about = json.loads(file.metadata()["hf_vq_cache"])
    about.pop("digests")
    about["window"] += spare
    tensors = {
        key: tensor if key.startswith("codebook") else _seeded_like(key, tensor)
        for key, tensor in load_file(work / "filled.safetensors").items()
    }
    save_file(tensors, work / "old.safetensors", {"hf_vq_cache": json.dumps(about)})
    VQCache.load(work / "old.safetensors", config).save(work / "new.safetensors")
    return work / "new.safetensors"


def saved_codebooks(name: str, work: Path) -> Path | None:
    """The file of a case's codebooks, loaded and saved once more; None if there are none."""
    found = codebooks_for([kv_scheme(one) for one in CASES[name]])
    if found is None:
        return None
    found.save(work / "codebooks.safetensors")
    KVCodebooks.load(work / "codebooks.safetensors").save(work / "again.safetensors")
    return work / "again.safetensors"


def saved_older_cache(work: Path) -> Path:
    """The cache that the first version of hf_vq wrote, loaded and saved."""
    VQCache.load(OLDER / "cache-1-k4v2.safetensors", llama(1)).save(work / "new.safetensors")
    return work / "new.safetensors"


def saved_older_codebooks(work: Path) -> Path:
    """The codebooks that an early version of hf_vq wrote, loaded and saved."""
    KVCodebooks.load(OLDER / "codebooks-1-nomad-4.safetensors").save(work / "new.safetensors")
    return work / "new.safetensors"


def file_facts(path: Path) -> dict[str, Any]:
    """Metadata and tensors of a file."""
    with safe_open(path, "pt") as file:
        metadata = sorted((file.metadata() or {}).items())
        rows = {name: tensor_row(file.get_tensor(name)) for name in sorted(file.keys())}
    return {"metadata": {key: short_text(text) for key, text in metadata}, "tensors": rows}


def _seeded_like(key: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return seeded_bytes(key, *tensor.shape)
    if key.endswith("_scale"):
        return seeded_scales(key, *tensor.shape)
    return seeded_floats(key, *tensor.shape, dtype=tensor.dtype)


def facts(name: str, work: Path) -> dict[str, Any]:
    """What is recorded of one of `ALL`; of older files not their tensors, which they hold.

    Args:
        work: an empty folder.
    """
    if name in _OTHERS:
        found = file_facts(_OTHERS[name](work))
        return {"metadata": found["metadata"]} if name.startswith("older") else found
    codebooks = saved_codebooks(name, work)
    found = {"cache": file_facts(saved_cache(name, work))}
    return found if codebooks is None else {**found, "codebooks": file_facts(codebooks)}


_OTHERS: dict[str, Callable[[Path], Path]] = {
    "sliding layers": saved_sliding,
    "older: cache-1-k4v2": saved_older_cache,
    "older: codebooks-1-nomad-4": saved_older_codebooks,
}
ALL = [*CASES, *_OTHERS]
"""Names of all that data/caches.json has."""
