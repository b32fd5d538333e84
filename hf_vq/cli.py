"""`hf-vq`: quantize, calibrate, evaluate and look at models from a shell, as `optimum-cli vq`.

Exit status: 0 done, 1 interrupted or an unexpected error, 2 an error that says what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import VQConfigError, VQError

DTYPES = ("auto", "float32", "float16", "bfloat16")
UNFINISHED = ".unfinished"  # after OUT: where a long job keeps what it has done


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="hf-vq",
        description="Vector quantization of weights and KV cache for Hugging Face Transformers.",
    )
    from . import __version__

    parser.add_argument("--version", action="version", version=f"hf-vq {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (_add_quantize, _add_calibrate, _add_eval, _add_info, _add_explain, _add_demo):
        verb = add(verbs)
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except VQError as error:
        if args.debug:
            raise
        message = " ".join(str(error).split())
        print(f"hf-vq: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        left = "nothing was left behind"
        if args.verb == "eval" and args.compare is not None and args.json:
            kept = _unfinished(args.json)
            if kept.exists():
                left = f"the same command goes on from {kept}"
        if args.verb == "calibrate" and args.kv is None and args.out:
            kept = _unfinished(args.out)
            if kept.exists():
                left = f"the same command goes on from {kept}"
        print(f"hf-vq: interrupted; {left}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `hf-vq info ... | head`
        sys.stderr.close()
        return 0
    return 0


def _add_quantize(verbs: Any) -> argparse.ArgumentParser:
    verb = _verb(verbs, "quantize", _quantize, "Quantize a model and save it.")
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of the original")
    verb.add_argument("out", metavar="OUT", help="directory to write; must not hold anything yet")
    verb.add_argument("--scheme", default="vq-4", help="name or spec string (default: %(default)s)")
    _add_skip(verb)
    _add_loading(verb)
    verb.add_argument("--push-to", metavar="REPO", help="also push to this Hub repository")
    verb.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return verb


def _add_calibrate(verbs: Any) -> argparse.ArgumentParser:
    text = (
        "Quantize a model with the help of a text, or learn what a KV cache needs of it (--kv). Of "
        "weights, an interrupted command goes on, and processes of torchrun share the work."
    )
    verb = _verb(verbs, "calibrate", _calibrate, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id")
    verb.add_argument(
        "out", metavar="OUT", nargs="?", help="directory to write (--kv: default MODEL's)"
    )
    what = verb.add_mutually_exclusive_group(required=True)
    what.add_argument("--scheme", metavar="SCHEME", help="of the weights: vq-4, vq-2, ...")
    what.add_argument(
        "--target-bits", type=float, metavar="B",
        help="of the weights: a scheme for each layer, with B stored bits per weight on average",
    )  # fmt: skip
    what.add_argument(
        "--kv", metavar="SCHEME",
        help="of the cache: nomad-4, cq-4, u4, ..., or mean bits, as 3: schemes for each layer",
    )  # fmt: skip
    verb.add_argument(
        "--text", metavar="TEXT",
        help="UTF-8 file; for weights also a data set NAME[:CONFIG[:SPLIT]] (default: what the "
        "model writes by itself)",
    )  # fmt: skip
    verb.add_argument(
        "--tokens", type=_positive, metavar="N",
        help="default: 131072 for weights, 8192 for --kv, 4096 for its mean bits",
    )  # fmt: skip
    verb.add_argument(
        "--context", type=_positive, metavar="L", help="tokens of a sequence (default: up to 2048)"
    )
    verb.add_argument(
        "--candidates", nargs="+", metavar="SCHEME", help="that --target-bits chooses from"
    )
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    _add_skip(verb)
    verb.add_argument("--device", help="of weights: where blocks are computed (as cuda)")
    verb.add_argument("--finetune", metavar="HOW", help="of weights: block, or model")
    _add_loading(verb)
    verb.add_argument("--force", action="store_true", help="replace what is there")
    return verb


def _add_eval(verbs: Any) -> argparse.ArgumentParser:
    text = (
        "Perplexity, KL divergence, stored bits, tokens per second; with --compare, of several "
        "schemes and other libraries. With --json, an interrupted comparison goes on when the "
        "command is given again."
    )
    verb = _verb(verbs, "eval", _eval, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id, quantized or not")
    verb.add_argument("--reference", metavar="MODEL", help="the original, to compare with")
    verb.add_argument(
        "--text", metavar="FILE", help="UTF-8 text (default, for the demo's model only: the demo's)"
    )
    verb.add_argument("--tokens", type=_positive, metavar="N", help="tokens of the text to use")
    verb.add_argument(
        "--context", type=_positive, default=1024, metavar="L", help="default: %(default)s"
    )
    verb.add_argument(
        "--cache",
        nargs="+",
        metavar="SCHEME",
        help="read keys and values from a VQCache; several with --compare, where hqq-4, quanto-2 "
        "and such are Transformers' QuantizedCache",
    )
    _add_loading(verb)
    verb.add_argument("--json", metavar="OUT", help="also write the result here; - is stdout")
    verb.add_argument(
        "--card", action="store_true", help="also write it into MODEL's README.md and config.json"
    )
    verb.add_argument(
        "--compare",
        nargs="*",
        metavar="NAME",
        help="quantize MODEL, the original, in each of these ways: schemes, and nf4, hqq-4, "
        "torchao-4, quanto-4, gptq-4 and such (default, without --cache: a list of all kinds)",
    )
    verb.add_argument(
        "--calibration", metavar="FILE", help="with --compare: another text, to learn from"
    )
    verb.add_argument("--plot", metavar="OUT", help="with --compare: also draw it (.png, .svg)")
    verb.add_argument("--markdown", action="store_true", help="with --compare: as Markdown")
    return verb


def _add_info(verbs: Any) -> argparse.ArgumentParser:
    verb = _verb(verbs, "info", _info, "What a checkpoint holds, without loading its weights.")
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id")
    verb.add_argument("--json", metavar="OUT", help="also write the result here; - is stdout")
    return verb


def _add_explain(verbs: Any) -> argparse.ArgumentParser:
    verb = _verb(verbs, "explain", _explain, "Which kernel runs each layer, and why no faster one.")
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of a quantized model")
    verb.add_argument("--kv", metavar="SCHEME", help="also a KV cache, e.g. u4")
    _add_loading(verb)
    return verb


def _add_demo(verbs: Any) -> argparse.ArgumentParser:
    verb = _verb(verbs, "demo", _demo, "Quantize, save, reload, generate, and print one table.")
    verb.add_argument("--model", metavar="MODEL", help="the original (default: the embedded one)")
    verb.add_argument("--scheme", nargs="+", metavar="S", help="default: vq-4 vq-2")
    verb.add_argument("--text", metavar="FILE", help="UTF-8 text to measure on")
    verb.add_argument("--tokens", type=_positive, default=8192, metavar="N", help="of the text")
    verb.add_argument("--json", metavar="OUT", help="also write a record here; - is stdout")
    verb.add_argument("--revision", help="of the source, for the record (default: git is asked)")
    return verb


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run, parser=verb)
    return verb


def _add_loading(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dtype", choices=DTYPES, default="auto", help="of what is not quantized")
    verb.add_argument("--device-map", metavar="MAP", help="as from_pretrained takes it")


def _add_skip(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--skip", nargs="+", metavar="NAME", help="modules to leave as they are, besides the head"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def _quantize(args: argparse.Namespace) -> None:
    model, tokenizer = _quantized(args)
    if args.push_to:
        model.push_to_hub(args.push_to)
        if tokenizer is not None:
            tokenizer.push_to_hub(args.push_to)
        print(f"pushed to {args.push_to}")


def _quantized(args: argparse.Namespace, **options: Any) -> tuple[Any, Any]:
    """Quantize, save and describe a model; `options` are more arguments of `VQConfig`."""
    from .bench.info import describe, kinds_table, summary
    from .bench.load import load_model, load_tokenizer
    from .bench.storage import check_original
    from .hf.config import VQConfig
    from .hf.folder import replacing
    from .hf.team import Team

    config = VQConfig(args.scheme, modules_to_not_convert=args.skip, **options)
    out = Path(args.out)
    if out.exists() and not args.force and (not out.is_dir() or any(out.iterdir())):
        raise VQConfigError(f"{out} exists; choose another directory or give --force.")
    check_original(args.model)
    model = load_model(
        args.model, dtype=_dtype(args.dtype), config=config, device_map=args.device_map
    )
    tokenizer = _tokenizer_or_none(load_tokenizer, args.model)
    if Team().rank > 0:  # the first process saves what all have found
        return model, tokenizer
    with replacing(out) as folder:  # model and tokenizer, whole or not at all
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    description = describe(str(out))
    print(kinds_table(description))
    print(f"\n{summary(description, config)} in {out}")
    return model, tokenizer


def _calibrate(args: argparse.Namespace) -> None:
    if args.kv is not None:
        for option in ("device", "skip", "candidates", "finetune"):
            if getattr(args, option) is not None:
                raise VQConfigError(f"--{option} is for the weights, not for --kv.")
        _calibrate_cache(args)
        return
    from .hf.team import launched
    from .hf.text import OWN_WORDS

    if args.out is None:
        raise VQConfigError("calibrate needs OUT, a directory to write, for weights.")
    folder = _unfinished(args.out)
    text = OWN_WORDS if args.text is None else args.text
    calibration = {"text": text, "context": args.context, "resume": folder}
    given = ("tokens", "device", "finetune")
    calibration |= {k: v for k in given if (v := getattr(args, k)) is not None}
    options = {"target_bits": args.target_bits, "candidates": args.candidates}
    with launched() as rank:
        _quantized(args, seed=args.seed, calibration=calibration, **options)
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _unfinished(out: str) -> Path:
    """Where a long job keeps its work: beside OUT, also if that ends with a slash."""
    return Path(f"{os.path.abspath(out)}{UNFINISHED}")


def _calibrate_cache(args: argparse.Namespace) -> None:
    from .bench.load import load_model, load_tokenizer
    from .cache.codebooks import FILE_NAME, title
    from .formats.catalog import kv_scheme
    from .hf.allocate import allocate_kv
    from .hf.calibrate import calibrate_kv
    from .hf.text import read_text

    target = _number(args.kv)
    if target is None:
        kv_scheme(args.kv)
    folder = Path(args.out or args.model)
    if args.out is None and not folder.is_dir():
        raise VQConfigError(f"{args.model} is not a directory; give OUT.")
    path = folder / FILE_NAME
    if path.exists() and not args.force:
        raise VQConfigError(f"{path} exists; give another OUT, or --force to replace it.")
    text = None if args.text is None else read_text(args.text)
    tokenizer = None if text is None else load_tokenizer(args.model)
    model = load_model(args.model, dtype=_dtype(args.dtype), device_map=args.device_map)
    options = {"context": args.context, "seed": args.seed}
    options |= {"tokens": args.tokens} if args.tokens else {}
    if target is None:
        codebooks = calibrate_kv(model, args.kv, text, tokenizer, **options)
    else:
        codebooks = allocate_kv(model, text, tokenizer, target_bits=target, **options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VQError(f"cannot make {folder}: {error.strerror}.") from None
    codebooks.save(path)
    found = {
        "codebooks of keys": codebooks.keys,
        "codebooks of values": codebooks.values,
        "means of keys": codebooks.key_means,
    }
    learned = [what for what, parts in found.items() if any(part is not None for part in parts)]
    print(
        f"{title(codebooks.scheme)}: {' and '.join(learned)} in {len(codebooks)} layers, "
        f"{path.stat().st_size / 1e3:.1f} kB in {path}"
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _tokenizer_or_none(load: Callable[[str], Any], model: str) -> Any:
    try:
        return load(model)
    except VQError as error:
        print(f"hf-vq: saving without a tokenizer: {error}", file=sys.stderr)
        return None


def _eval(args: argparse.Namespace) -> None:
    if args.compare is not None:
        _compare(args)
        return
    for option in ("calibration", "plot", "markdown"):
        if getattr(args, option):
            raise VQConfigError(f"--{option} is for eval --compare.")
    if args.cache and len(args.cache) > 1:
        raise VQConfigError("eval takes one --cache; several are for eval --compare.")
    from .bench.demo import default_text
    from .bench.evaluate import evaluate
    from .bench.record import command_line

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
    _write_json(args.json, {"command": command, **found.to_dict()})


def _compare(args: argparse.Namespace) -> None:
    from .bench import compare, compare_show
    from .bench.demo import default_text
    from .bench.record import command_line
    from .bench.show import markdown_table, text_table

    for option in ("reference", "card"):
        if getattr(args, option):
            raise VQConfigError(f"with --compare, MODEL is the original: leave --{option} out.")
    if args.plot:
        compare_show.check_plot(args.plot)
    everything = not args.compare and args.cache is None
    comparison = compare.Comparison(
        args.model,
        args.text or default_text(args.model),
        compare.WEIGHTS if everything else args.compare,
        compare.CACHES if everything else args.cache or (),
        calibration=args.calibration,
        tokens=args.tokens,
        context=args.context,
        dtype=_dtype(args.dtype),
        device_map=args.device_map,
    )
    options = {"text": "TEXT", "tokens": "", "context": "", "cache": "", "dtype": ""}
    options |= {"device_map": "MAP", "calibration": "TEXT"}
    start = " ".join(["hf-vq eval MODEL --compare", *args.compare])
    command = command_line(start, args.parser, args, options)
    out = None if args.json in (None, "-") else Path(args.json)
    with _writing(args.json):
        record = compare.record(comparison, command, out)
    rows = record["results"]["rows"]
    if args.json == "-":
        _write_json("-", record)
    else:
        print(compare_show.tables(rows, markdown_table if args.markdown else text_table))
    if args.plot:
        compare_show.plot(rows, args.plot, compare_show.title(comparison.settings))


def _info(args: argparse.Namespace) -> None:
    from .bench.info import describe, show

    found = describe(args.model)
    if args.json != "-":
        print(show(found))
    _write_json(args.json, found)


def _explain(args: argparse.Namespace) -> None:
    from .bench.load import load_model
    from .cache import VQCache
    from .hf.explain import explain

    model = load_model(args.model, dtype=_dtype(args.dtype), device_map=args.device_map)
    cache = None if args.kv is None else VQCache.from_pretrained(model, args.kv)
    print(explain(model, cache=cache))


def _demo(args: argparse.Namespace) -> None:
    from transformers.utils import logging

    from .bench import demo
    from .bench.record import command_line, make_record
    from .bench.show import text_table
    from .bench.tables import demo_cells

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
    say("\n" + text_table(*demo_cells(results["rows"])))
    if not demo.autoloads():
        say(
            "\nThe new process had to import hf_vq: it is not installed, or HF_VQ_AUTOLOAD=0. "
            "Run `pip install -e .` to load models without importing it."
        )
    options = {"model": "MODEL", "scheme": "", "text": "TEXT", "tokens": ""}
    command = command_line("hf-vq demo", args.parser, args, options)
    _write_json(args.json, make_record("demo", command, settings, results, args.revision))


def _dtype(name: str) -> Any:
    import torch

    return name if name == "auto" else getattr(torch, name)


def _write_json(out: str | None, found: dict[str, Any]) -> None:
    if out is None:
        return
    if out == "-":
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    from .bench.record import write_record

    with _writing(out):
        write_record(found, Path(out))


@contextmanager
def _writing(out: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise VQError(f"cannot write {out}: {error.strerror}.") from None


if __name__ == "__main__":
    sys.exit(main())
