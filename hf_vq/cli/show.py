"""`hf-vq info`, `explain` and `demo`: look at models."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

from .arguments import add_loading, add_verb, dtype_of, positive, write_json


def add_info(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `info`."""
    verb = add_verb(verbs, "info", _info, "What a checkpoint holds, without loading its weights.")
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id")
    verb.add_argument("--json", metavar="OUT", help="also write the result here; - is stdout")
    return verb


def add_explain(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `explain`."""
    verb = add_verb(
        verbs, "explain", _explain, "Which kernel runs each layer, and why no faster one."
    )
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of a quantized model")
    verb.add_argument("--kv", metavar="SCHEME", help="also a KV cache, e.g. u4")
    add_loading(verb)
    return verb


def add_demo(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `demo`."""
    verb = add_verb(verbs, "demo", _demo, "Quantize, save, reload, generate, and print one table.")
    verb.add_argument("--model", metavar="MODEL", help="the original (default: the embedded one)")
    verb.add_argument("--scheme", nargs="+", metavar="S", help="default: vq-4 vq-2")
    verb.add_argument("--text", metavar="FILE", help="UTF-8 text to measure on")
    verb.add_argument("--tokens", type=positive, default=8192, metavar="N", help="of the text")
    verb.add_argument("--json", metavar="OUT", help="also write a record here; - is stdout")
    verb.add_argument("--revision", help="revision of the source, for the record (default: git's)")
    return verb


def _info(args: argparse.Namespace) -> None:
    from ..evaluation.info import describe, show

    found = describe(args.model)
    if args.json != "-":
        print(show(found))
    write_json(args.json, found)


def _explain(args: argparse.Namespace) -> None:
    from ..cache import VQCache
    from ..evaluation.load import load_model
    from ..hf.explain import explain

    model = load_model(args.model, dtype=dtype_of(args.dtype), device_map=args.device_map)
    cache = None if args.kv is None else VQCache.from_pretrained(model, args.kv)
    print(explain(model, cache=cache))


def _demo(args: argparse.Namespace) -> None:
    from transformers.utils import logging

    from ..evaluation import demo
    from ..evaluation.record import command_line, make_record
    from ..evaluation.text_tables import text_table

    logging.disable_progress_bar()  # the demo says itself what it does
    model, text = args.model, args.text
    if model is None or text is None:
        files = demo.demo_files()
        model, text = model or files[0], text or files[1]
    out = sys.stderr if args.json == "-" else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    schemes = " ".join(args.scheme or demo.SCHEMES).replace(",", " ").split()
    with warnings.catch_warnings():
        # The demo shows what data-free 2 bits cost; the advice to calibrate is for users.
        warnings.filterwarnings("ignore", message=".*without calibration data.*")
        settings, results = demo.run(
            model,
            text,
            schemes=schemes,
            tokens=args.tokens,
            new_tokens=demo.NEW_TOKENS,
            say=say,
        )
    say("\n" + text_table(*demo.cells(results["rows"])))
    if not demo.autoloads():
        say(
            "\nThe new process had to import hf_vq: it is not installed, or HF_VQ_AUTOLOAD=0. "
            "Run `pip install -e .` to load models without importing it."
        )
    options = {"model": "MODEL", "scheme": "", "text": "TEXT", "tokens": ""}
    command = command_line("hf-vq demo", args.parser, args, options)
    write_json(args.json, make_record("demo", command, settings, results, args.revision))
