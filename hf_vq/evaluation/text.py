"""Evaluation text: a file becomes token sequences of one length."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.text import read_text
from ..errors import VQError
from ..hf.calibration_options import MIN_CONTEXT


def read_sequences(
    tokenizer: Any,
    path: str | Path,
    *,
    context: int,
    tokens: int | None = None,
    most: int = 1 << 20,
) -> Tensor:
    """The first tokens of a text as sequences, int64 [sequences, context].

    The text is tokenized whole, without special tokens, and cut; a rest shorter than `context` is
    dropped.

    Args:
        tokenizer: of the model to evaluate.
        path: UTF-8 text file.
        context: tokens per sequence.
        tokens: how many to use; None = as many as there are, at most `most`.
        most: see `tokens`.

    Raises:
        VQError: the file cannot be used, or has fewer than `tokens` tokens or than two sequences
            (with fewer there is no standard error).
    """
    if context < MIN_CONTEXT:
        raise VQError(f"a context of {context} tokens is too short; use {MIN_CONTEXT} or more.")
    if tokens is not None and tokens < 2 * context:
        raise VQError(
            f"{tokens} tokens are fewer than two sequences of {context}; "
            "use more tokens or a shorter context."
        )
    ids = tokenizer(read_text(path), add_special_tokens=False, verbose=False).input_ids
    wanted = min(len(ids), most) if tokens is None else tokens
    if len(ids) < wanted or wanted < 2 * context:
        need = max(2 * context, tokens or 0)
        raise VQError(
            f"{path} gives {len(ids)} tokens with this tokenizer, {need} are needed: "
            "use a longer text, fewer tokens or a shorter context."
        )
    count = wanted // context
    return torch.tensor(ids[: count * context], dtype=torch.int64).reshape(count, context)


def text_facts(path: str | Path) -> dict[str, str]:
    """The name of a text file and what identifies its content, for a record."""
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {"text": Path(path).name, "text_sha256": digest[:16]}
