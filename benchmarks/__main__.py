"""`python -m benchmarks SUITE`: run a suite, print its rows, write its record."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_vq import env
from hf_vq.errors import VQError
from hf_vq.evaluation.record import Recorder, command_line

from . import stale, suites
from .cpu import models as cpu_models
from .cuda import generate_kv, tune
from .fine_tuning import suite as fine_tuning
from .quality.models import command as quality_models
from .records import RESULTS, path_of
from .serving import serve
from .tables import pages


def build_parser() -> argparse.ArgumentParser:
    """The arguments of every suite."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure, record, and write the tables."
    )
    verbs = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name in suites.QUALITY:
        module = suites.load(name)
        suite = verbs.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        suite.add_argument("model", metavar="MODEL_DIR", help="unquantized model")
        suite.add_argument("--text", required=True, metavar="TEXT", help="UTF-8 text file")
        for option in ("tokens", "context"):
            usual = inspect.signature(module.run).parameters[option].default
            suite.add_argument(f"--{option}", type=int, default=usual, help="default: %(default)s")
        suite.add_argument("--schemes", nargs="+", default=list(module.SCHEMES), metavar="SCHEME")
        suite.add_argument("--no-baselines", action="store_true", help="only the schemes")
        suite.add_argument("--out", type=Path, help="record (default: in results)")
        suite.add_argument("--revision", help="of the source (default: git is asked)")
        suite.add_argument("--calibration", metavar="TEXT", help="another text, to learn from")
        if name == "quality-weights":
            suite.add_argument("--kinds", nargs="+", choices=module.KINDS, help="only such rows")
        if name in ("quality-weights", "quality-finetune"):
            suite.add_argument("--device-map", metavar="MAP", help="as from_pretrained takes it")
        suite.set_defaults(parser=suite)
    for name in suites.TIMED:
        module = suites.load(name)
        suite = verbs.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        if name == "cpu-generate":
            suite.add_argument("--llama-bench", type=Path, help="program of llama.cpp")
            suite.add_argument("--gguf", type=Path, help="folder with kv16-Q4_0.gguf and others")
            suite.add_argument("--llama-contexts", type=int, nargs="+",
                               default=list(module.CONTEXTS), help="at which it runs")  # fmt: skip
        elif name.startswith("serve"):
            suite.add_argument("--pairs", nargs="+", metavar="WEIGHTS/KV", type=serve.pair,
                               help="schemes, or dense and floats")  # fmt: skip
            suite.add_argument("--requests", type=int, nargs="+",
                               help="at once; 0 = as many as fit into --memory-gb")  # fmt: skip
            suite.add_argument("--prompt", type=int, help="tokens of a prompt")
            suite.add_argument("--new", type=int, help="tokens of an answer")
            suite.add_argument("--memory-gb", type=float, help="of weights, pages and all else")
        elif name.startswith("cuda-"):
            suite.add_argument("--schemes", nargs="+", default=list(module.SCHEMES))
            if isinstance(getattr(module, "TOKENS", None), tuple):
                suite.add_argument("--tokens", type=int, nargs="+", default=list(module.TOKENS))
            if name == "cuda-passes":
                suite.add_argument("--cubins", type=Path, help="folder of cutile_cubins")
            if name == "cuda-attention":
                suite.add_argument("--quick", action="store_true", help="three small cases")
            if name == "cuda-generate-kv":
                suite.add_argument("--cases", type=generate_kv.Case.parse, nargs="+",
                                   default=list(module.CASES), metavar="ROWSxTOKENS")  # fmt: skip
            if name in ("cuda-quantize", "cuda-calibrate", "cuda-generate-kv", "cuda-offload"):
                suite.add_argument("--layers", type=int, default=module.LAYERS)
        else:
            suite.add_argument("--threads", type=int, nargs="+", default=[1, 2])
            if name == "cpu-linear":
                suite.add_argument("--ggml", type=Path, help="folder of llama.cpp's libraries")
        if not name.startswith("serve"):
            suite.add_argument("--rounds", type=int, help="interleaved rounds")
        suite.add_argument("--out", type=Path, help="record (default: in results)")
        suite.add_argument("--revision", help="of the source (default: git is asked)")
        suite.set_defaults(parser=suite)
    quality_models.add_verb(verbs)
    fine_tuning.add_verb(verbs)
    cpu_models.add_verb(verbs)
    tuning = verbs.add_parser("cuda-tune", help=(tune.__doc__ or "").splitlines()[0])
    tuning.add_argument("--tokens", type=int, nargs="+", default=list(tune.TOKENS))
    tuning.add_argument("--schemes", nargs="+", default=list(tune.SCHEMES), metavar="SCHEME")
    tuning.add_argument("--shapes", type=_shape, nargs="+", default=list(tune.SHAPES),
                      metavar="ROWSxCOLUMNS")  # fmt: skip
    tuning.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    tuning.add_argument("--out", type=Path, help="table that is extended (default: on disk)")
    write = verbs.add_parser("tables", help="Write the tables and pictures of README.md and docs.")
    write.add_argument("--check", action="store_true", help="change nothing, fail if one is old")
    write.add_argument("--root", type=Path, default=RESULTS.parents[1], help="the checkout")
    verbs.add_parser("stale", help="List records whose sources were edited since.")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one suite.

    Returns:
        0 if it succeeded, 1 if a checked table is not current, 2 on a VQError, 130 on Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    try:
        if args.suite in suites.TIMED:
            return _time(args)
        if args.suite == quality_models.NAME:
            return quality_models.measure(args)
        if args.suite == fine_tuning.NAME:
            return fine_tuning.measure(args)
        if args.suite == cpu_models.NAME:
            return cpu_models.measure(args)
        if args.suite == "cuda-tune":
            return _tune(args)
        if args.suite == "stale":
            print(stale.table(RESULTS.parents[1]))
            return 0
        return _tables(args) if args.suite == "tables" else _measure(args)
    except VQError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return 2


