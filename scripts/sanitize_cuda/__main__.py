#!/usr/bin/env python3
"""Run every generated CUDA kernel under compute-sanitizer: memcheck, racecheck, initcheck.

    python scripts/sanitize_cuda [--tools none memcheck racecheck] [--kernels linear wide ..]
    python scripts/sanitize_cuda --kernels buckets --tools memcheck --seconds 240 --processes 15

Problems are small, but each loop takes several turns, rows and tokens do not fill their tiles, and
plans are as many as it takes to meet every value of every field of a plan. `buckets` are the
problems of tests.buckets: every bucket of every chooser, by public ops. They are dealt out to
processes. First these run without a tool ("none"), which compiles kernels into the store
(HF_VQ_STORE); then under each tool, which looks at our kernels. What is computed is always
compared with float64 (of `buckets` by the tests). A process begins no case when its seconds are
over: the table at the end says how many of each kernel ran, and how many are left. Exit status 1,
and the output of a process, where a tool reports anything, a result is wrong, or a case does not
end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.buckets`, `benchmarks`

import buckets
import integers
import kv
import torch
import weights

from hf_vq import paths

MAKERS = weights.MAKERS | kv.MAKERS | integers.MAKERS | buckets.MAKERS
USUAL = [kernel for kernel in MAKERS if kernel not in buckets.MAKERS]
ROOT = Path(__file__).resolve().parents[2]
GRACE = 120  # seconds that the last case of a process may take


def run_part(kernels: Sequence[str], part: int, parts: int, seconds: float) -> None:
    """Every case of one process for which there is time, each told before it begins."""
    torch.manual_seed(part)
    began = time.monotonic()
    torch.cuda.synchronize()  # a tool fails without a call, and there may be no case
    cases = chain.from_iterable(MAKERS[kernel]() for kernel in kernels)
    for name, run in islice(cases, part, None, parts):
        if time.monotonic() - began > seconds:
            print(f"left {name}", flush=True)
            continue
        print(f"case {name}", flush=True)
        start = time.monotonic()
        run()
        torch.cuda.synchronize()
        print(f"    {time.monotonic() - start:.1f} s", flush=True)


def run_process(tool: str, args: argparse.Namespace, part: int) -> str:
    """What is wrong with one process, with all that it said; empty if nothing is."""
    command = [sys.executable, os.path.dirname(__file__), "--part", str(part)]
    command += ["--processes", str(args.processes), "--kernels", *args.kernels]
    command += ["--seconds", str(args.seconds)]
    command += [] if args.found is None else ["--found", str(args.found)]
    if tool != "none":
        options = ["--error-exitcode", "1", "--show-backtrace", "no", "--print-limit", "20"]
        # cuda.bindings asks for functions a driver need not have; what we call is checked.
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        if tool != "initcheck":  # which has to see who else writes memory
            ours = paths.kernel_sources() / "cuda", ROOT / "benchmarks"
            for source in sorted(path for folder in ours for path in folder.rglob("*.cu")):
                options += ["--kernel-name", f"kernel_name={source.stem}"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    # Without its own pool of memory, an address beyond a tensor is one that nobody allocated.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=args.seconds + GRACE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[0]
        _count(tool, said)
        return f"{said}\nnot done after {args.seconds + GRACE:.0f} s"
    _count(tool, said)
    summaries = re.findall(r"SUMMARY: (\d+)", said)
    clean = not process.returncode and (tool == "none" or set(summaries) == {"0"})
    return "" if clean else f"{said}\nexit status {process.returncode}"


counts: Counter[tuple[str, str, str]] = Counter()
"""Cases by tool and kernel that ran ("case") or were left ("left")."""


def _count(tool: str, said: str) -> None:
    """Add the cases of a process to `counts`."""
    for what, kernel in re.findall(r"^(case|left) (\S+)", said, re.MULTILINE):
        counts[tool, kernel, what] += 1


def show_counts(tools: Sequence[str]) -> None:
    """A line for each kernel: how many cases ran under each tool, of how many."""
    kernels = sorted({kernel for _, kernel, _ in counts})
    print(f"{'cases':12}", *(f"{tool:>14}" for tool in tools))
    for kernel in kernels:
        cells = []
        for tool in tools:
            ran, left = counts[tool, kernel, "case"], counts[tool, kernel, "left"]
            cells.append(f"{f'{ran} of {ran + left}':>14}")
        print(f"{kernel:12}", *cells, flush=True)


def main() -> int:
    """0 if every tool is silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["none", "memcheck", "racecheck"])
    parser.add_argument("--kernels", nargs="+", default=USUAL, choices=list(MAKERS))
    parser.add_argument("--processes", type=int, default=8, help="at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="of a tool (%(default)s)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.found is not None:
        buckets.FOUND.append(args.found)
    if args.part is not None:
        run_part(args.kernels, args.part, args.processes, args.seconds)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is missing: it comes with the CUDA toolkit.")
    with tempfile.TemporaryDirectory() as folder:
        if "buckets" in args.kernels:
            args.found = Path(folder) / "buckets"
            buckets.keep(args.found)
        failed = run_tools(args)
    show_counts(args.tools)
    return int(failed)


def run_tools(args: argparse.Namespace) -> bool:
    """Whether a process failed under any of the tools."""
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
    return failed


if __name__ == "__main__":
    sys.exit(main())
