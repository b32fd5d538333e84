"""Texts that a model is measured on: passages of a text, and its own answers to prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq.calibration.text import read_text, sequences_of
from hf_vq.errors import VQError
from hf_vq.evaluation.load import fingerprint

SEED = 0
_BATCH = 16  # answers that are written at once


@dataclass(frozen=True)
class Passages:
    """Token sequences of one length.

    Args:
        name: `text` or `chat`.
        ids: int64 [sequences, context].
        skip: predictions at the start of each sequence that are not scored.
    """

    name: str
    ids: Tensor
    skip: int | tuple[int, ...] = 0

    def facts(self) -> dict[str, Any]:
        """Facts of them for a record; the digest is of the token ids."""
        digest = hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]
        skip = [self.skip] * len(self.ids) if isinstance(self.skip, int) else list(self.skip)
        count, context = self.ids.shape
        scored = count * (context - 1) - sum(skip)
        return {
            f"{self.name}_tokens": count * context,
            f"{self.name}_context": context,
            f"{self.name}_scored": scored,
            f"{self.name}_ids_sha256": digest,
        }


def natural(tokenizer: Any, text: str | Path, tokens: int, context: int) -> Passages:
    """Passages at equal distances over a UTF-8 text, each after the token that begins texts."""
    ids = sequences_of(None, read_text(text), tokenizer, tokens, context, SEED, progress=False)
    return Passages("text", ids.long())


def chat(
    model: Any, tokenizer: Any, model_dir: str, prompts: Path, kept: Path, tokens: int, context: int
) -> Passages:
    """The model's own answers to prompts, of which only the answers are scored.

    They are sampled at temperature 1 from all tokens, once for a model, and kept in a file. A
    sequence is a prompt and the beginning of its answer; an answer that ends before is left out.

    Args:
        prompts: JSON Lines with `turns`, whose first is the prompt, as MT-Bench has them.
        kept: folder of the answers.

    Raises:
        VQError: the model has no chat template, or too few answers are long enough.
    """
    count = tokens // context
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()[:16]
    key = f"{fingerprint(model_dir)}-{digest}-{count}x{context}-{SEED}"
    path = kept / f"{Path(model_dir).name}-{key}.json"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        answers = _answers(model, tokenizer, prompts, count, context)
        path.write_text(json.dumps(answers))
    found = json.loads(path.read_text())
    skip = tuple(one["prompt"] - 1 for one in found)
    return Passages("chat", torch.tensor([one["ids"] for one in found]), skip)


def _answers(
    model: Any, tokenizer: Any, prompts: Path, count: int, context: int
) -> list[dict[str, Any]]:
    if tokenizer.chat_template is None:
        raise VQError("the tokenizer has no chat template: leave --prompts out for this model.")
    requested = []
    for line in prompts.read_text(encoding="utf-8").splitlines():
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if len(ids) <= context // 2:
            requested.append(list(ids))
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    found: list[dict[str, Any]] = []
    for first in range(0, len(requested), _BATCH):
        batch = requested[first : first + _BATCH]
        longest = max(map(len, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, longest - len(one) :] = torch.tensor(one)
            mask[row, longest - len(one) :] = 1
        torch.manual_seed(SEED + first)
        written = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, pad_token_id=0,
            min_new_tokens=1, max_new_tokens=context - min(map(len, batch)),
        )  # fmt: skip
        for one, answer in zip(batch, written[:, longest:].tolist(), strict=True):
            wanted = answer[: context - len(one)]
            if len(wanted) == context - len(one) and not ends & set(wanted):
                found.append({"prompt": len(one), "ids": one + wanted})
        if len(found) >= count:
            return found[:count]
    raise VQError(
        f"{len(found)} of {len(requested)} answers reach {context} tokens with their prompts, "
        f"{count} are needed: use a shorter --chat-context or fewer --chat-tokens."
    )
