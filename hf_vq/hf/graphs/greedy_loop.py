"""The rest of a greedy `generate`, once a decoding step is a CUDA graph.

Between two steps, Transformers launches about thirty small kernels: the choice of a token, tests
for the end of a text, the inputs of the next step. Here they are a second graph, which writes the
inputs of the first:

    step    token, position, mask -> logits
    next    logits -> token, whether a sequence goes on, and the position and mask of the next step

The rule of each input is observed, not assumed: after two steps of Transformers' loop whose inputs
follow from those before, the loop is left by an exception (`HandOver`) and goes on here. The host
reads one step late whether a sequence is unfinished, as `DeferredStopCheck` does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ...cache.argument import CACHE
from . import cuda_graphs, late_reading
from .cuda_graphs import Inputs

logger = logging.getLogger(__name__)
_RESULTS = ("return_dict_in_generate", "is_assistant")  # options with which more is returned
_INPUTS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods that make the inputs of a step; those of Phi-3 differ beyond some length."""

_ROOM = 1024  # tokens of a text that a graph has memory for, at least
_PARTS, _FEWEST = 512, 32  # of the vocabulary, in which the largest logits are found first


class HandOver(Exception):
    """Leaves `_sample` before a step."""

    def __init__(
        self, captured: Any, graph: Any, following: _SelectionGraph, begin: _Begin
    ) -> None:
        super().__init__()
        self.captured, self.graph, self.following, self.begin = captured, graph, following, begin


@dataclass(frozen=True)
class Rule:
    """Change of an input from one step to the next.

    Args:
        kind: `token`: the one that was chosen. `same`. `count`: one more, as positions. `column`:
            one more column of a mask has `value`.
        column: that of the step now.
    """

    kind: str
    column: int = 0
    value: Any = None


@dataclass(frozen=True)
class _Begin:
    """Inputs of the first step, and their rules."""

    inputs: Inputs
    rules: list[Rule]


def greedy_rest(model: Any, options: dict[str, Any]) -> GreedyRest | None:
    """The rest of a loop over tokens that can go on without Transformers; None: it cannot.

    Args:
        options: of `_sample`, by name; no code of the user's runs between two tokens.
    """
    config, stopping = options.get("generation_config"), options.get("stopping_criteria")
    if (
        not cuda_graphs.in_loop()
        or config is None
        or config.do_sample
        or any(getattr(config, name, None) for name in _RESULTS)
        or options.get("synced_gpus")
        or options.get("streamer") is not None
        or options.get("logits_processor")
        or not isinstance(stopping, StoppingCriteriaList)
        or not {type(each) for each in stopping} <= {EosTokenCriteria, MaxLengthCriteria}
        or stopping.max_length is None
        or model.config.is_encoder_decoder
        or hasattr(model, "create_masks_for_generate")
        or any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in _INPUTS)
        or not _attends_to_all(model.config.get_text_config(decoder=True))
    ):
        return None
    return GreedyRest(options["input_ids"].shape[1], config, stopping)


def _attends_to_all(config: Any) -> bool:
    """True if no token is hidden again by later ones, as in a sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not (
        getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    )


class _LastIds(LogitsProcessorList):
    """No processors; knows the ids of which it last saw the logits."""

    ids: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return the scores unchanged."""
        self.ids = input_ids
        return scores


