"""Passkeys: five digits somewhere in a long text, asked for at its end.

    text .. "The pass key is 68371. Remember it." .. text .. "What is the pass key? The pass key is"

The score is how often every digit is the likeliest, and the mean log-probability of the digits. The
text is the one of the suite, so that the digits are the only thing out of place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_vq.cache.argument import cache_argument
from hf_vq.errors import VQError

FACT = "\nThe pass key is {}. Remember it. {} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DEPTHS = 5


def measure(
    model: Any,
    tokenizer: Any,
    text: Tensor,
    length: int,
    depths: int = DEPTHS,
    new_cache: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """The share of passkeys that are found, in percent, and their log-probability a digit.

    Args:
        text: token ids of a long text [tokens].
        length: tokens of a prompt.
        depths: passkeys, one for each depth, at equal distances.
        new_cache: makes an empty cache; None = Transformers' own.

    Raises:
        VQError: the text is shorter than `length`.
    """
    chance = random.Random(length)
    found, likelihood = 0, 0.0

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False).input_ids
        return ids

    for depth in range(depths):
        key = str(chance.randint(10_000, 99_999))
        fact, question, answer = encode(FACT.format(key, key)), encode(QUESTION), encode(f" {key}")
        room = length - len(fact) - len(question)
        if len(text) < room:
            raise VQError(f"the text has {len(text)} tokens, a passkey at {length} needs {room}.")
        at = int((depth + 0.5) / depths * room)
        filler = text[:room].tolist()
        prompt = [*filler[:at], *fact, *filler[at:], *question]
        right, log_p = _answered(model, prompt, answer, new_cache)
        found, likelihood = found + right, likelihood + log_p
    return {"found": 100 * found / depths, "log_p": likelihood / depths}


@torch.no_grad()
def _answered(
    model: Any, prompt: list[int], answer: list[int], new_cache: Callable[[], Any] | None
) -> tuple[bool, float]:
    """True if every token of the answer is the likeliest; and its mean log-probability."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config) if new_cache is None else new_cache()
    ids = torch.tensor([prompt], device=model.device)
    logits = model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1).logits
    right, total = True, 0.0
    for token in answer:  # one by one, as a cache meets them
        log_p = logits[0, -1].float().log_softmax(-1)
        right &= int(log_p.argmax()) == token
        total += float(log_p[token])
        step = torch.tensor([[token]], device=model.device)
        logits = model(step, **{cache_argument(model): cache}, use_cache=True).logits
    return right, total / len(answer)
