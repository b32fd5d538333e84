"""The requests of one forward of a server, and where their tokens lie in pages.

    batch     [ request: past tokens in its pages | new tokens ] ...

What kernels and copies need to know of them is made once, for all layers, and sent to the device
without waiting for it:

    Table      requests with one new token each, as kernels find their pages
    Slots      where new tokens go, if that is all that is known of them
    Prompts    those with several new tokens, one behind the other
    Group      requests whose codes are copied side by side
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Request:
    """What a forward computes of one request.

    Args:
        first: row of its first new token in the batch.
        past: tokens that it has in its pages.
        new: tokens that come now.
        pages: numbers of its pages, those of the new tokens included.
    """

    def __init__(self, first: int, past: int, new: int, pages: Sequence[int]) -> None:
        self.first, self.past, self.new, self.pages = first, past, new, list(pages)

    @property
    def length(self) -> int:
        """Tokens with the new ones."""
        return self.past + self.new

    @property
    def rows(self) -> slice:
        """Its new tokens in the batch."""
        return slice(self.first, self.first + self.new)


@dataclass(frozen=True)
class Table:
    """Requests that have one new token each, and where their pages are, on the device.

    Args:
        pages: int32 [requests, width], in the order of the tokens.
        length: int64 [requests], tokens with the new one; 0 = there is no request.
        longest: no request has more tokens.
        rows: their new tokens in the batch int64 [requests]; None = all of it, in order.
    """

    pages: Tensor
    length: Tensor
    longest: int
    rows: Tensor | None = None

    @property
    def newest(self) -> Tensor:
        """Position of each new token: int64 [requests]; 0 of no request."""
        return (self.length - 1).clamp_min(0)

    def slots(self, tokens: int, trash: int) -> Tensor:
        """Where the new tokens go (`ops.kv_append`): int64 [requests].

        Args:
            tokens: of a page.
            trash: a slot for those of no request.
        """
        position = self.newest
        page = self.pages.gather(1, (position // tokens)[:, None])[:, 0]
        return torch.where(self.length > 0, page * tokens + position % tokens, trash)


class Slots:
    """Where new tokens go, by their slots.

    Args:
        slots: int64 [new tokens] on the host, of each its page times `tokens` and its place there.
        tokens: of a page.
        device: of the pages.
        positions: of the tokens in their requests, int64 [new tokens]; for keys with a rotary mean.
    """

    def __init__(
        self, slots: Tensor, tokens: int, device: torch.device, positions: Tensor | None = None
    ) -> None:
        self.slots, self.tokens, self.device, self.positions = slots, tokens, device, positions

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of every new token int64 [new tokens]."""
        slots = _sent(self.slots, self.device)
        return slots // self.tokens, slots % self.tokens

    @cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """New tokens that go to one page side by side: their rows in the batch, the page, their
        place in it."""
        steps = (self.slots[1:] != self.slots[:-1] + 1) | (self.slots[1:] % self.tokens == 0)
        begins = [0, *(steps.nonzero()[:, 0] + 1).tolist()] if len(self.slots) else []
        ends = [*begins[1:], len(self.slots)]
        return [
            (slice(begin, end), *divmod(int(self.slots[begin]), self.tokens))
            for begin, end in zip(begins, ends, strict=False)
        ]


