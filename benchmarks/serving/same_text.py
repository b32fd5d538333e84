"""Text of continuous batching compared with plain decoding of the same codes.

The same requests are answered twice, greedily: by the kernels, and with attention that decodes the
pages to float32 and multiplies (the reference). What is written to the pages is the same kernel's
in both. Two runs may choose different tokens where two are equally likely, and their texts have
nothing in common from there on; so what counts is how likely either run finds the token that it
chose, up to the first that differs, which a wrong head changes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.ops import KVCacheView
from hf_vq.ops.reference import kv_attention as attention_reference

PROMPT, NEW = 128, 64
"""Tokens of a prompt and of an answer: few, so that all requests are answered at the same time."""
_ROWS = 32  # of the batch, whose pages are floats at the same time

Answers = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Of each request, in one order: the tokens, and log-probabilities of each."""


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention over codes by the reference, for pages in parts of the batch."""
    plain = dispatch.Implementation(_attention)
    with dispatch.preferred(dispatch.Entry("plain.attention", "kv_attention", plain)):
        yield


def compare(answer: Callable[[], Answers]) -> dict[str, Any]:
    """Answer with the kernels and by plain decoding; `answer` serves all requests, greedily.

    Returns:
        requests, those whose texts are equal, tokens compared, and the largest difference between
        the log-probabilities of the tokens at the same place (None: one is no number).
    """
    found = answer()
    with plain_attention():
        expected = answer()
    tokens, same, largest = 0, 0, 0.0
    for (text, scores), (other, other_scores) in zip(found, expected, strict=True):
        pairs = list(zip(text, other, strict=True))
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same += common == len(pairs)
        count = min(common + 1, len(pairs))
        tokens += count
        apart = (torch.tensor(scores[:count]) - torch.tensor(other_scores[:count])).abs()
        largest = max(largest, float(apart.nan_to_num(torch.inf).max()))
    return {
        "requests": len(found), "same_text": same, "tokens": tokens,
        "largest_difference": largest if largest < torch.inf else None,
    }  # fmt: skip


def _attention(query: Tensor, view: KVCacheView, *options: Any) -> Tensor:
    """The reference of `kv_attention`; pages in batches of `_ROWS` requests."""
    table, length = view.page_table, view.cache_seqlens
    if table is None or length is None:
        return attention_reference.attention(query, view, *options)
    parts = zip(query.split(_ROWS), table.split(_ROWS), length.split(_ROWS), strict=True)
    attend = attention_reference.attention_paged
    return torch.cat([
        attend(queries, view._replace(page_table=pages, cache_seqlens=lengths), *options)
        for queries, pages, lengths in parts
    ])  # fmt: skip