def _measure(args: argparse.Namespace) -> int:
    module: Any = suites.load(args.suite)
    start = f"python -m benchmarks {args.suite} MODEL_DIR --text TEXT"
    more = {}
    if args.calibration:
        start, more = f"{start} --calibration TEXT", {"calibration": args.calibration}
    names = ["tokens", "context", "schemes", "no_baselines"]
    for option in ("kinds", "device_map"):
        if getattr(args, option, None):
            names, more = [*names, option], {**more, option: getattr(args, option)}
    options = dict.fromkeys(names, "")
    command = command_line(start, args.parser, args, options)
    learns = args.suite in ("quality-kv-calibrated", "quality-finetune", "quality-qoq")
    if learns and not args.calibration:
        raise VQError("there is nothing to calibrate on: give --calibration TEXT.")
    device = getattr(args, "device_map", None) or "cpu"
    whole = command.partition(" --device-map")[0] == start and args.calibration
    if not whole and args.out is None:
        raise VQError("the tables need the whole suite, with --calibration: give --out otherwise.")
    measure = functools.partial(
        module.run,
        args.model,
        args.text,
        tokens=args.tokens,
        context=args.context,
        schemes=args.schemes,
        with_baselines=not args.no_baselines,
        **more,
    )
    resumes = args.suite in ("quality-weights", "quality-finetune", "quality-qoq")
    return _record(args, command, device, measure, _print_row, resumes)


def _time(args: argparse.Namespace) -> int:
    options = {"threads": "", "tokens": "", "schemes": "", "layers": "", "rounds": "",
               "quick": "", "cases": "", "pairs": "", "requests": "", "prompt": "", "new": "",
               "memory_gb": "", "llama_bench": "LLAMA_BENCH", "gguf": "GGUF_DIR",
               "llama_contexts": "", "ggml": "GGML_DIR", "cubins": "CUBINS_DIR"}  # fmt: skip
    names = {name: shown for name, shown in options.items() if hasattr(args, name)}
    isa = env.CPU_ISA.get()
    start = f"{f'HF_VQ_CPU_ISA={isa} ' if isa else ''}python -m benchmarks {args.suite}"
    command = command_line(start, args.parser, args, names)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    measure = functools.partial(suites.load(args.suite).run, **given)
    device = "cpu" if args.suite.startswith("cpu-") else "cuda"
    return _record(args, command, device, measure, _print_time)


def _record(
    args: argparse.Namespace,
    command: str,
    device: str,
    measure: Callable[..., tuple[dict[str, Any], dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    resumes: bool = False,
) -> int:
    """Run a suite, and show and keep each row when it is known; with `resumes`, take up those of a
    run that was stopped."""
    out = args.out or path_of(args.suite)
    recorder = Recorder(out, args.suite, command, args.revision, device)
    if recorder.record["revision"] is None:
        print("benchmarks: this is no git checkout: give --revision.", file=sys.stderr)

    def report(row: dict[str, Any]) -> None:
        show(row)
        recorder.add(row)

    try:
        more = {"take_up": recorder.take_up} if resumes else {}
        settings, results = measure(report=report, **more)
    except KeyboardInterrupt:
        print(f"benchmarks: stopped; the rows are in {recorder.unfinished}", file=sys.stderr)
        return 130
    recorder.finish(settings, results)
    print(f"wrote {out}")
    return 0


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def _tune(args: argparse.Namespace) -> int:
    path = tune.run(
        schemes=args.schemes,
        shapes=args.shapes,
        tokens=args.tokens,
        rounds=args.rounds,
        table=args.out,
        report=_print_time,
    )
    print(f"wrote {path}")
    return 0


def _print_time(row: dict[str, Any]) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {number:.2f}" for name, number in value.items())
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    print("  ".join(f"{name} {shown(value)}" for name, value in row.items()), flush=True)


def _print_row(row: dict[str, Any]) -> None:
    case = f" ({row['case']})" if "case" in row else ""
    kind = row.get("kind", "baseline")
    case = case or f" ({kind})" * (kind not in ("baseline", "scheme"))
    bits = row.get("bits_per_weight", row.get("bits_per_element"))
    seconds = row.get("quantize_seconds")
    print(
        f"{row['name'] + case:44s} {bits:6.3f} bits  KLD {row['kld']:.5f} ± {row['kld_se']:.5f}  "
        f"p99 {row['kld_p99']:.4f}  top-1 {row['top1']:.2f} %  perplexity {row['perplexity']:.3f} "
        f"({row['change']:+.2f} %)  {f'{seconds:.1f} s' if seconds else ''}",
        flush=True,
    )


def _tables(args: argparse.Namespace) -> int:
    old = pages.write(args.root, check=args.check)
    if old and args.check:
        print(
            f"old tables in {', '.join(old)}: run `python -m benchmarks tables`.", file=sys.stderr
        )
    return int(bool(old) and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
