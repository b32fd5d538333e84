#!/usr/bin/env python3
"""Cost of digest verification while a model is loaded from the page cache.

    python scripts/time_digests.py [--layers 12] [--rounds 5] [--out RECORD]

The script loads a random `vq-4` model of Llama-3-8B's shape with few layers to the CPU, and to a
GPU if there is one. Runs with HF_VQ_VERIFY=0 and 1 take turns in one process, after one
warm-up load. It also measures a lower bound of every comparison: reading each byte of the mapped
files once, with one thread per core.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_vq import VQConfig, env
from hf_vq.evaluation.record import make_record, write_record

SLICE = 1 << 24  # bytes that a thread reads


def save(folder: Path, layers: int, size: int, device: str) -> None:
    """A quantized model of random weights; of 4096 numbers per token, a Llama-3-8B's layers."""
    heads = size // 128
    config = LlamaConfig(
        hidden_size=size, intermediate_size=size * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1),
        vocab_size=128256 if size == 4096 else 1000, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).bfloat16()
    with tempfile.TemporaryDirectory() as dense:
        model.save_pretrained(dense)
        del model
        quantized = AutoModelForCausalLM.from_pretrained(
            dense, quantization_config=VQConfig("vq-4", activations=None), device_map=device
        )
    quantized.save_pretrained(folder)


def load(folder: Path, device: str, verify: str) -> float:
    """Seconds of `from_pretrained`, as in a process that has no other model."""
    os.environ[env.VERIFY.name] = verify
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
    if device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    del model
    gc.collect()  # or the memory of a GPU would be asked for while the last model still has its own
    return took


def read(files: list[Path]) -> float:
    """Seconds to read every byte of the files, mapped, by all cores."""
    mapped = [numpy.memmap(path, dtype=numpy.uint8, mode="r") for path in files]
    slices = [file[at : at + SLICE] for file in mapped for at in range(0, len(file), SLICE)]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda part: numpy.bitwise_xor.reduce(part[: len(part) // 8 * 8].view("u8")),
                      slices))  # fmt: skip
    return time.perf_counter() - start


def main() -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="%(default)s")
    parser.add_argument("--size", type=int, default=4096, help="numbers per token, %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="%(default)s")
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save(folder, args.layers, args.size, "cuda" if gpu else "cpu")
        files = sorted(folder.glob("*.safetensors"))
        nbytes = sum(path.stat().st_size for path in files)
        times: dict[tuple[str, str], list[float]] = {}
        for number in range(args.rounds + 1):
            found = {("", ""): read(files)}
            for device in ("cpu", "cuda") if gpu else ("cpu",):
                for verify in ("0", "1") if number % 2 else ("1", "0"):
                    found[device, verify] = load(folder, device, verify)
            print(number, {"".join(kind): round(took, 3) for kind, took in found.items()})
            for kind, took in found.items() if number else ():  # the first fills caches
                times.setdefault(kind, []).append(took)
    rows = [
        {
            "device": device,
            "bytes": nbytes,
            "seconds_without": round(statistics.median(times[device, "0"]), 4),
            "seconds_with": round(statistics.median(times[device, "1"]), 4),
            "seconds_to_read": round(statistics.median(times["", ""]), 4),
        }
        for device in ("cpu", "cuda")
        if (device, "0") in times
    ]
    for row in rows:
        print(json.dumps(row))
    if args.out is not None:
        command = f"python scripts/time_digests.py --layers {args.layers} --rounds {args.rounds}"
        settings = {
            "layers": args.layers,
            "size": args.size,
            "rounds": args.rounds,
            "scheme": "vq-4",
        }
        device = "cuda" if gpu else "cpu"
        record = make_record(
            "digests", command, settings, {"rows": rows}, args.revision, device=device
        )
        write_record(record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
