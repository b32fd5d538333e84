"""Options and output paths that several verbs share."""

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
UNFINISHED = ".unfinished"  # suffix of OUT for the intermediate results of a long job


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str
) -> argparse.ArgumentParser:
    """A verb that calls `run`, which may return an exit status; `text` is its help."""
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    verb.set_defaults(run=run, parser=verb)
    return verb


def add_loading(verb: argparse.ArgumentParser) -> None:
    """Add the options for loading a model."""
    verb.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of tensors that are not quantized"
    )
    verb.add_argument("--device-map", metavar="MAP", help="device_map of from_pretrained")


def add_skip(verb: argparse.ArgumentParser) -> None:
    """Add the option for modules that stay dense."""
    verb.add_argument(
        "--skip", nargs="+", metavar="NAME", help="modules not to quantize, with the output head"
    )


def positive(text: str) -> int:
    """Parse an integer above zero."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def dtype_of(name: str) -> Any:
    """Convert a name of DTYPES to the `dtype` argument of `from_pretrained`."""
    import torch

    return name if name == "auto" else getattr(torch, name)


def check_out(args: argparse.Namespace) -> Path:
    """Path of OUT.

    Raises:
        VQConfigError: OUT exists and is not empty, without --force.
    """
    from ..hf.checkpoint.atomic_dir import recover

    out = Path(args.out)
    with writing(args.out):
        recover(out)
    if out.exists() and not args.force and (not out.is_dir() or any(out.iterdir())):
        raise VQConfigError(f"{out} exists; choose another directory or give --force.")
    return out


def unfinished(out: str) -> Path:
    """Folder for the intermediate results of a long job: OUT without a final slash + UNFINISHED."""
    return Path(f"{os.path.abspath(out)}{UNFINISHED}")


def tokenizer_or_none(load: Callable[[str], Any], model: str) -> Any:
    """Load a tokenizer; print a message and return None if there is none."""
    try:
        return load(model)
    except VQError as error:
        print(f"hf-vq: saving without a tokenizer: {error}", file=sys.stderr)
        return None


def write_json(out: str | None, found: dict[str, Any]) -> None:
    """Write a result to the path of --json; - is stdout, None writes nothing."""
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
