"""`generate` at mixed lengths for a given time: memory must not grow.

    python scripts/fuzz/soak.py [--seconds 3600] [--device cuda] [--processes 8] [--out RECORD]

Models and caches are made and dropped all the time. Every round measures the memory of the process,
PyTorch's memory of a GPU, and, if nvidia-ml-py is installed, all that the driver has given to the
process, machine code included. The largest of the last tenth of the rounds may exceed the largest
of the second tenth by GROWTH, plus the memory that safetensors keeps. Exit status 1 if it exceeds
that.

Several processes have seeds that follow each other, share the GPUs of the machine, and have a row
of the record each. The record is written again and again, with the time that has passed: a run that
is cut short leaves what it measured.

The process has one arena of the C library. With one arena per thread, its memory would grow by
steps of megabytes until every arena has seen the largest load. safetensors 0.8.0 keeps one or two
Python integers (32 bytes each) per tensor that is read; the record has the number of these bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import models
import torch
import transformers
from safetensors import safe_open

from hf_vq import VQCache
from hf_vq.evaluation.record import command_line, make_record, write_record
from hf_vq.hf import register

GROWTH = 4 << 20  # bytes: what an allocator may still find
REPORT = 20  # seconds between two rows of a process
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # glibc reads it when a process starts
SCHEMES = ("u4", "u3", "u2", "turboquant-4", "qserve-kv4")
KINDS = ("vq-4", "qoq-w4a8", "turboquant-4+4", "mixed")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def of_gpu() -> dict[str, int]:
    """Bytes of the current GPU: of PyTorch's tensors, and of this process as NVML counts them."""
    found = {"gpu": torch.cuda.memory_allocated()}
    with suppress(ImportError):
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                found["gpu_driver"] = process.usedGpuMemory
    return found


def kept_by_safetensors(saved: dict[str, Path]) -> float:
    """Bytes of Python objects that reading a model's tensors leaves behind, a mean over KINDS."""
    repeats, left = 50, 0
    for kind in KINDS:
        with safe_open(next(saved[kind].glob("*.safetensors")), "pt") as file:
            for repeat in range(repeats + 1):
                if repeat == 1:  # the first fills caches
                    left -= sys.getallocatedblocks()
                for name in file.keys():  # noqa: SIM118
                    file.get_tensor(name)
        left += sys.getallocatedblocks()
    return 32 * left / repeats / len(KINDS)


def round_of(rng: random.Random, saved: dict[str, Path], device: str) -> int:
    """Load a model, generate with a few caches, drop all; tokens that were made."""
    model = models.load(saved[rng.choice(KINDS)]).to(device)
    model.set_attn_implementation(rng.choice(["vq", "sdpa"]))
    count = 0
    for _ in range(8):
        batch, length = rng.choice([1, 1, 2, 4]), rng.randint(1, 60)
        ids = torch.randint(3, 48, (batch, length), device=device)
        cache = VQCache(model.config, rng.choice(SCHEMES), window=rng.choice([0, 8, 64]))
        new = rng.randint(1, 40)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new,
            min_new_tokens=new, do_sample=rng.random() < 0.5,
        )  # fmt: skip
        count += batch * (found.shape[1] - length)
    return count