class GreedyRest:
    """Leave Transformers' loop once its inputs are known, and finish the text.

    Args:
        prompt: number of its tokens.
        config: the generation config.
        stopping: a maximum length, and perhaps tokens that end a text.
    """

    def __init__(self, prompt: int, config: Any, stopping: StoppingCriteriaList) -> None:
        self.prompt, self.seen = prompt, _LastIds()
        self.length = min(
            each.max_length for each in stopping if isinstance(each, MaxLengthCriteria)
        )
        ends = [each for each in stopping if isinstance(each, EosTokenCriteria)]
        self.ends: Tensor | None = ends[0].eos_token_id if len(ends) == 1 else None
        self.pad: Tensor | None = config._pad_token_tensor
        self.is_known = len(ends) < 2 and (not ends or self.pad is not None)
        self.before: tuple[Any, list[Any], list[Rule] | None] | None = None

    def watch(self, captured: Any, graph: Any, inputs: Inputs) -> None:
        """See the inputs of a step before it is replayed.

        Raises:
            HandOver: those of the next steps are known.
        """
        if not self.is_known:
            return
        leaves, before, rules = cuda_graphs.leaves(inputs), self.before, None
        if before is not None and before[0] is graph:
            rules = _rules(before[1], leaves, inputs["input_ids"])
            self.is_known = rules is not None and (before[2] is None or _follow(before[2], rules))
            if rules is not None and self.is_known and before[2] is not None:
                self.is_known = self._has_room(leaves, rules)
                rows, following = len(inputs["input_ids"]), None
                if self.is_known:
                    following = self._following(captured, graph, rules, rows)
                if following is not None:
                    raise HandOver(captured, graph, following, _Begin(inputs, rules))
        if self.is_known:
            kept = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            self.before = graph, kept, rules

    def _has_room(self, leaves: list[Any], rules: list[Rule]) -> bool:
        assert self.seen.ids is not None
        left = self.length - self.seen.ids.shape[1] - 1
        masks = [(x, rule) for x, rule in zip(leaves, rules, strict=True) if rule.kind == "column"]
        return all(rule.column + left <= x.shape[-1] for x, rule in masks)

    @torch.no_grad()
    def finish(self, handed: HandOver) -> Tensor:
        """Choose all other tokens, and return all ids as `_sample` does.

        Args:
            handed: the exception that left the loop before a step.
        """
        captured, inputs = handed.captured, handed.begin.inputs
        assert self.seen.ids is not None
        ids = torch.cat([self.seen.ids, inputs["input_ids"]], 1)
        goes_on = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        if self.ends is not None:
            goes_on = ~torch.isin(ids[:, self.prompt :], self.ends.to(ids.device)).any(1)
        left = self.length - ids.shape[1]
        if left <= 0 or not bool(goes_on.any()):
            return ids
        with captured.lock, late_reading.on(captured.device):
            handed.following.begin(handed.begin, goes_on)
            tokens = self._run(handed.graph, handed.following, inputs[CACHE], left)
            return torch.cat([ids, tokens], 1)

    def _following(
        self, captured: Any, graph: Any, rules: list[Rule], rows: int
    ) -> _SelectionGraph | None:
        """The graph after a step; None, and never again, if it cannot be recorded."""
        ends = None if self.ends is None else self.ends.to(captured.device)
        pad = 0 if ends is None or self.pad is None else int(self.pad)
        kinds = tuple((rule.kind, rule.value) for rule in rules)
        key = ends if ends is None else tuple(ends.tolist()), pad, kinds
        room = max(_ROOM, 1 << (self.length - self.prompt - 1).bit_length())
        found: _SelectionGraph | None = graph.next.get(key)
        if found is None or found.tokens.shape[1] < room:
            try:
                found = _SelectionGraph(captured, graph, rows, room, ends, pad, rules)
            except RuntimeError as error:  # no memory, or another library's launch meanwhile
                logger.info("generate stays in Transformers' loop: %s", error)
                self.is_known = False
                return None
            graph.next = {key: found}
        return found

    def _run(self, graph: Any, following: _SelectionGraph, cache: Any, left: int) -> Tensor:
        """The tokens [rows, at most `left`], until all sequences are finished."""
        is_returned = getattr(cache, "_is_user_defined", False)
        late = int(not is_returned or late_reading.forgets(cache))
        flags = following.flags
        count = 0
        for count in range(1, left + 1):
            graph.launch(cache)
            following.graph.replay()
            if self.ends is None:
                continue
            flags.copy(count, following.any_goes_on)
            if count > late and not flags.read(count - late):
                # Undo the extra step.
                if late and is_returned:
                    cache.crop(-late)
                return following.tokens[:, : count - late]
        return following.tokens[:, :count]


