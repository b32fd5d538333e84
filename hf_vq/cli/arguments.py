"""What several verbs have in common: their options, and where they write."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import VQConfigError, VQError

DTYPES = ("auto", "float32", "float16", "bfloat16")
UNFINISHED = ".unfinished"  # after OUT: where a long job keeps what it has done


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str
) -> argparse.ArgumentParser:
    """A verb that calls `run`, which may return an exit status; `text` is its help."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run, parser=verb)
    return verb


def add_loading(verb: argparse.ArgumentParser) -> None:
    """Add how a model is loaded."""
    verb.add_argument("--dtype", choices=DTYPES, default="auto", help="of what is not quantized")
    verb.add_argument("--device-map", metavar="MAP", help="as from_pretrained takes it")


def add_skip(verb: argparse.ArgumentParser) -> None:
    """Add which modules are left alone."""
    verb.add_argument(
        "--skip", nargs="+", metavar="NAME", help="modules to leave as they are, besides the head"
    )


def positive(text: str) -> int:
    """An integer above zero."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def dtype_of(name: str) -> Any:
    """What `from_pretrained` takes."""
    import torch

    return name if name == "auto" else getattr(torch, name)


def check_out(args: argparse.Namespace) -> Path:
    """OUT, which must not hold anything yet."""
    from ..hf.checkpoint.atomic_dir import recover

    out = Path(args.out)
    with writing(args.out):
        recover(out)
    if out.exists() and not args.force and (not out.is_dir() or any(out.iterdir())):
        raise VQConfigError(f"{out} exists; choose another directory or give --force.")
    return out


def unfinished(out: str) -> Path:
    """Where a long job keeps its work: beside OUT, also if that ends with a slash."""
    return Path(f"{os.path.abspath(out)}{UNFINISHED}")


def tokenizer_or_none(load: Callable[[str], Any], model: str) -> Any:
    """A tokenizer; where there is none, that is said."""
    try:
        return load(model)
    except VQError as error:
        print(f"hf-vq: saving without a tokenizer: {error}", file=sys.stderr)
        return None


def write_json(out: str | None, found: dict[str, Any]) -> None:
    """Write a result, where it was asked for."""
    if out is None:
        return
    if out == "-":
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    from ..evaluation.record import write_record

    with writing(out):
        write_record(found, Path(out))


@contextmanager
def writing(out: str | None) -> Iterator[None]:
    """Turn an error of the file system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise VQError(f"cannot write {out}: {error.strerror}.") from None
