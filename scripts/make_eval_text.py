#!/usr/bin/env python3
"""Sample the evaluation text of the embedded demo model from the demo model itself.

`hf-vq demo` measures how far a quantized model is from the original; any text the original finds
likely will do, and text sampled from it can be shipped without anybody's copyright. The samples
are drawn at temperature 1 from the unquantized model in float32 with a fixed seed, special tokens
suppressed, each continuing a chapter heading, and are concatenated.

    python scripts/make_eval_text.py tests/models/tinybooks-5m tests/models/tinybooks-5m-eval.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def sample_text(model_dir: str, *, sequences: int, tokens: int, seed: int) -> str:
    """Return `sequences` samples of `tokens` tokens each, joined by blank lines."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    headings = [f"### Chapter {chapter}\n\n" for chapter in range(1, sequences + 1)]
    prompts = tokenizer(headings, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(seed)
    out = model.generate(
        **prompts,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        suppress_tokens=sorted(set(tokenizer.all_special_ids)),
    )
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    # A sample can end inside a multi-byte character; the replacement mark is not a likely text.
    return "\n\n".join(text.replace("\N{REPLACEMENT CHARACTER}", "").strip() for text in texts)


def main() -> None:
    """Write the text and say how many tokens it is when read back."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory of the unquantized model")
    parser.add_argument("out", type=Path, help="text file to write")
    parser.add_argument("--sequences", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    text = sample_text(args.model, sequences=args.sequences, tokens=args.tokens, seed=args.seed)
    args.out.write_text(text + "\n", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    count = len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    print(f"{args.out}: {len(text)} characters, {count} tokens")


if __name__ == "__main__":
    main()