class _Flags:
    """A flag of the GPU, on its way to the host."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.slots = [torch.empty((), dtype=torch.bool, pin_memory=pinned) for _ in range(2)]
        self.events = [torch.Event(device=device, blocking=True) for _ in range(2)]

    def copy(self, step: int, flag: Tensor) -> None:
        """Begin to copy the flag of a step."""
        self.slots[step % 2].copy_(flag, non_blocking=True)
        self.events[step % 2].record()

    def read(self, step: int) -> bool:
        """Wait for the flag of a step, or of the one before."""
        self.events[step % 2].synchronize()
        return bool(self.slots[step % 2])


class _SelectionGraph:
    """Graph after a step: the choice of tokens, and the inputs of the next one.

    Args:
        rows: number of texts.
        room: tokens of each, at most.
        ends: tokens that end a text; None: it does not end.
        pad: follows the end of a text.
        rules: for each input of the step.
    """

    def __init__(
        self,
        captured: Any,
        graph: Any,
        rows: int,
        room: int,
        ends: Tensor | None,
        pad: int,
        rules: list[Rule],
    ) -> None:
        self.inputs, self.logits = graph.inputs, graph.out["logits"]
        self.ends, self.pad, self.rules = ends, pad, rules
        device = self.logits.device
        self.tokens = torch.zeros(rows, room, dtype=torch.long, device=device)
        self.goes_on = torch.ones(rows, dtype=torch.bool, device=device)
        self.any_goes_on = torch.ones((), dtype=torch.bool, device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        masks = [x for x, rule in zip(self.inputs, rules, strict=True) if rule.kind == "column"]
        self.last = min((x.shape[-1] for x in masks), default=1) - 1
        self.flags = _Flags(device)
        self.graph = cuda_graphs.record(captured, self._advance)

    def begin(self, first: _Begin, goes_on: Tensor) -> None:
        """Take the inputs of the next step, before which nothing was chosen."""
        for x, own in zip(cuda_graphs.leaves(first.inputs), self.inputs, strict=True):
            if isinstance(x, Tensor):
                own.copy_(x)
        self.goes_on.copy_(goes_on)
        self.index.zero_()
        columns = [rule.column for rule in first.rules if rule.kind == "column"]
        self.column.fill_(columns[0] if columns else 0)

    def _advance(self) -> None:
        token = largest(self.logits[:, -1])
        if self.ends is not None:
            token = torch.where(self.goes_on, token, self.pad)
            self.goes_on.logical_and_((token[:, None] != self.ends).all(1))
            self.any_goes_on.copy_(self.goes_on.any())
        self.tokens.index_copy_(1, self.index, token[:, None])
        self.index.add_(1)
        self.column.add_(1).clamp_(max=self.last)  # after the last step, there may be no other
        for x, rule in zip(self.inputs, self.rules, strict=True):
            if rule.kind == "token":
                x.copy_(token[:, None])
            elif rule.kind == "count":
                x.add_(1)
            elif rule.kind == "column":
                x.index_fill_(-1, self.column, rule.value)


def largest(logits: Tensor) -> Tensor:
    """`argmax` over the last of two dimensions, the first of equal ones, in two steps: one launch
    for a row of a large vocabulary takes long."""
    parts = math.gcd(logits.shape[1], _PARTS)
    if parts < _FEWEST:
        return logits.argmax(-1)
    values, inner = logits.unflatten(1, (parts, -1)).max(-1)
    part = values.argmax(-1, keepdim=True)
    return torch.add(inner.gather(1, part), part, alpha=logits.shape[1] // parts)[:, 0]


def _rules(before: list[Any], now: list[Any], token: Tensor) -> list[Rule] | None:
    """The rule of each input; None if one has no known rule."""
    found = [
        Rule("token") if x is token else _rule(old, x) for old, x in zip(before, now, strict=True)
    ]
    known = [rule for rule in found if rule is not None]
    columns = {rule.column for rule in known if rule.kind == "column"}
    return known if len(known) == len(found) and len(columns) < 2 else None


def _rule(before: Any, now: Any) -> Rule | None:
    if not isinstance(now, Tensor):
        return Rule("same")  # as `takes` has compared
    changed = before != now
    if not bool(changed.any()):
        return Rule("same")
    if not now.is_floating_point() and now.dtype is not torch.bool:
        return Rule("count") if bool((now == before + 1).all()) else None
    columns = changed.reshape(-1, changed.shape[-1]).any(0).nonzero()[:, 0].tolist()
    if len(columns) != 1:
        return None
    values = now[..., columns[0]].unique().tolist()
    return Rule("column", columns[0], values[0]) if len(values) == 1 else None


def _follow(before: Sequence[Rule], now: Sequence[Rule]) -> bool:
    """True if the rules of a step are those of the one before."""
    return all(
        (old.kind, old.value) == (new.kind, new.value)
        and new.column - old.column == (new.kind == "column")
        for old, new in zip(before, now, strict=True)
    )
