"""Rows of KV caches: `VQCache` as users have it, and other methods with the same exact tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_vq.cache import VQCache
from hf_vq.evaluation import libraries

from .. import baselines

SINKS, WINDOW = 4, 64
SCHEMES = ("u4", "u3", "k4v2", "u2", "nomad-u4", "turboquant-4", "turboquant-2")
WITHOUT_WINDOW = ("u4", "u3", "u2")
BEHIND_LONG_PROMPTS = ("u4", "u3", "u2", "fp8-e4m3", "kivi-4-g32")
_KIVI_GROUP = 32


@dataclass(frozen=True)
class CacheRow:
    """A KV cache.

    Args:
        name: of the row.
        kind: `scheme` or `peer`.
        new: a model's config -> an empty cache.
        bits: a filled cache -> stored bits of a number held as codes.
    """

    name: str
    kind: str
    new: Callable[[Any], Any]
    bits: Callable[[Any], float]


class SimulatedLayer(DynamicLayer):
    """Keys and values as floats, of which those that a cache would hold as codes are read rounded:
    all but SINKS first and WINDOW newest tokens. A group of tokens is rounded when it is whole.

    Args:
        keys, values: [B, H, n, D] float32 -> the same, stored and read back.
        group: tokens that are coded together.
    """

    def __init__(
        self, keys: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor], group: int
    ) -> None:
        super().__init__()
        self.round, self.group = (keys, values), group
        self.coded: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kw: Any) -> Any:
        """Append, and return what attention reads."""
        exact = super().update(key_states, value_states, *args, **kw)
        if not self.coded:
            self.coded = [x[:, :, :0] for x in exact]
        start = SINKS + self.coded[0].shape[2]
        count = (exact[0].shape[2] - WINDOW - start) // self.group * self.group
        if count > 0:
            news = [code(x[:, :, start : start + count].float()).to(x.dtype)
                    for code, x in zip(self.round, exact, strict=True)]  # fmt: skip
            self.coded = [torch.cat(pair, 2) for pair in zip(self.coded, news, strict=True)]
        end = SINKS + self.coded[0].shape[2]
        return tuple(
            torch.cat([x[:, :, :SINKS], coded, x[:, :, end:]], 2) if coded.shape[2] else x
            for x, coded in zip(exact, self.coded, strict=True)
        )


def _simulated(
    keys: Callable[[Tensor], Tensor],
    values: Callable[[Tensor], Tensor],
    group: int,
    config: Any,
) -> Any:
    cache = DynamicCache(config=config)
    cache.layers = [
        SimulatedLayer(keys, values, group) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


def _own(scheme: str, window: int, config: Any) -> VQCache:
    return VQCache(config, scheme, SINKS, window)


def _own_bits(cache: VQCache) -> float:
    return float(cache.bits_per_element)


def _constant(bits: float, cache: Any) -> float:
    return bits


def _fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def rows() -> list[CacheRow]:
    """Every row of KV caches, in the order of the table."""
    found = [CacheRow(name, "scheme", partial(_own, name, WINDOW), _own_bits) for name in SCHEMES]
    found += [
        CacheRow(f"{name}-window-0", "scheme", partial(_own, name, 0), _own_bits)
        for name in WITHOUT_WINDOW
    ]
    found.append(
        CacheRow("fp8-e4m3", "peer", partial(_simulated, _fp8, _fp8, 1), partial(_constant, 8.0))
    )
    for bits in (4, 2):
        keys = partial(baselines.per_channel, bits=bits, tokens=_KIVI_GROUP)
        values = partial(baselines.asymmetric, bits=bits, group=_KIVI_GROUP)
        stored = bits + 32 / _KIVI_GROUP
        found.append(
            CacheRow(f"kivi-{bits}-g32", "peer", partial(_simulated, keys, values, _KIVI_GROUP),
                     partial(_constant, stored))
        )  # fmt: skip
    for name, peer in libraries.CACHE_PEERS.items():
        new = partial(libraries.quantized_cache, peer)
        found.append(CacheRow(f"quantizedcache-{name}", "peer", new, libraries.cache_bits))
    return found
