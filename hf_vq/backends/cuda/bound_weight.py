"""`BoundWeight`: what launches with one stored weight have in common, an attribute of its codes.

It lives as long as the codes do, whoever owns them, and keeps no tensor alive. Copies of the codes
start without one. It knows who wrote the weight since its last launch: only then must a kernel wait
for those before it before it reads weights (kernels/cuda/primitives/pdl.cuh).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

State = tuple[tuple[int, ...], int]

ATTRIBUTE = "_hf_vq_bound"
"""Of codes that were launched from Python."""


def state(tensors: Sequence[Tensor], stream: int) -> State | None:
    """What a launch now would see: counters that every write moves, and the stream; None where
    nothing counts."""
    try:
        return tuple([tensor._version for tensor in tensors]), stream
    except RuntimeError:  # made in inference mode: they do not count
        return None


def is_settled(now: State | None, last: State | None) -> bool:
    """Whether nobody wrote between two such states."""
    if now is None or last is None or now[0] != last[0]:
        return False
    # In a graph, a node of it would have written them.
    return now[1] == last[1] or torch.cuda.is_current_stream_capturing()


class BoundWeight:
    """Launches with one stored weight; of experts, which share one tensor, with all of them.

    Attributes:
        layers: launches of each matrix, by where its tensors are (`linear.fused`).
        latest: the one of `layers` that ran last.
    """

    def __init__(self, codes: Tensor) -> None:
        self._codes = weakref.ref(codes)
        self.layers: dict[Any, Any] = {}
        self.latest: Any = None
        self._last: tuple[tuple[Any, ...], tuple[int, ...], State | None] | None = None

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # nothing, of a type that torch.load takes

    def settled(self, tensors: Sequence[Tensor], stream: int) -> bool:
        """Whether a launch now, which is noted, may read these tensors early."""
        now = state(tensors, stream)
        places = tuple([tensor.data_ptr() for tensor in tensors])
        last = None
        if self._last is not None and self._last[1] == places and _are(self._last[0], tensors):
            references, last = self._last[0], self._last[2]
        else:
            references = tuple(map(weakref.ref, tensors))
        self._last = references, places, now
        return is_settled(now, last)

    def is_of(self, codes: Tensor) -> bool:
        """Whether these are its codes: attributes of a tensor may be copied to another one."""
        return self._codes() is codes


def bound_weight(codes: Tensor) -> BoundWeight | None:
    """What is bound to codes; None if nothing was launched with them."""
    found = getattr(codes, ATTRIBUTE, None)
    return found if type(found) is BoundWeight and found.is_of(codes) else None


def bind_weight(codes: Tensor) -> BoundWeight:
    """What is bound to codes, made if need be."""
    found = bound_weight(codes)
    if found is None:
        found = BoundWeight(codes)
        setattr(codes, ATTRIBUTE, found)
    return found


def _are(references: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
    return len(references) == len(tensors) and all(
        reference() is tensor for reference, tensor in zip(references, tensors, strict=True)
    )
