#!/usr/bin/env python3
"""Run every generated CUDA kernel under compute-sanitizer: memcheck, racecheck.

    python scripts/sanitize_cuda [--tools none memcheck racecheck] [--kernels linear wide ..]

Problems are small, but each loop takes several turns, rows and tokens do not fill their tiles, and
plans are as many as it takes to meet every value of every field of a plan. They are dealt out to
processes. First these run without a tool ("none"), which compiles kernels into the store
(HF_VQ_STORE); then under each tool. What is computed is always compared with float64. Exit status
1, and the output of a process, where a tool reports anything, a result is wrong, or a process takes
more seconds than allowed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice

import integers
import kv
import torch
import weights

MAKERS = weights.MAKERS | kv.MAKERS | integers.MAKERS


def run_part(kernels: Sequence[str], part: int, parts: int) -> None:
    """Every case of one process, each told before it begins."""
    torch.manual_seed(part)
    torch.cuda.synchronize()  # a tool fails without a call, and there may be no case
    cases = chain.from_iterable(MAKERS[kernel]() for kernel in kernels)
    for name, run in islice(cases, part, None, parts):
        print(name, flush=True)
        start = time.monotonic()
        run()
        torch.cuda.synchronize()
        print(f"    {time.monotonic() - start:.1f} s", flush=True)


def run_process(tool: str, args: argparse.Namespace, part: int) -> str:
    """What is wrong with one process, with all that it said; empty if nothing is."""
    command = [sys.executable, os.path.dirname(__file__), "--part", str(part)]
    command += ["--processes", str(args.processes), "--kernels", *args.kernels]
    if tool != "none":
        options = ["--error-exitcode", "1", "--show-backtrace", "no", "--print-limit", "20"]
        # cuda.bindings asks for functions a driver need not have; what we call is checked.
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    # Without its own pool of memory, an address beyond a tensor is one that nobody allocated.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=args.seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nnot done after {args.seconds:.0f} s"
    summaries = re.findall(r"SUMMARY: (\d+)", said)
    clean = not process.returncode and (tool == "none" or set(summaries) == {"0"})
    return "" if clean else f"{said}\nexit status {process.returncode}"


def main() -> int:
    """0 if every tool is silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["none", "memcheck", "racecheck"])
    parser.add_argument("--kernels", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--processes", type=int, default=8, help="at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="of a tool (%(default)s)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.kernels, args.part, args.processes)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is missing: it comes with the CUDA toolkit.")
    failed = False
    for tool in args.tools:
        start = time.monotonic()
        with ThreadPoolExecutor(args.processes) as pool:
            wrong = list(pool.map(partial(run_process, tool, args), range(args.processes)))
        for part, said in enumerate(wrong):
            if said:
                print(f"---- {tool}, process {part}:\n{said}")
        bad, took = sum(map(bool, wrong)), time.monotonic() - start
        print(f"{tool}: {bad} of {len(wrong)} processes failed, {took:.0f} s", flush=True)
        failed |= bad > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
