"""`hf-vq calibrate`: of weights, or of a KV cache (`--kv`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import VQConfigError, VQError
from .arguments import add_loading, add_skip, add_verb, dtype_of, positive, unfinished, writing
from .quantize import quantized


def add_calibrate(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `calibrate`."""
    text = (
        "Quantize a model calibrated on a text, or calibrate a KV cache (--kv). For weights, an "
        "interrupted command continues, and processes of torchrun share the work."
    )
    verb = add_verb(verbs, "calibrate", _calibrate, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id")
    verb.add_argument("out", metavar="OUT", nargs="?", help="directory (--kv: default MODEL's)")
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
        help="UTF-8 file; for weights also a data set NAME[:CONFIG[:SPLIT]], or `default` for the "
        "text of the package (without: text that the model generates)",
    )  # fmt: skip
    verb.add_argument(
        "--tokens", type=positive, metavar="N",
        help="default: 131072 for weights, on a CPU 16384; 8192 for --kv, 4096 for its mean bits",
    )  # fmt: skip
    verb.add_argument(
        "--context", type=positive, metavar="L",
        help="default: as many as make 64 sequences, from 64 to 2048; for --kv 2048",
    )  # fmt: skip
    verb.add_argument(
        "--candidates", nargs="+", metavar="S", help="schemes that --target-bits chooses from"
    )
    verb.add_argument(
        "--sinks", type=int, metavar="N",
        help="for --kv: first tokens, of which nothing is learned (default: 4)",
    )  # fmt: skip
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add_skip(verb)
    verb.add_argument("--device", help="for weights: device that computes the blocks")
    verb.add_argument("--finetune", metavar="HOW", help="for weights: block, or model")
    verb.add_argument(
        "--without", nargs="+", metavar="T",
        help="for qoq-*, transforms to leave out: rotate, smooth_attention, smooth_outputs, "
        "reorder, clip, feedback",
    )  # fmt: skip
    add_loading(verb)
    verb.add_argument("--force", action="store_true", help="replace what is there")
    return verb


def _calibrate(args: argparse.Namespace) -> None:
    if args.kv is not None:
        for option in ("device", "skip", "candidates", "finetune", "without"):
            if getattr(args, option) is not None:
                raise VQConfigError(f"--{option} is for the weights, not for --kv.")
        _calibrate_cache(args)
        return
    if args.sinks is not None:
        raise VQConfigError("--sinks is for --kv, not for the weights.")
    from ..calibration.distributed import launched
    from ..calibration.resume import discard_if_saved
    from ..hf.calibration_options import OWN_WORDS

    if args.out is None:
        raise VQConfigError("calibrate needs OUT, a directory to write, for weights.")
    folder = unfinished(args.out)
    with writing(str(folder)):
        discard_if_saved(folder, Path(args.out))
    text = OWN_WORDS if args.text is None else args.text
    calibration = {"text": text, "context": args.context, "resume": folder}
    for option in ("tokens", "device", "finetune"):
        if getattr(args, option) is not None:
            calibration[option] = getattr(args, option)
    if args.without is not None:
        calibration["transforms"] = dict.fromkeys(args.without, False)
    options = {"target_bits": args.target_bits, "candidates": args.candidates}
    with launched() as rank:
        quantized(args, seed=args.seed, calibration=calibration, **options)
        if rank == 0:
            discard_if_saved(folder, Path(args.out))


def _calibrate_cache(args: argparse.Namespace) -> None:
    from ..cache.codebooks import FILE_NAME, title
    from ..calibration.kv_allocation import allocate_kv
    from ..calibration.kv_codebooks import calibrate_kv
    from ..calibration.text import read_text
    from ..evaluation.load import load_model, load_tokenizer
    from ..formats.catalog import kv_scheme

    target = _number(args.kv)
    if target is None:
        kv_scheme(args.kv)
    elif args.sinks is not None:
        raise VQConfigError("--sinks is for a scheme of --kv, not for its mean bits.")
    folder = Path(args.out or args.model)
    if args.out is None and not folder.is_dir():
        raise VQConfigError(f"{args.model} is not a directory; give OUT.")
    path = folder / FILE_NAME
    if path.exists() and not args.force:
        raise VQConfigError(f"{path} exists; give another OUT, or --force to replace it.")
    text = None if args.text is None else read_text(args.text)
    tokenizer = None if text is None else load_tokenizer(args.model)
    model = load_model(args.model, dtype=dtype_of(args.dtype), device_map=args.device_map)
    options = {"context": args.context, "seed": args.seed}
    options |= {"tokens": args.tokens} if args.tokens else {}
    if target is None:
        sinks = {} if args.sinks is None else {"sinks": args.sinks}
        codebooks = calibrate_kv(model, args.kv, text, tokenizer, **options, **sinks)
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
