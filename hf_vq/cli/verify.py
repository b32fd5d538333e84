"""`hf-vq verify`: compare files with the digests that were recorded when they were saved."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .arguments import add_verb

DAMAGED, NO_DIGESTS = 1, 3  # exit status


def add_verify(verbs: object) -> argparse.ArgumentParser:
    """Add the verb `verify`."""
    text = (
        "Compare the tensors of a model, a saved cache or KV codebooks with the digests that were "
        "recorded when they were saved. Exit status: 0 all are what was saved, 1 some are not, "
        "2 not such a file, 3 nothing is damaged, but a file carries no digests."
    )
    verb = add_verb(verbs, "verify", _verify, text)
    verb.add_argument("path", metavar="PATH", help="directory or Hub id of a model, or a file")
    return verb


def _verify(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ..hf.checkpoint.verify import Verification

    start = time.perf_counter()
    work = Verification(_local(args.path))
    options = {"unit": "B", "unit_scale": True, "delay": 1, "leave": False, "disable": None}
    with tqdm(total=work.nbytes, desc="Verifying", **options) as bar:
        found = work.run(bar.update)
    seconds = time.perf_counter() - start
    for problem in found.problems:
        print(f"damaged: {problem}")
    for name in found.without:
        print(
            f"no digests: {name} was written by an older hf_vq, or another program. Load and save "
            "it once more to add them."
        )
    if found.files:
        what = f"{found.tensors:,} tensors, {found.nbytes / 1e6:,.1f} MB in {found.files} files"
        print(f"compared {what}, {seconds:.1f} s", end="")
        print("" if found.problems else ": all as saved")
    sys.stdout.flush()
    return DAMAGED if found.problems else NO_DIGESTS if found.without else 0


def _local(path: str) -> Path:
    """Local path of a file or model; downloads a model of the Hub."""
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download

    from ..errors import VQError
    from ..evaluation.load import check_model, first_line

    check_model(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise VQError(
            f"{path} is neither a file nor a directory, and was not found on the Hub: "
            f"{first_line(error)}"
        ) from None
