"""Tokenizers in GGUF files: two kinds of BPE, of those that Transformers keeps as tokenizer.json.

gpt2     bytes as letters, split by one of a list of patterns that llama.cpp knows by name
llama    SentencePiece: words begin with U+2581, missing letters become bytes <0x00> .. <0xFF>
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import VQConfigError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"


def add_tokenizer(gguf: ModuleType, writer: Any, tokenizer: Any, config: Any, folder: Path) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        config: of the model; it has the size of the vocabulary, and tokens that the tokenizer may
            not name.
        folder: to write into for a moment.

    Raises:
        VQConfigError: llama.cpp would split texts otherwise.
    """
    with tempfile.TemporaryDirectory(dir=folder) as saved:
        tokenizer.save_pretrained(saved)
        config.save_pretrained(saved)
        path = Path(saved, "tokenizer.json")
        if not path.is_file():
            raise _refusal("it has no tokenizer.json")
        file = json.loads(path.read_text(encoding="utf-8"))
        pattern = _pattern(file)
        special = gguf.SpecialVocab(saved, load_merges=pattern is not None)
    tokens, kinds = _vocabulary(gguf, file, config.vocab_size)
    if pattern is None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(file, config.vocab_size))
        writer.add_add_space_prefix(_begins_with_space(file))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pattern)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    special.add_special_token["bos"] = begins
    special.add_to_gguf(writer, quiet=True)


def _pattern(file: dict[str, Any]) -> str | None:
    """llama.cpp's name of how a text is split; None: by SentencePiece.

    Raises:
        VQConfigError: it is split in another way.
    """
    model, normalizer, splitter = file["model"], file["normalizer"], file["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("continuing_subword_prefix"):
        raise _refusal(f"its type is {model['type']}")
    steps = splitter.get("pretokenizers", [splitter])
    if model["byte_fallback"]:
        _begins_with_space(file)
        return None
    if normalizer and normalizer["type"] != "NFC":
        raise _refusal(f"it changes texts by {normalizer['type']}")
    last = steps[-1]
    if last.get("type") == "ByteLevel" and not last["add_prefix_space"]:
        before = [_step(step) for step in steps[:-1]]
        by_words = last["use_regex"]
        whole = bool(model.get("ignore_merges"))  # words of the vocabulary are not merged
        for name, known, words, unmerged in (
            ("gpt-2", [], True, False),
            ("smollm", ["digits"], True, False),
            ("qwen2", [_WORDS % r"\p{N}"], False, False),
            ("llama-bpe", [_WORDS % r"\p{N}{1,3}"], False, True),
        ):
            if (before, by_words, whole) == (known, words, unmerged):
                return name
    raise _refusal("llama.cpp's name of its pre_tokenizer is not known here")


def _step(step: dict[str, Any]) -> str:
    """A step of splitting, without what does not matter."""
    if step["type"] == "Digits" and step["individual_digits"]:
        return "digits"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex"))
    return str(step["type"])


def _begins_with_space(file: dict[str, Any]) -> bool:
    """True if SentencePiece puts a space before a text.

    Raises:
        VQConfigError: spaces are treated in another way.
    """
    normalizer, splitter = file["normalizer"], file["pre_tokenizer"]
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    if splitter is None and kinds in (["Prepend", "Replace"], ["Replace"]):
        return kinds[0] == "Prepend"
    if not kinds and splitter and splitter["type"] == "Metaspace" and not splitter["split"]:
        return bool(splitter["prepend_scheme"] != "never")
    raise _refusal("it treats spaces otherwise than SentencePiece")


def _scores(file: dict[str, Any], size: int) -> list[float]:
    """Minus the first merge that makes each token: SentencePiece merges by the highest score."""
    scores = [0.0] * size
    ids = file["model"]["vocab"]
    for rank, pair in reversed(list(enumerate(file["model"]["merges"]))):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        scores[ids[left + right]] = -float(rank)
    return scores


def _vocabulary(gguf: ModuleType, file: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Tokens by id and their types, as many as the model has.

    Raises:
        VQConfigError: the tokenizer has more.
    """
    kind = gguf.TokenType
    ids = [*file["model"]["vocab"].values(), *(token["id"] for token in file["added_tokens"])]
    if max(ids) >= size:
        raise _refusal(f"it has a token {max(ids)}, and the model {size} embeddings")
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [kind.UNUSED] * size
    fallback = file["model"]["byte_fallback"]
    for token, index in file["model"]["vocab"].items():
        tokens[index], kinds[index] = token, kind.NORMAL
        if fallback and len(token) == 6 and token.startswith("<0x"):
            kinds[index] = kind.BYTE
        if fallback and token == file["model"]["unk_token"]:
            kinds[index] = kind.UNKNOWN
    for added in file["added_tokens"]:
        index, token = added["id"], added["content"]
        if kinds[index] == kind.UNKNOWN:
            continue
        kinds[index] = kind.CONTROL if added["special"] else kind.USER_DEFINED
        tokens[index] = token if added["special"] else token.replace(_SPACE, " ")
    return tokens, kinds


def _refusal(why: str) -> VQConfigError:
    return VQConfigError(
        f"--to gguf cannot write this tokenizer: {why}. Use --to dense, and llama.cpp's "
        "convert_hf_to_gguf.py on OUT."
    )
