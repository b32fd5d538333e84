"""Two slots of a GPU's memory, through which tensors of many layers pass on their way to a kernel.

    copy stream     | B and C to slot 1  |  D to slot 0  |  E, F and G to slot 1  |
    stream of x       A                    B  C            D                         E ..

While a layer computes, those that are expected next are copied beside it, as many as one slot holds
(TurboQuant's pass-2 offload); the other slot is for what is asked for now. An expectation decides
when bytes are copied, never which bytes are read: a place knows whose tensors it holds, and in
which state they were, and a layer that finds others there has its own copied. So layers may be
skipped, called in any order, again, from several threads, streams and models, or fail.

What orders reads and writes are events: a kernel waits for the copy it reads, a copy for every
kernel that was given the bytes that it overwrites. Copies are made one after the other. Of one
pool, only one layer at a time is served.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import VQBackendError

_ALIGNED = 256  # bytes at which a tensor begins
_KNOWN = 4  # places that a layer remembers


class Transfer(Protocol):
    """How bytes come to a device, and how its work is ordered."""

    def check(self) -> None:
        """Raise where copies cannot be made now."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, uint8."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any], old: Any) -> Any:
        """Copy (to, from) beside what computes, after some events and all copies before; the event
        of its end, which may be one of an `old` copy that nobody will wait for, or None."""

    def wait(self, event: Any) -> None:
        """Have what is computed from now on wait for an event."""

    def mark(self, memory: Tensor, used: dict[Hashable, Any]) -> None:
        """Note in `used`, by stream, the event of all that the one that computes now was given,
        instead of an earlier one."""

    def finish(self) -> None:
        """Return when all copies were made."""


