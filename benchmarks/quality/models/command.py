"""`python -m benchmarks quality-models MODEL_DIR ...`: its options, its records, what it shows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_vq.errors import VQError
from hf_vq.evaluation.record import Recorder, command_line, read, unfinished

from ...records import RESULTS
from . import suite
from .suite import ModelSuite, Options

NAME = "quality-models"
# Options that a command repeats, with what stands for a path of this machine.
_SHOWN = {
    "text": "TEXT", "prompts": "PROMPTS", "calibration": "TEXT", "ggml": "GGML_DIR", "rows": "",
    "tokens": "", "context": "", "chat_tokens": "", "chat_context": "", "kv_passages": "",
    "kv_prompt": "", "kv_scored": "", "kv_long": "", "kv_long_passages": "", "passkeys": "",
    "calibration_tokens": "", "device": "", "name": "",
}  # fmt: skip


def add_verb(verbs: Any) -> None:
    """Add the suite to the parser of `python -m benchmarks`."""
    parser = verbs.add_parser(NAME, help=(suite.__doc__ or "").splitlines()[0])
    usual: dict[str, Any] = {
        name: field.default for name, field in Options.__dataclass_fields__.items()
    }
    parser.add_argument("models", nargs="+", metavar="MODEL_DIR", help="unquantized models")
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="TEXT", help="UTF-8 text file")
    add("--rows", nargs="+", default=list(usual["rows"]), metavar="PATTERN",
        help="such as 'weights:vq-*' or kv:u4 (default: all)")  # fmt: skip
    add("--list", action="store_true", help="show the rows that are asked for, and do nothing")
    add("--resume", action="store_true", help="keep the rows of this revision and these texts")
    add("--keep", metavar="REVISION", help="keep the other rows of a revision and these texts")
    add("--prompts", type=Path, metavar="FILE",
        help="JSON Lines with turns: measure on the model's own answers too")  # fmt: skip
    add("--answers", type=Path, default=usual["answers"], metavar="FOLDER",
        help="where they are kept (default: %(default)s)")  # fmt: skip
    add("--calibration", type=Path, metavar="TEXT", help="another text, for rows that learn")
    for name in ("tokens", "context", "chat_tokens", "chat_context", "kv_passages", "kv_prompt",
                 "kv_scored", "kv_long", "kv_long_passages", "calibration_tokens"):  # fmt: skip
        option = "--" + name.replace("_", "-")
        add(option, type=int, default=usual[name], metavar="N", help="default: %(default)s")
    add("--passkeys", type=int, nargs="+", default=list(usual["passkeys"]), metavar="N",
        help="tokens of their prompts")  # fmt: skip
    add("--ggml", type=Path, help="folder of llama.cpp's libraries")
    add("--device", help="as from_pretrained takes device_map")
    add("--out", type=Path, metavar="FOLDER", help="of the records")
    add("--name", default=NAME, help="of the suite in the records (default: %(default)s)")
    add("--revision", help="of the source (default: git is asked)")
    parser.set_defaults(parser=parser)


def measure(args: argparse.Namespace) -> int:
    """Run it: a record for each model. Returns the exit status of the command."""
    names = {name: getattr(args, name) for name in Options.__dataclass_fields__}
    lists = {key: tuple(names[key]) for key in ("rows", "passkeys")}
    options = Options(**{**names, **lists})
    wanted = suite.names(options)
    if not wanted:
        raise VQError(f"no row matches {' '.join(options.rows)}: --list shows them.")
    if args.list:
        print("\n".join(wanted))
        return 0
    if min(options.kv_passages, options.kv_long_passages) < 2:
        raise VQError("--kv-passages and --kv-long-passages are 2 or more: 1 has no error.")
    start = f"python -m benchmarks {NAME} MODEL_DIR"
    command = command_line(start, args.parser, args, _SHOWN)
    for model in args.models:
        one = ModelSuite(model, options)
        path = (args.out or RESULTS / "models") / f"{args.name}-{one.name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        device = str(one.model.device)
        recorder = Recorder(path, args.name, command, args.revision, device, one.settings)
        kept = keep(path, one.settings, recorder.record["revision"]) if args.resume else []
        others = keep(path, one.settings, args.keep) if args.keep else []
        others = [row for row in others if suite.row_name(row) not in wanted and row not in kept]
        for row in [*kept, *others]:
            recorder.add(row)

        def report(row: dict[str, Any], recorder: Recorder = recorder) -> None:
            show(row)
            recorder.add(row)

        try:
            suite.run(one, kept, recorder.record["revision"], report)
        except KeyboardInterrupt:
            print(f"stopped; --resume goes on with the rows in {recorder.unfinished}")
            return 130
        every = Options(text=options.text, passkeys=options.passkeys, kv_long=options.kv_long)
        order = suite.names(every)
        rows = sorted(
            recorder.record["results"]["rows"], key=lambda row: order.index(suite.row_name(row))
        )
        recorder.finish(one.settings, {"perplexity": one.perplexities(rows), "rows": rows})
        print(f"wrote {path}")
    return 0


def keep(path: Path, settings: dict[str, Any], revision: str | None) -> list[dict[str, Any]]:
    """Rows of this revision in a record, or in one that was stopped, of the same texts.

    Rows of a run without a text to learn from are those of a run with one.
    """
    without = {key: one for key, one in settings.items() if not key.startswith("calibration_")}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in (path, unfinished(path)):
        try:
            record = read(file)
        except (OSError, ValueError):
            continue
        if record.get("settings") not in (settings, without):
            continue
        for row in record["results"]["rows"]:
            if row.get("revision") == revision and "failed" not in row:
                found[suite.row_name(row), row.get("on")] = row
    return list(found.values())


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    name = suite.row_name(row) + (f" on {row['on']}" if "on" in row else "")
    if "failed" in row:
        print(f"{name:44s} {row['failed']}", flush=True)
        return
    if "found" in row:
        print(f"{name:44s} found {row['found']:.0f} %  log p {row['log_p']:.3f}", flush=True)
        return
    bits = row.get("bits_per_weight", row.get("bits_per_element"))
    grid = {"same": " (the source's grid)", "partly": " (the source's grid in part)"}
    print(
        f"{name:44s} {bits:6.3f} bits  KLD {row['kld']:.5f} ± {row['kld_se']:.5f}  p99 "
        f"{row['kld_p99']:.4f}  top-1 {row['top1']:.2f} %  perplexity {row['perplexity']:.3f} "
        f"({row['change']:+.2f} %){grid.get(row.get('grid') or '', '')}",
        flush=True,
    )
