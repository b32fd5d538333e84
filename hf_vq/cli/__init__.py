"""`hf-vq`: quantize, calibrate, evaluate and look at models from a shell, as `optimum-cli vq`.

Exit status: 0 done, 1 interrupted or an unexpected error, 2 an error that says what to do; that of
`verify` also says what was found (its `--help`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import metadata

from ..errors import VQError
from . import calibrate, chat, evaluate, export, quantize, show, verify
from .arguments import unfinished


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="hf-vq",
        description="Vector quantization of weights and KV cache for Hugging Face Transformers.",
    )
    parser.add_argument("--version", action="version", version=f"hf-vq {_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (
        quantize.add_quantize, calibrate.add_calibrate, quantize.add_convert, export.add_export,
        evaluate.add_eval, chat.add_chat, show.add_info, show.add_explain, verify.add_verify,
        show.add_demo,
    ):  # fmt: skip
        verb = add(verbs)
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _version() -> str:
    """The version, without an import of the package, which takes seconds."""
    try:
        return metadata.version("hf-vq")
    except metadata.PackageNotFoundError:  # a checkout on the path
        from .. import __version__

        return __version__


def main(argv: list[str] | None = None, *, before: Callable[[], object] = lambda: None) -> int:
    """Run one verb; returns the exit status.

    Args:
        before: is called when the arguments are known to be right.
    """
    args = build_parser().parse_args(argv)
    try:
        before()
        return args.run(args) or 0
    except VQError as error:
        if args.debug:
            raise
        message = " ".join(str(error).split())
        print(f"hf-vq: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        left = "nothing was left behind"
        out = getattr(
            args, {"eval": "json", "calibrate": "out", "convert": "out"}.get(args.verb, ""), None
        )
        if out and unfinished(out).exists():
            left = f"the same command goes on from {unfinished(out)}"
        print(f"hf-vq: interrupted; {left}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `hf-vq info ... | head`
        sys.stderr.close()
        return 0
