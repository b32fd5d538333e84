"""Two slots of a GPU's memory, through which tensors of many layers pass on their way to a kernel.

    copy stream     | B to slot 1  |  C to slot 0  |  D to slot 1  |
    stream of x        layer A         layer B         layer C

While a layer computes, what is expected to run next is copied into the other slot (TurboQuant's
pass-2 offload). An expectation decides when bytes are copied, never which bytes are read: a slot
knows whose tensors it holds, and in which state they were, and a layer that finds others there has
its own copied. So layers may be skipped, called in any order, again, from several threads, streams
and models, or fail.

What orders reads and writes of a slot are events: a kernel waits for the copy it reads, a copy for
every kernel that was given the bytes before. Of one pool, only one layer at a time is served.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import VQBackendError

_ALIGNED = 256  # bytes at which a tensor begins in a slot


class Transfer(Protocol):
    """How bytes come to a device, and how its work is ordered."""

    def check(self) -> None:
        """Raise where copies cannot be made now."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        """Copy (to, from) beside what computes, after some events; the event of its end."""

    def wait(self, event: Any) -> None:
        """Have what is computed from now on wait for an event."""

    def mark(self, memory: Tensor) -> tuple[Hashable, Any]:
        """The stream that computes on `memory` now, and the event of all that it was given."""


class CudaTransfer:
    """Copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def check(self) -> None:
        """Raise VQBackendError in a CUDA graph: it would repeat the copy, not the question whose
        bytes are in a slot."""
        if torch.cuda.is_current_stream_capturing():
            raise VQBackendError(
                "a CUDA graph cannot hold layers whose second pass is offloaded. Load the model "
                'with VQConfig(pass2="resident"), or do not compile it.'
            )

    def empty(self, nbytes: int) -> Tensor:
        """Memory of this GPU."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # It may be freed, and given to others, while a copy to it is still on its way.
        memory.record_stream(self.stream)
        # Who had these bytes before may still be reading them.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return memory

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        """Copies from pinned memory."""
        for event in after:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Of the current stream."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def mark(self, memory: Tensor) -> tuple[Hashable, Any]:
        """The current stream."""
        stream = torch.cuda.current_stream(self.device)
        memory.record_stream(stream)
        return stream.cuda_stream, stream.record_event()


class Owner(Protocol):
    """A layer whose tensors pass through slots."""

    def sources(self) -> list[Tensor] | None:
        """The tensors to copy; None where it needs none now."""


@dataclass(eq=False)
class _Source:
    """A tensor as it was when it was copied; experts are parts of one that lives longer."""

    whole: weakref.ref[Tensor]
    facts: Hashable

    @classmethod
    def of(cls, tensor: Tensor) -> _Source:
        whole = tensor if tensor._base is None else tensor._base
        facts = tensor.storage_offset(), tensor._version, tensor.dtype, tensor.shape
        return cls(weakref.ref(whole), facts)

    def is_as(self, other: _Source) -> bool:
        """The same tensor, and nobody has written to it."""
        return self.whole() is other.whole() is not None and self.facts == other.facts


@dataclass(eq=False)
class _Slot:
    memory: Tensor | None = None
    owner: Callable[[], Owner | None] = lambda: None
    copied: list[_Source] | None = None  # None: what nobody can compare
    views: list[Tensor] = field(default_factory=list)
    ready: Any = None
    used: dict[Hashable, Any] = field(default_factory=dict)  # stream -> its last event here
    lent: int = 0
    expected: bool = False  # copied for a layer that did not ask yet


class Slots:
    """Two slots as large as the largest layer that was served.

    Args:
        transfer: to the device.

    Attributes:
        hits, misses: layers whose tensors were in a slot, or not, when they asked.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.hits = self.misses = 0
        self._size = 0
        self._slots = (_Slot(), _Slot())
        self._lock = threading.RLock()
        self._last: Callable[[], Owner | None] = lambda: None
        # owner -> who asked after it, and whether that was so each time
        self._next: weakref.WeakKeyDictionary[Owner, tuple[weakref.ref[Owner], bool]]
        self._next = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the slots take."""
        return sum(slot.memory.numel() for slot in self._slots if slot.memory is not None)

    def expect(self, owners: Sequence[Owner]) -> None:
        """The order in which layers are likely to ask, until they ask in another one."""
        for one, other in zip(owners, [*owners[1:], owners[0]], strict=True):
            self._next[one] = (weakref.ref(other), True)

    @contextmanager
    def lent(
        self, owner: Owner, sources: Sequence[Tensor], *, ordered: bool = True
    ) -> Iterator[list[Tensor]]:
        """The tensors of a layer on the device, for what is launched on the current stream within.

        Args:
            sources: in pinned memory.
            ordered: the layer has its place in an order of layers; False for one of many experts.

        Raises:
            VQBackendError: a CUDA graph is being captured.
        """
        self.transfer.check()
        with self._lock:
            now = _sources(sources)
            slot = self._holding(owner, now)
            self.hits, self.misses = self.hits + (slot is not None), self.misses + (slot is None)
            slot = slot or self._fill(owner, sources, now, expected=False)
            slot.lent, slot.expected = slot.lent + 1, False
            try:
                if ordered:
                    self._copy_next(owner)
                self.transfer.wait(slot.ready)
                yield slot.views
            finally:
                slot.lent -= 1
                assert slot.memory is not None
                stream, event = self.transfer.mark(slot.memory)
                slot.used[stream] = event

    def _holding(self, owner: Owner, now: list[_Source] | None) -> _Slot | None:
        """The slot that has just these tensors of this owner, as they are."""
        for slot in self._slots:
            if slot.owner() is not owner or slot.copied is None or now is None:
                continue
            if len(now) == len(slot.copied) and all(map(_Source.is_as, slot.copied, now)):
                return slot
        return None

    def _fill(
        self, owner: Owner, sources: Sequence[Tensor], now: list[_Source] | None, expected: bool
    ) -> _Slot:
        """Copy tensors into a slot that is free; where none is, into memory of their own."""
        free = [slot for slot in self._slots if not slot.lent]
        # What was copied for a layer that is still to come goes last.
        slot = min(free, key=lambda one: one.expected) if free else _Slot()
        slot.owner, slot.copied = lambda: None, None  # nobody's, should anything fail from here on
        places, nbytes = _place(sources)
        self._size = max(self._size, nbytes)
        if slot.memory is None or slot.memory.numel() < self._size:
            slot.memory, slot.used = self.transfer.empty(self._size), {}
        slot.views = [
            slot.memory[at : at + source.nbytes].view(source.dtype).view(source.shape)
            for at, source in zip(places, sources, strict=True)
        ]
        pairs = list(zip(slot.views, sources, strict=True))
        slot.ready = self.transfer.copy(pairs, list(slot.used.values()))
        slot.used, slot.expected = {}, expected
        slot.owner, slot.copied = weakref.ref(owner), now
        return slot

    def _copy_next(self, owner: Owner) -> None:
        """Learn who asks after whom, and copy for the one that is sure to come next."""
        last, self._last = self._last(), weakref.ref(owner)
        if last is not None and last is not owner:
            known = self._next.get(last)
            self._next[last] = (weakref.ref(owner), known is None or known[0]() is owner)
        follower, sure = self._next.get(owner, (lambda: None, False))
        coming = follower()
        if not sure or coming is None or coming is owner:
            return
        sources = coming.sources()
        if not sources or all(slot.lent for slot in self._slots):
            return
        now = _sources(sources)
        if now is not None and self._holding(coming, now) is None:
            self._fill(coming, sources, now, expected=True)


def _sources(tensors: Sequence[Tensor]) -> list[_Source] | None:
    """What a slot with copies of them is compared with; None of tensors made in inference mode,
    where writes are not counted."""
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [_Source.of(tensor) for tensor in tensors]


def _place(sources: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a slot, and the bytes of all."""
    places, end = [], 0
    for source in sources:
        places.append(end)
        end += -(-source.nbytes // _ALIGNED) * _ALIGNED
    return places, end
