"""`hf-vq quantize` and `hf-vq convert`: make a checkpoint of codes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_loading, add_skip, add_verb, check_out, dtype_of, tokenizer_or_none


def add_quantize(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `quantize`."""
    verb = add_verb(verbs, "quantize", _quantize, "Quantize a model and save it.")
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of the original")
    verb.add_argument("out", metavar="OUT", help="directory to write; must not hold anything yet")
    kind = verb.add_mutually_exclusive_group()
    kind.add_argument("--scheme", help="name or spec string (default: vq-4)")
    kind.add_argument("--bits", type=int, metavar="B", help="1 to 8, in the place of a scheme")
    verb.add_argument(
        "--embeddings", metavar="KIND", help="also store the embedding: turboquant-6, int8, .."
    )
    verb.add_argument(
        "--activations", metavar="A", default="auto",
        help="tokens that show which weights matter: model (the model's own words), random, a "
        "UTF-8 file, a data set NAME[:CONFIG[:SPLIT]], none, or auto: model where that is possible "
        "(default: %(default)s)",
    )  # fmt: skip
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add_skip(verb)
    add_loading(verb)
    verb.add_argument("--push-to", metavar="REPO", help="also push to this Hub repository")
    verb.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return verb


def add_convert(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `convert`."""
    text = (
        "Convert a checkpoint of another project, such as AQLM, to the format of hf_vq. "
        "An interrupted command goes on when it is given again."
    )
    verb = add_verb(verbs, "convert", _convert, text)
    verb.add_argument("model", metavar="IN", help="directory or Hub id of an AQLM, .. checkpoint")
    verb.add_argument("out", metavar="OUT", help="directory to write; must not hold anything yet")
    verb.add_argument(
        "--requantize", metavar="SCHEME", help="quantize the decoded weights anew, as with vq-2"
    )
    verb.add_argument("--force", action="store_true", help="replace OUT if it exists")
    return verb


def _quantize(args: argparse.Namespace) -> None:
    activations = None if args.activations == "none" else args.activations
    options = {"seed": args.seed, "bits": args.bits, "embeddings": args.embeddings}
    model, tokenizer = quantized(args, activations=activations, **options)
    if args.push_to:
        model.push_to_hub(args.push_to)
        if tokenizer is not None:
            tokenizer.push_to_hub(args.push_to)
        print(f"pushed to {args.push_to}")


def quantized(args: argparse.Namespace, **options: Any) -> tuple[Any, Any]:
    """Quantize, save and describe a model; `options` are more arguments of `VQConfig`."""
    from ..calibration.distributed import ProcessGroup
    from ..calibration.resume import mark_saved
    from ..evaluation.info import describe, kinds_table, summary
    from ..evaluation.load import load_model, load_tokenizer
    from ..evaluation.storage import check_original
    from ..hf.checkpoint.atomic_dir import replacing
    from ..hf.config import VQConfig

    config = VQConfig(args.scheme, modules_to_not_convert=args.skip, **options)
    out = check_out(args)
    check_original(args.model)
    model = load_model(
        args.model, dtype=dtype_of(args.dtype), config=config, device_map=args.device_map
    )
    tokenizer = tokenizer_or_none(load_tokenizer, args.model)
    if ProcessGroup().rank > 0:  # the first process saves what all have found
        return model, tokenizer
    with replacing(out) as folder:  # model and tokenizer, whole or not at all
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if config.calibration is not None and (work := config.calibration.get("resume")):
            mark_saved(Path(work), folder)
    description = describe(str(out))
    print(kinds_table(description))
    print(f"\n{summary(description, config)} in {out}")
    return model, tokenizer


def _convert(args: argparse.Namespace) -> None:
    from ..hf.config import VQConfig
    from ..interop.convert import convert

    check_out(args)
    anew = None if args.requantize is None else VQConfig(args.requantize)
    found = convert(args.model, args.out, requantize=anew)
    errors = found["relative_error"].values()
    compared = (
        f"mean relative error {sum(errors) / len(errors):.3g}"
        if errors
        else "every decoded weight compared and equal"
    )
    print(
        f"{found['layers']} layers, {found['weights']:,} weights, "
        f"{found['bits_per_weight']:.3f} bits per weight in {args.out}; {compared}"
    )