class Prompts:
    """Requests that have several new tokens each, one behind the other.

    Args:
        requests: at least one.
        tokens: of a page.
        device: of the pages.
    """

    def __init__(self, requests: Sequence[Request], tokens: int, device: torch.device) -> None:
        self.requests, self.tokens, self.device = list(requests), tokens, device
        self.longest_new = max(request.new for request in requests)
        self.longest = max(request.length for request in requests)
        self.total = sum(request.length for request in requests)

    @cached_property
    def rows(self) -> Tensor:
        """Their new tokens in the batch int64 [new tokens]."""
        parts = [torch.arange(each.first, each.rows.stop) for each in self.requests]
        return _sent(torch.cat(parts), self.device)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of all their tokens: int64 [1, 1, total] each."""
        place = torch.arange(self.tokens)
        slots = [
            (torch.tensor(each.pages)[:, None] * self.tokens + place).flatten()[: each.length]
            for each in self.requests
        ]
        found = _sent(torch.cat(slots), self.device)[None, None]
        return found // self.tokens, found % self.tokens

    @cached_property
    def positions(self) -> Tensor:
        """Position of all their tokens, each in its own request: int64 [total]."""
        parts = [torch.arange(each.length) for each in self.requests]
        return _sent(torch.cat(parts), self.device)

    @cached_property
    def begins(self) -> tuple[Tensor, Tensor]:
        """Where the new tokens of each request begin, and all its tokens: int32 [requests + 1]."""
        counts = torch.tensor([[0, 0], *([each.new, each.length] for each in self.requests)])
        new, all_ = _sent(counts.cumsum(0).int().T.contiguous(), self.device)
        return new, all_


class Group:
    """Requests that read their pages at once: one, or several that have one new token each, which
    are right-aligned to the longest.

    Args:
        requests: of the group.
        tokens: of a page.
        device: of the pages.
    """

    def __init__(self, requests: Sequence[Request], tokens: int, device: torch.device) -> None:
        self.requests, self.tokens, self.device = list(requests), tokens, device
        self.length = max(request.length for request in requests)
        self.new, self.past = requests[0].new, self.length - requests[0].new

    @cached_property
    def table(self) -> Tensor:
        """The pages int64 [requests, most pages], those that a request lacks 0."""
        width = max(len(request.pages) for request in self.requests)
        rows = [request.pages + [0] * (width - len(request.pages)) for request in self.requests]
        return _on(self.device, rows)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of every token, any where there is none: int64 [requests, 1,
        length] each."""
        lengths = [request.length for request in self.requests]
        shift = self.length - _on(self.device, lengths)[:, None]
        position = (torch.arange(self.length, device=self.device) - shift).clamp_min_(0)
        page = self.table.gather(1, position // self.tokens)
        return page[:, None], (position % self.tokens)[:, None]

    @cached_property
    def shift(self) -> Tensor | None:
        """Where each request begins int64 [requests]; None where all begin at 0."""
        if all(request.length == self.length for request in self.requests):
            return None
        return _on(self.device, [self.length - request.length for request in self.requests])

    @cached_property
    def mask(self) -> Tensor | None:
        """bool [requests, 1, 1, length], True = is a token; None where all are."""
        if self.shift is None:
            return None
        position = torch.arange(self.length, device=self.device)
        return position >= self.shift[:, None, None, None]

    @cached_property
    def rows(self) -> Tensor:
        """The new tokens in the batch int64 [requests, new]."""
        rows = [list(range(each.first, each.rows.stop)) for each in self.requests]
        return _on(self.device, rows)


class Batch:
    """The requests of one forward.

    Args:
        tokens: of a page.
        device: of the pages.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.requests: list[Request] = []
        self.tokens, self.device = tokens, device
        self._windows: dict[int, list[tuple[slice, Tensor | None]]] = {}

    def add(self, past: int, new: int, pages: Sequence[int]) -> None:
        """One more request: `new` tokens, at least one, behind `past` ones, in `pages`."""
        first = self.requests[-1].rows.stop if self.requests else 0
        self.requests.append(Request(first, past, new, pages))

    @cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """New tokens that go to one page: their rows in the batch, the page, their place in it."""
        spans = []
        for request in self.requests:
            at = request.past
            while at < request.length:
                page, place = divmod(at, self.tokens)
                end = min(at + self.tokens - place, request.length)
                first = request.first - request.past
                spans.append((slice(first + at, first + end), request.pages[page], place))
                at = end
        return spans

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and place in it of every new token int64 [new tokens]."""
        rows = [(page, place + i) for span, page, place in self.spans for i in range(_size(span))]
        page, place = _on(self.device, rows).unbind(1)
        return page, place

    @cached_property
    def positions(self) -> Tensor:
        """Position of every new token, in its request: int64 [new tokens]."""
        none = torch.empty(0, dtype=torch.int64)
        parts = [none, *(torch.arange(each.past, each.length) for each in self.requests)]
        return _sent(torch.cat(parts), self.device)

    def windows(self, window: int) -> list[tuple[slice, Tensor | None]]:
        """What layers of sliding attention read of each request, which lie one after another: at
        most window - 1 tokens of the past and the new ones; and which of them each new one sees,
        bool [1, 1, new, read], None for a single one, which sees all. Made once for all layers.
        """
        if window not in self._windows:
            found: list[tuple[slice, Tensor | None]] = []
            begin = 0
            for request in self.requests:
                count = request.new + min(request.past, window - 1)
                mask = None
                if request.new > 1:
                    j = torch.arange(count, device=self.device)
                    i = j[count - request.new :, None]
                    mask = ((j <= i) & (j > i - window))[None, None]
                found.append((slice(begin, begin + count), mask))
                begin += count
            self._windows[window] = found
        return self._windows[window]

    @cached_property
    def alone(self) -> list[Group]:
        """Every request in a group of its own."""
        return [Group([request], self.tokens, self.device) for request in self.requests]

    @cached_property
    def table(self) -> Table | None:
        """All requests with one new token; None: there is none."""
        ones = [request for request in self.requests if request.new == 1]
        if not ones:
            return None
        width = max(len(request.pages) for request in ones)
        pages = [request.pages + [-1] * (width - len(request.pages)) for request in ones]
        lengths = [request.length for request in ones]
        return Table(
            _on(self.device, pages, torch.int32), _on(self.device, lengths), max(lengths),
            _on(self.device, [request.first for request in ones]),
        )  # fmt: skip

    @cached_property
    def prompts(self) -> Prompts | None:
        """All requests with several new tokens; None: there is none."""
        longer = [request for request in self.requests if request.new > 1]
        return Prompts(longer, self.tokens, self.device) if longer else None

    @cached_property
    def longer(self) -> list[Group]:
        """Every request with several new tokens, in a group of its own."""
        longer = [request for request in self.requests if request.new > 1]
        return [Group([request], self.tokens, self.device) for request in longer]

    @cached_property
    def together(self) -> list[Group]:
        """Requests with one new token in groups of about one length, all others alone."""
        groups: dict[int, list[Request]] = {}
        for request in self.requests:
            one = request.new == 1 and request.past > 0
            key = len(request.pages).bit_length() if one else -1 - request.first
            groups.setdefault(key, []).append(request)
        return [Group(each, self.tokens, self.device) for each in groups.values()]


def _on(device: torch.device, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers on a device; the host does not wait for it."""
    return _sent(torch.tensor(values, dtype=dtype), device)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _size(span: slice) -> int:
    return int(span.stop - span.start)
