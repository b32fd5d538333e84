"""Second moments of the inputs of layers: H = mean of x x^T, once for layers with one input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Site:
    """Layers that read the same tensor: queries, keys and values; the halves of a gated MLP.

    Args:
        layers: their names; the first one counts.
        total: sum of x x^T [in, in], float32: the damping of H is far above its rounding.
        tokens: number of inputs x.
    """

    layers: list[str]
    total: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """Count inputs [..., in]."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.total.addmm_(rows.T, rows)
        self.tokens += len(rows)

    @property
    def moments(self) -> Tensor:
        """H [in, in], float32."""
        return self.total / self.tokens


class Listener:
    """Hears what layers are given, while `listening`.

    Attributes:
        sites: in the order in which they were first heard; a layer that was never called, or
            never with a token, has none.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._site: dict[str, Site] = {}  # by layer
        self._heard: list[tuple[Tensor, Site]] = []  # in this pass; kept alive, so told by identity

    @contextmanager
    def listening(self, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        """Hear one forward pass of `layers`."""
        handles = [
            layer.register_forward_pre_hook(partial(self._hear, name), with_kwargs=True)
            for name, layer in layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._heard.clear()

    def _hear(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if not x.numel():  # an expert that no token was sent to
            return
        site = self._site.get(name)
        if site is None:
            site = next((site for heard, site in self._heard if heard is x), None)
            if site is None:
                size = x.shape[-1]
                site = Site([], torch.zeros(size, size, dtype=torch.float32, device=x.device))
                self.sites.append(site)
            site.layers.append(name)
            self._site[name] = site
        if site.layers[0] == name:
            self._heard.append((x, site))
            site.add(x)
