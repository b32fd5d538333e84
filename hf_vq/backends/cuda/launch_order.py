"""Whether a kernel may read weights before those before it have ended (pdl.cuh).

It may where nobody wrote them since its last launch, as far as that stream knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

State = tuple[tuple[int, ...], int]


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


class Launches:
    """The last launch with each set of tensors, by the first of them. It keeps none alive."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[_References, _Places, State | None]] = {}

    def settled(self, tensors: Sequence[Tensor], stream: int) -> bool:
        """Whether a launch now, which is noted, may read them early."""
        key, now = id(tensors[0]), state(tensors, stream)
        places = tuple([tensor.data_ptr() for tensor in tensors])
        known = self._last.get(key)
        if known is not None and known[1] == places and _are(known[0], tensors):
            references, last = known[0], known[2]
        else:
            first = weakref.ref(tensors[0], lambda _: self._last.pop(key, None))
            references, last = (first, *map(weakref.ref, tensors[1:])), None
        self._last[key] = references, places, now
        return is_settled(now, last)


_References = tuple["weakref.ref[Tensor]", ...]
_Places = tuple[int, ...]


def _are(references: _References, tensors: Sequence[Tensor]) -> bool:
    return len(references) == len(tensors) and all(
        reference() is tensor for reference, tensor in zip(references, tensors, strict=True)
    )
