"""Texts to learn from: a file, a data set or the model's own words, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from ..errors import VQCalibrationError, VQError
from ..hf.calibration_options import MIN_CONTEXT, OWN_WORDS
from .offload import place_of

CONTEXT = 2048
_WRITTEN_AT_ONCE = 1 << 15  # tokens of sequences that the model writes side by side
_DOCUMENTS = 1 << 16  # of a data set that are read at most


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        VQError: the file is missing, not UTF-8 or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise VQError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except OSError as error:
        raise VQError(f"cannot read the text {path}: {error.strerror}.") from None
    if not text.strip():
        raise VQError(f"{path} is empty; give a text file with some thousand words.")
    return text


def find_text(source: str, characters: int) -> tuple[str | None, dict[str, str]]:
    """The text that `source` names, and what identifies it in a record, without a path.

    Args:
        source: a UTF-8 file, `NAME[:CONFIG[:SPLIT]]` of a data set whose column `text` is read
            (needs the package `datasets`), or `OWN_WORDS`, which gives None.
        characters: of a data set; a file is read whole.

    Raises:
        VQError: the file cannot be read.
        VQCalibrationError: there is no such file, and no such data set.
    """
    if source == OWN_WORDS:
        return None, {"text": OWN_WORDS}
    path = Path(source).expanduser()
    if path.exists():
        text, name = read_text(path), path.name
    else:
        text, name = _data_set_text(source, characters), source
    return text, {"text": name, "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _data_set_text(source: str, characters: int) -> str:
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        import datasets
    except ImportError:
        raise VQCalibrationError(
            f"the calibration text {source!r} is no file. If it is the name of a data set: pip "
            "install datasets."
        ) from None
    try:
        stream = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        found: list[str] = []
        for document in islice(stream, _DOCUMENTS):
            found.append(document["text"])
            characters -= len(found[-1])
            if characters <= 0:
                break
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise VQCalibrationError(
            f"the calibration text {source!r} is neither a file nor a data set with a column "
            f"`text` ({what})."
        ) from error
    return "\n\n".join(found)


def sequences_of(
    model: Any,
    text: str | Sequence[int] | Tensor | None,
    tokenizer: Any,
    tokens: int,
    context: int,
    seed: int,
    progress: bool,
) -> Tensor:
    """Token ids [tokens / context, context] of `text`: see `calibrate_kv`.

    Sequences of a string begin with the token that the tokenizer begins texts with, if any.

    Raises:
        VQCalibrationError: too few tokens, not token ids, or a string without a tokenizer.
    """
    count = max(1, tokens // context)
    start: list[int] = []
    if text is None:
        return sample_text(model, count, context, seed=seed, progress=progress)
    if isinstance(text, str):
        if tokenizer is None:
            raise VQCalibrationError(
                "calibration needs a tokenizer for text; or give it token ids."
            )
        start = starting_tokens(tokenizer)
        text = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = torch.as_tensor(text)
    if ids.is_floating_point() or ids.ndim not in (1, 2):
        raise VQCalibrationError(
            "calibration needs a string or integer token ids [tokens] or [sequences, tokens]; got "
            f"{ids.dtype} {list(ids.shape)}."
        )
    if ids.ndim == 2:
        context = min(context, ids.shape[1])
        ids = ids[:, :context]
        if context < MIN_CONTEXT or ids.numel() < tokens:
            raise _too_short(ids.numel(), tokens)
        return ids[spread(len(ids), max(1, tokens // context))]
    length = context - len(start)
    if len(ids) < count * length:
        raise _too_short(len(ids), count * length)
    # The pieces begin at equal distances, so that all of a long text is heard.
    pieces = ids.unfold(0, length, 1)[spread(len(ids) - length + 1, count)]
    return torch.cat([torch.tensor([start] * count, dtype=ids.dtype), pieces], 1)


def starting_tokens(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before a text (BOS), where it puts one: a model trained so
    makes little sense of a sequence without it."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return []
    whole = tokenizer("a", verbose=False).input_ids
    plain = tokenizer("a", add_special_tokens=False, verbose=False).input_ids
    return [bos] if whole[:1] == [bos] and plain[:1] != [bos] else []


def context_of(model: Any, context: int | None) -> int:
    """Tokens of a sequence: `context`, or CONTEXT, or what the model can.

    Raises:
        VQCalibrationError: more than the model can.
    """
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if context is None:
        return min(CONTEXT, longest or CONTEXT)
    if longest and context > longest:
        raise VQCalibrationError(
            f"context={context} is more than the {longest} tokens the model reads."
        )
    return context


def spread(length: int, count: int) -> Tensor:
    """`count` of the integers below `length`, at equal distances."""
    return torch.arange(count) * (length - 1) // max(count - 1, 1)


def _too_short(have: int, need: int) -> VQCalibrationError:
    return VQCalibrationError(
        f"the text is too short: {have} tokens of at least {need}. Use a longer text, or fewer "
        "tokens."
    )


def sample_text(
    model: Any, count: int, length: int, *, seed: int = 0, progress: bool = False
) -> Tensor:
    """Token ids [count, length] that the model writes by itself after its first token.

    Raises:
        VQCalibrationError: the model names no token that begins a text, or its logits are not
            finite.
    """
    config = model.config.get_text_config(decoder=True)
    first = next(
        (
            token
            for source in (getattr(model, "generation_config", None), config)
            for name in ("bos_token_id", "eos_token_id")
            for token in _as_list(getattr(source, name, None))
        ),
        None,
    )
    if first is None:
        raise VQCalibrationError("the model has no first token to write text from; give it a text.")
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _WRITTEN_AT_ONCE // length)  # a cache of keys and values for each
    written = [
        _written(model, first, min(at_once, count - done), length, generator, progress)
        for done in range(0, count, at_once)
    ]
    return torch.cat(written)


def _written(
    model: Any, first: int, count: int, length: int, generator: torch.Generator, progress: bool
) -> Tensor:
    cache, place = DynamicCache(config=model.config), place_of(model)
    written = [torch.full((count, 1), first)]
    for _ in bar(range(length - 1), "writing text", progress):
        token = written[-1].to(place)
        logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
        chances = logits.float().softmax(-1).cpu()
        if not bool(chances.isfinite().all()):
            raise VQCalibrationError(
                "the model cannot write a text: its logits hold NaN or infinity. Load it in "
                "bfloat16 or float32, or give it a text."
            )
        written.append(torch.multinomial(chances, 1, generator=generator))
    return torch.cat(written, 1)


def _as_list(token: Any) -> list[int]:
    return [token] if isinstance(token, int) else list(token or [])


def bar(items: Any, label: str, progress: bool) -> Any:
    """`items`, with a progress bar if asked."""
    return logging.tqdm(items, desc=label, leave=False) if progress else items
