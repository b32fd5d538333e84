"""`hf-vq eval`: measure one model, or compare schemes and other libraries on it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import VQConfigError
from .arguments import add_loading, add_verb, dtype_of, positive, write_json, writing


def add_eval(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `eval`."""
    text = (
        "Perplexity, KL divergence, stored bits, tokens per second; with --compare, of several "
        "schemes and other libraries. With --json, an interrupted comparison goes on when the "
        "command is given again."
    )
    verb = add_verb(verbs, "eval", _eval, text)
    verb.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory or Hub id, quantized or not"
    )
    verb.add_argument("--reference", metavar="MODEL", help="the original, to compare with")
    verb.add_argument(
        "--text", metavar="FILE", help="UTF-8 text (default, for the demo's model only: the demo's)"
    )
    verb.add_argument("--tokens", type=positive, metavar="N", help="tokens of the text to use")
    verb.add_argument(
        "--context", type=positive, default=1024, metavar="L", help="default: %(default)s"
    )
    verb.add_argument(
        "--cache",
        nargs="+",
        metavar="SCHEME",
        help="read keys and values from a VQCache; with --compare several, also hqq-4, quanto-2",
    )
    add_loading(verb)
    verb.add_argument("--json", metavar="OUT", help="also write the result here; - is stdout")
    verb.add_argument("--card", action="store_true", help="also write it into MODEL's README.md")
    verb.add_argument(
        "--compare",
        nargs="*",
        metavar="NAME",
        help="measure MODEL quantized in each of these ways: schemes, nf4, hqq-4, torchao-4, "
        "quanto-4, gptq-4 (default, without --cache: all kinds)",
    )
    verb.add_argument("--calibration", metavar="FILE", help="with --compare: a text to learn from")
    verb.add_argument("--plot", metavar="OUT", help="with --compare: also draw it (.png, .svg)")
    verb.add_argument("--markdown", action="store_true", help="with --compare: as Markdown")
    return verb


def _eval(args: argparse.Namespace) -> None:
    args.model = args.model or _last_name(args)
    comparing = args.compare is not None
    for option in ("reference", "card") if comparing else ("calibration", "plot", "markdown"):
        if getattr(args, option):
            where = (
                "not for eval --compare: MODEL is the original" if comparing else "for --compare"
            )
            raise VQConfigError(f"--{option} is {where}.")
    if comparing:
        return _compare(args)
    if args.cache and len(args.cache) > 1:
        raise VQConfigError("eval takes one --cache; several are for eval --compare.")
    from ..evaluation.demo import default_text
    from ..evaluation.evaluate import evaluate
    from ..evaluation.record import command_line

    found = evaluate(
        args.model,
        text=args.text or default_text(args.model),
        reference=args.reference,
        tokens=args.tokens,
        context=args.context,
        cache=args.cache and args.cache[0],
        dtype=args.dtype,
        device_map=args.device_map,
        card=args.card,
    )
    if args.json != "-":
        print(found.table())
        if found.score is None:
            print("\nGive --reference for the KL divergence from the original.")
    options = {"reference": "MODEL", "text": "TEXT", "tokens": "", "context": "", "cache": ""}
    options |= {"dtype": "", "device_map": "MAP"}
    command = command_line("hf-vq eval MODEL", args.parser, args, options)
    write_json(args.json, {"command": command, **found.to_dict()})


def _last_name(args: argparse.Namespace) -> str:
    """Take MODEL from the end of `--cache SCHEME` or `--compare NAME`, if it follows them."""
    lists = [names for names in (args.cache, args.compare) if names and len(names) > 1]
    if len(lists) != 1:
        raise VQConfigError("eval needs MODEL: put it before --cache and --compare.")
    found: str = lists[0].pop()
    return found


def _compare(args: argparse.Namespace) -> None:
    from ..evaluation import compare, report
    from ..evaluation.demo import default_text
    from ..evaluation.record import command_line
    from ..evaluation.text_tables import markdown_table, text_table

    if args.plot:
        report.check_plot(args.plot)
    everything = not args.compare and args.cache is None
    comparison = compare.Comparison(
        args.model,
        args.text or default_text(args.model),
        compare.WEIGHTS if everything else args.compare,
        compare.CACHES if everything else args.cache or (),
        calibration=args.calibration,
        tokens=args.tokens,
        context=args.context,
        dtype=dtype_of(args.dtype),
        device_map=args.device_map,
    )
    options = {"text": "TEXT", "tokens": "", "context": "", "cache": "", "dtype": ""}
    options |= {"device_map": "MAP", "calibration": "TEXT"}
    start = " ".join(["hf-vq eval MODEL --compare", *args.compare])
    command = command_line(start, args.parser, args, options)
    out = None if args.json in (None, "-") else Path(args.json)
    with writing(args.json):
        record = compare.record(comparison, command, out)
    rows = record["results"]["rows"]
    if args.json == "-":
        write_json("-", record)
    else:
        print(report.tables(rows, markdown_table if args.markdown else text_table))
    if args.plot:
        report.plot(rows, args.plot, report.title(comparison.settings))
