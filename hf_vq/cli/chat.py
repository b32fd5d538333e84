"""`hf-vq chat`: talk to a model in a terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import VQError
from .arguments import add_loading, add_verb, dtype_of, positive


def add_chat(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `chat`."""
    text = "Talk to a model, quantized or not. Ctrl-C stops an answer, Ctrl-D ends."
    verb = add_verb(verbs, "chat", _chat, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id")
    verb.add_argument("--scheme", metavar="S", help="quantize a dense model first, e.g. to vq-4")
    verb.add_argument(
        "--kv", default="u4", metavar="S", help="scheme of the KV cache, or none (default: u4)"
    )
    verb.add_argument("--system", metavar="TEXT", help="the system message")
    verb.add_argument(
        "--max-new-tokens", type=positive, default=512, metavar="N", help="default: %(default)s"
    )
    verb.add_argument("--greedy", action="store_true", help="the likeliest token, always")
    add_loading(verb)
    return verb


def _chat(args: argparse.Namespace) -> None:
    import torch
    from transformers import TextStreamer

    from ..evaluation.load import load_model, load_tokenizer
    from ..hf.config import VQConfig

    tokenizer = load_tokenizer(args.model)
    if not tokenizer.chat_template:  # before minutes of loading
        raise VQError(
            f"the tokenizer of {args.model} has no chat template: it is no chat model. Use "
            "model.generate, or a model whose name says instruct or chat."
        )
    model = load_model(
        args.model,
        dtype=dtype_of(args.dtype),
        device_map=args.device_map,
        config=None if args.scheme is None else VQConfig(args.scheme),
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options: dict[str, Any] = {"do_sample": False} if args.greedy else {}
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    cache, known = None, torch.empty(0, dtype=torch.long)  # tokens in the cache
    for words in _lines():
        messages.append({"role": "user", "content": words})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        ids = prompt["input_ids"][0]
        cache = _continued(model, args.kv, cache, _equal(ids, known))
        options["past_key_values"] = cache
        try:
            out = model.generate(
                **prompt, **options, streamer=streamer, max_new_tokens=args.max_new_tokens
            )
        except KeyboardInterrupt:  # of the answer: nobody knows which tokens are in the cache
            print()
            messages.pop()
            cache, known = None, known[:0]
            continue
        known = out[0, :-1].cpu()
        answer = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


def _equal(ids: Any, known: Any) -> int:
    """Number of leading tokens that two sequences share, less than all of the first: a template may
    write earlier messages in another way than the model did."""
    count = min(len(ids) - 1, len(known))
    other = (ids[:count].cpu() != known[:count]).nonzero()
    return int(other[0]) if len(other) else count


def _continued(model: Any, scheme: str, cache: Any, tokens: int) -> Any:
    """The cache with its first tokens alone; a new one if it cannot be cut; None for `none`."""
    from ..cache import VQCache

    if scheme == "none":
        return None
    if cache is not None and tokens:
        try:
            cache.crop(tokens)
        except (VQError, ValueError):  # a sliding window has forgotten them
            pass
        else:
            return cache
    return VQCache.from_pretrained(model, scheme)


def _lines() -> Any:
    """Yield what the user types, line by line, until Ctrl-D."""
    while True:
        try:
            words = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print()
            return
        if words:
            yield words
