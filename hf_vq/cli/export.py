"""`hf-vq export`: a plain Transformers checkpoint from one of codes."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_loading, add_verb, check_out, dtype_of, tokenizer_or_none


def add_export(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `export`."""
    text = (
        "Decode the codes and save a dense model, which any program reads that reads models of "
        "Transformers: llama.cpp's convert_hf_to_gguf.py, or another library that quantizes."
    )
    verb = add_verb(verbs, "export", _export, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of a model of codes")
    verb.add_argument("out", metavar="OUT", help="directory to write; must not hold anything yet")
    add_loading(verb)
    verb.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return verb


def _export(args: argparse.Namespace) -> None:
    from ..errors import VQConfigError
    from ..evaluation.load import load_model, load_tokenizer
    from ..hf.checkpoint.atomic_dir import replacing
    from ..hf.in_memory.quantize import dequantize
    from ..nn.replace import vq_modules

    out = check_out(args)
    model = load_model(args.model, dtype=dtype_of(args.dtype), device_map=args.device_map)
    if not vq_modules(model):
        raise VQConfigError(f"{args.model} holds no codes of hf_vq: there is nothing to decode.")
    dequantize(model)
    tokenizer = tokenizer_or_none(load_tokenizer, args.model)
    with replacing(out) as folder:  # model and tokenizer, whole or not at all
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{weights:,} weights in {str(model.dtype).removeprefix('torch.')} in {out}")