class CudaTransfer:
    """Copies on a stream of their own.

    By the streams of any accelerator, which are all C++: those of torch.cuda are Python, and take
    longer than the rest of what the host does for a layer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.Stream(device)

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
        self.stream.wait_event(self._current().record_event())
        return memory

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any], old: Any) -> Any:
        """Copies from pinned memory."""
        for event in after:
            self.stream.wait_event(event)
        with self.stream:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return self._recorded(self.stream, old)

    def wait(self, event: Any) -> None:
        """Of the current stream."""
        self._current().wait_event(event)

    def mark(self, memory: Tensor, used: dict[Hashable, Any]) -> None:
        """Of the current stream."""
        stream = self._current()
        number = stream.stream_id
        old = used.get(number)
        if old is None:  # whose memory it is, is said once
            memory.record_stream(stream)
        used[number] = self._recorded(stream, old)

    def _recorded(self, stream: torch.Stream, old: torch.Event | None) -> torch.Event:
        """An event now; to make one takes longer than to record one again."""
        if old is None:
            return stream.record_event()
        old.record(stream)
        return old

    def finish(self) -> None:
        """Wait for the stream of the copies."""
        self.stream.synchronize()

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device.index)


class Owner(Protocol):
    """A layer whose tensors pass through slots."""

    def sources(self) -> list[Tensor] | None:
        """The tensors to copy; None where it needs none now."""


class _Source:
    """A tensor as it was when it was copied; experts are parts of one that lives longer."""

    __slots__ = ("facts", "whole")

    def __init__(self, tensor: Tensor) -> None:
        self.whole = weakref.ref(tensor if tensor._base is None else tensor._base)
        self.facts = tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape

    def is_still(self, tensor: Tensor) -> bool:
        """Whether it is the same tensor, and nobody has written to it."""
        if tensor.is_inference():  # its writes are not counted
            return False
        whole = tensor if tensor._base is None else tensor._base
        now = tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape
        return self.whole() is whole and self.facts == now


class Served:
    """A layer that slots serve, and all they know of it: found once, and kept by its owner.

    Everything is asked at every call, so what may be the same again is not made again.
    """

    __slots__ = ("__weakref__", "follower", "me", "owner", "place", "places", "sure")

    def __init__(self, owner: Owner) -> None:
        self.owner, self.me = weakref.ref(owner), weakref.ref(self)
        self.place: _Place | None = None
        self.places: dict[int, _Place] = {}  # where it was, by the first byte
        self.follower: Callable[[], Served | None] = _nobody  # who asked after it
        self.sure = True  # that was so each time

    def at(self, memory: Tensor, start: int, sources: Sequence[Tensor]) -> _Place:
        """A place from byte `start` of the memory on; one where it was before has its views."""
        place = self.places.get(start)
        if place is None or not place.fits(sources):
            if len(self.places) == _KNOWN:
                self.places.clear()
            place = self.places[start] = _Place(self, memory, start, sources)
        return place

    def forget(self) -> None:
        """It is nowhere: the memory is another."""
        self.place = None
        self.places.clear()


def _nobody() -> None:
    return None


class _Place:
    """Bytes `start` to `end` of the memory, and whose tensors they are."""

    __slots__ = ("copied", "end", "layer", "lent", "memory", "ready", "start", "used", "views")

    def __init__(
        self, layer: Served, memory: Tensor, start: int, sources: Sequence[Tensor]
    ) -> None:
        self.layer, self.memory, self.start, self.end = layer.me, memory, start, start
        self.views = []
        for source in sources:
            self.views.append(_view(source, memory, self.end))
            self.end += _room_of(source)
        self.copied: list[_Source] | None = None  # None: what nobody can compare
        self.ready: Any = None
        self.used: dict[Hashable, Any] = {}  # stream -> its last event here
        self.lent = 0

    def fits(self, sources: Sequence[Tensor]) -> bool:
        """Whether its views are of tensors like these."""
        return [(v.dtype, v.shape) for v in self.views] == [(s.dtype, s.shape) for s in sources]


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
        self._slot = 0  # bytes
        self._memory: Tensor | None = None
        self._at = 0  # where the last place ends
        self._places: list[_Place] = []
        self._known: weakref.WeakSet[Served] = weakref.WeakSet()  # that had a place
        self._coming: list[_Place] = []  # expected after the layer that asked last
        self._lock = threading.RLock()
        self._last: Callable[[], Served | None] = _nobody

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the slots take."""
        return 0 if self._memory is None else self._memory.numel()

    def expect(self, layers: Sequence[Served]) -> None:
        """The order in which layers are likely to ask, until they ask in another one."""
        for one, other in zip(layers, [*layers[1:], layers[0]], strict=True):
            one.follower, one.sure = other.me, True

    def lend(self, layer: Served, sources: Sequence[Tensor], *, ordered: bool = True) -> _Place:
        """A place whose `views` are the tensors of a layer on the device, for what is launched on
        the current stream until it is given back, by the same thread.

        Args:
            sources: in pinned memory.
            ordered: the layer has its place in an order of layers; False for one of many experts.

        Raises:
            VQBackendError: a CUDA graph is being captured.
        """
        self.transfer.check()
        self._lock.acquire()
        try:
            place = layer.place
            if place is not None and _are_still(place.copied, sources):
                self.hits += 1
            else:
                self.misses += 1
                place = self._fill(layer, sources)
        except BaseException:
            self._lock.release()
            raise
        place.lent += 1
        try:
            if ordered:
                self._learn(layer)
                self._copy_ahead(layer, place)
            self.transfer.wait(place.ready)
        except BaseException:
            self.give_back(place)
            raise
        return place

    def give_back(self, place: _Place) -> None:
        """Whatever reads what was lent has been launched."""
        try:
            place.lent -= 1
            self.transfer.mark(place.memory, place.used)
        finally:
            self._lock.release()

    def _fill(self, layer: Served, sources: Sequence[Tensor]) -> _Place:
        """Copy what is asked for: over nothing that is expected, if there is another place."""
        nbytes = sum(map(_room_of, sources))
        if nbytes > self._slot:
            memory = self.transfer.empty(2 * nbytes)  # or an error, and nothing is another
            self._memory, self._slot, self._at = memory, nbytes, 0
            for one in self._known:  # whose views would keep the smaller slots
                one.forget()
            self._places, self._coming = [], []
        at = self._room(nbytes, self._coming)
        if at is None:
            at = self._room(nbytes, [])
        if at is None:  # all is lent
            return self._copy(_Place(layer, self.transfer.empty(nbytes), 0, sources), sources, [])
        return self._copy_to(at, nbytes, layer, sources)

    def _room(self, nbytes: int, kept: list[_Place]) -> int | None:
        """Where so many bytes of one slot begin that are not lent and not kept: after what was
        copied last, or before it."""
        assert self._memory is not None
        for at in (self._at, 0):
            while at + nbytes <= 2 * self._slot:
                if at < self._slot < at + nbytes:
                    at = self._slot
                after, end = 0, at + nbytes
                for one in self._places:
                    if one.start < end and at < one.end and (one.lent or one in kept):
                        after = max(after, one.end)
                if not after:
                    return at
                at = after
        return None

    def _copy_to(self, at: int, nbytes: int, layer: Served, sources: Sequence[Tensor]) -> _Place:
        """Copy tensors over the places that lie there."""
        assert self._memory is not None
        others: list[_Place] = []
        over: list[_Place] = []
        for one in self._places:
            (over if one.start < at + nbytes and at < one.end else others).append(one)
        for one in over:
            one.copied = None  # nobody's, should anything fail from here on
        if layer.place is None:
            self._known.add(layer)
        place = self._copy(layer.at(self._memory, at, sources), sources, over)
        layer.place, self._places, self._at = place, [*others, place], place.end
        return place

    def _copy(self, place: _Place, sources: Sequence[Tensor], over: Sequence[_Place]) -> _Place:
        """Copy over places, whose events are recorded again from then on."""
        known = not any(source.is_inference() for source in sources)
        copied = [_Source(source) for source in sources] if known else None
        used: dict[Hashable, Any] = {}
        after: list[Any] = []
        for one in over:
            after += one.used.values()
            used |= one.used
        pairs = list(zip(place.views, sources, strict=True))
        place.ready = self.transfer.copy(pairs, after, over[0].ready if over else None)
        place.copied, place.used = copied, used
        return place

    def _learn(self, layer: Served) -> None:
        """Who asks after whom."""
        last, self._last = self._last(), layer.me
        if last is not None and last is not layer:
            last.sure = last.follower() is layer or last.follower is _nobody
            last.follower = layer.me

    def _copy_ahead(self, layer: Served, place: _Place) -> None:
        """Copy for those that are sure to come next, as many as a slot holds."""
        if self._coming and self._coming[0] is place:
            del self._coming[0]
        else:
            self._coming = []
        left, last = self._slot, layer
        for one in self._coming:
            left, last = left - (one.end - one.start), one.layer() or layer
        while (coming := last.follower() if last.sure else None) is not None:
            if coming is layer:
                return
            known = coming.place
            if known is not None and known.end - known.start > left:
                return
            if known is None or known.copied is None:
                known = self._ahead(coming, left)
            if known is None:
                return
            self._coming.append(known)
            left, last = left - (known.end - known.start), coming

    def _ahead(self, layer: Served, most: int) -> _Place | None:
        """Copy for a layer that did not ask yet, if that is possible and takes no more bytes."""
        owner = layer.owner()
        try:
            sources = None if owner is None else owner.sources()
        except Exception:  # it says so itself when it is called; another layer asks now
            return None
        if sources is None or any(source.is_inference() for source in sources):
            return None
        nbytes = sum(map(_room_of, sources))
        at = self._room(nbytes, self._coming) if nbytes <= most else None
        return None if at is None else self._copy_to(at, nbytes, layer, sources)


def _are_still(copied: list[_Source] | None, sources: Sequence[Tensor]) -> bool:
    """Whether what was copied are these tensors, as they are."""
    if copied is None or len(copied) != len(sources):
        return False
    return all(map(_Source.is_still, copied, sources))


def _view(source: Tensor, memory: Tensor, start: int) -> Tensor:
    """Room for a tensor from byte `start` of the memory on."""
    with torch.inference_mode(False):  # it is written to outside of that mode, too
        return memory[start : start + source.nbytes].view(source.dtype).view(source.shape)


def _room_of(source: Tensor) -> int:
    """Bytes that a tensor takes, so that the next one is aligned."""
    return -(-source.nbytes // _ALIGNED) * _ALIGNED
