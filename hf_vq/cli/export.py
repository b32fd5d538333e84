"""`hf-vq export`: a model of codes in a format of other programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import VQConfigError
from ..interop.export import TYPES
from .arguments import add_loading, add_verb, check_out, dtype_of, tokenizer_or_none, writing

FORMATS = ("dense", "gguf", "gptq")


def add_export(verbs: Any) -> argparse.ArgumentParser:
    """Add the verb `export`."""
    text = (
        "Decode the codes and save the model for other programs: as a dense checkpoint, as a GGUF "
        "file of llama.cpp, or in GPTQ's format of 4 bits, which vLLM reads. Weights that are "
        "encoded again lose something; how much is printed."
    )
    verb = add_verb(verbs, "export", _export, text)
    verb.add_argument("model", metavar="MODEL", help="directory or Hub id of a model of codes")
    verb.add_argument("out", metavar="OUT", help="directory to write, with --to gguf a file")
    verb.add_argument("--to", choices=FORMATS, default="dense", help="default: %(default)s")
    verb.add_argument("--type", choices=TYPES, help="of matrices, with --to gguf (default: q8_0)")
    verb.add_argument(
        "--calibration",
        metavar="TEXT",
        help="what --to gptq feeds errors back on, which takes long on a CPU: a file, a data set, "
        "or the word default, a packaged text (without: rounded to the nearest)",
    )
    add_loading(verb)
    verb.add_argument("--force", action="store_true", help="replace OUT if it exists")
    verb.add_argument("--no-kld", action="store_true", help="do not measure what is lost")
    verb.add_argument(
        "--text", metavar="FILE", help="UTF-8 text to measure on (default: a packaged one)"
    )
    return verb


def _export(args: argparse.Namespace) -> None:
    from ..evaluation.load import load_model, load_tokenizer
    from ..evaluation.recoding import Recoding
    from ..hf.in_memory.quantize import dequantize
    from ..interop.export.gguf_file import architecture, library
    from ..interop.export.gptq import check_experts
    from ..nn.replace import vq_modules

    for option, kind in (("type", "gguf"), ("calibration", "gptq")):
        if getattr(args, option) is not None and args.to != kind:
            raise VQConfigError(f"--{option} is for --to {kind}.")
    out = _out_file(args) if args.to == "gguf" else check_out(args)
    if args.to == "gguf":
        library()  # before anything is loaded
    model = load_model(args.model, dtype=dtype_of(args.dtype), device_map=args.device_map)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise VQConfigError(
            f"{args.model} has a PEFT adapter: merge it (docs/fine_tuning.md), save the model and "
            "export that."
        )
    coded = list(vq_modules(model))
    if not coded:
        raise VQConfigError(f"{args.model} holds no codes of hf_vq: there is nothing to decode.")
    if args.to == "gguf":
        architecture(model)
    elif args.to == "gptq":
        check_experts(model)
    tokenizer = tokenizer_or_none(load_tokenizer, args.model)
    if tokenizer is None and args.calibration not in (None, "none"):
        raise VQConfigError(f"--calibration needs a tokenizer, and {args.model} has none.")
    recoding = None
    if tokenizer is not None and not args.no_kld:
        recoding = Recoding(model, tokenizer, args.text)
    dequantize(model)
    with writing(args.out):
        print(_write(args, model, tokenizer, coded, out))
    if recoding is not None:
        print(recoding.sentence(recoding.cost()))


def _out_file(args: argparse.Namespace) -> Path:
    """Path of OUT, as a file.

    Raises:
        VQConfigError: OUT exists, without --force; or is a folder, or in none.
    """
    out = Path(args.out)
    if out.is_dir():
        raise VQConfigError(f"--to gguf writes one file: give a path like {out}/model.gguf.")
    if not out.parent.is_dir():
        raise VQConfigError(f"there is no folder {out.parent}.")
    if out.exists() and not args.force:
        raise VQConfigError(f"{out} exists; choose another file or give --force.")
    return out


def _write(
    args: argparse.Namespace, model: Any, tokenizer: Any, coded: list[str], out: Path
) -> str:
    """Write OUT, whole or not at all; returns what to say of it."""
    from ..hf.checkpoint.atomic_dir import replacing
    from ..interop.export.gguf_file import write_gguf
    from ..interop.export.gptq import write_gptq

    if args.to == "gguf":
        kind = args.type or "q8_0"
        write_gguf(model, tokenizer, out, kind)
        return f"{out.stat().st_size / 1e6:.2f} MB of {kind} in {out}"
    with replacing(out) as folder:
        if args.to == "gptq":
            hessians = _hessians(args, model, tokenizer, coded)
            group, count = write_gptq(model, coded, folder, hessians=hessians)
            said = f"{count} layers in 4 bits, a scale for each {group} weights, in {out}"
        else:
            model.save_pretrained(folder)
            weights = sum(parameter.numel() for parameter in model.parameters())
            said = f"{weights:,} weights in {str(model.dtype).removeprefix('torch.')} in {out}"
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return said


def _hessians(
    args: argparse.Namespace, model: Any, tokenizer: Any, coded: list[str]
) -> Iterable[dict[str, Any]]:
    """Hessians of the layers, block by block; none without a text or a tokenizer."""
    from ..calibration.hessians import by_block
    from ..evaluation.recoding import calibration_tokens

    if tokenizer is None or args.calibration is None:
        return ()
    return by_block(model, coded, calibration_tokens(model, tokenizer, args.calibration))