class Soak:
    """One process: models and caches for a given time.

    Args:
        device: where.
        seconds: how long.
        seed: of everything drawn.
        saved: folders of the models of KINDS.
    """

    def __init__(self, device: str, seconds: float, seed: int, saved: dict[str, Path]) -> None:
        self.seconds, self.device, self.saved = seconds, device, saved
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.memory: dict[str, list[int]] = defaultdict(list)
        self.kept = kept_by_safetensors(saved)
        self.tokens, self.start = 0, time.monotonic()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The row so far, every REPORT seconds and at the end."""
        reported = self.start
        while (now := time.monotonic()) - self.start < self.seconds:
            self.tokens += round_of(self.rng, self.saved, self.device)
            self.memory["rss"].append(resident())
            if self.device != "cpu":
                for kind, found in of_gpu().items():
                    self.memory[kind].append(found)
            if now - reported > REPORT:
                reported = now
                yield self.row()
        yield self.row()

    def row(self) -> dict[str, Any]:
        """Counts, and the memory at the begin and at the end."""
        rounds, tenth = len(self.memory["rss"]), max(len(self.memory["rss"]) // 10, 1)
        seconds = round(time.monotonic() - self.start, 1)
        row = {"rounds": rounds, "tokens": self.tokens, "seconds": seconds}
        for kind, each in self.memory.items():
            row[f"{kind}_begin"] = max(each[tenth : 2 * tenth] or each)
            row[f"{kind}_end"] = max(each[-tenth:])
        row["rss_kept_by_safetensors"] = round(self.kept * (rounds - 2 * tenth))
        return row


def run(reports: Connection, device: str, *arguments: Any) -> None:
    """The work of a process, which sends its rows."""
    faulthandler.enable()  # a process that dies of a signal says where
    quiet()
    if device != "cpu":
        torch.cuda.set_device(device)
    for row in Soak(device, *arguments).rows():
        reports.send(row)


def quiet() -> None:
    """Register the quantizer, and silence Transformers."""
    register()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(60)
    warnings.simplefilter("ignore")


def grown(row: dict[str, Any]) -> dict[str, int]:
    """Bytes by which each kind of memory grew, without what safetensors keeps."""
    kinds = [name.removesuffix("_end") for name in row if name.endswith("_end")]
    return {
        kind: row[f"{kind}_end"] - row[f"{kind}_begin"]
        - row.get(f"{kind}_kept_by_safetensors", 0)
        for kind in kinds
    }  # fmt: skip


def main() -> int:
    """0 if memory is flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, help="%(default)s")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--device", default="cpu", help="%(default)s")
    parser.add_argument("--processes", type=int, default=1, help="%(default)s")
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    if not ONE_ARENA.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_ARENA)
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    options = dict.fromkeys(("seconds", "seed", "device", "processes"), "")
    command = command_line("python scripts/fuzz/soak.py", parser, args, options)
    settings = {"seconds": args.seconds, "seed": args.seed, "device": args.device}
    record = make_record("soak", command, settings, {}, args.revision, device=args.device)
    record["complete"] = False
    quiet()
    torch.manual_seed(args.seed)
    rows: dict[int, dict[str, Any]] = {}
    context, processes, reports = get_context("spawn"), [], {}
    with tempfile.TemporaryDirectory() as folder:
        saved = models.checkpoints(Path(folder), KINDS)
        for number in range(args.processes):
            device = f"cuda:{number % gpus}" if gpus else args.device
            end, send = context.Pipe(duplex=False)
            arguments = (send, device, args.seconds, args.seed + number, saved)
            processes.append(context.Process(target=run, args=arguments))
            processes[-1].start()
            send.close()  # so that the end of the process is the end of what is read
            reports[end] = number
        while reports:
            for end in wait(list(reports)):
                try:
                    rows[reports[end]] = end.recv()
                except EOFError:
                    del reports[end]
            record["results"] = {"rows": [rows[number] for number in sorted(rows)]}
            if args.out is not None:  # a machine that is taken away leaves what was measured
                write_record(record, args.out)
        for process in processes:
            process.join()
    died = sum(process.exitcode != 0 for process in processes)
    if args.out is not None:
        write_record({**record, "complete": not died}, args.out)
    for number in sorted(rows):
        row = rows[number]
        changes = ", ".join(f"{kind} {found / 1e6:+.2f} MB" for kind, found in grown(row).items())
        counts = f"{row['rounds']} models, {row['tokens']} tokens, {row['seconds']:.0f} s"
        print(f"soak: {counts}: {changes}")
    if died:
        print(f"soak: {died} processes died; their errors are above")
    return int(
        died > 0 or any(found > GROWTH for row in rows.values() for found in grown(row).values())
    )


if __name__ == "__main__":
    sys.exit(main())
