#!/usr/bin/env python3
"""Run every generated CUDA kernel under compute-sanitizer: memcheck, racecheck, initcheck.

    python scripts/sanitize_cuda [--tools none memcheck] [--kernels linear linear_wgmma ..]
    python scripts/sanitize_cuda --kernels buckets --tools racecheck initcheck --seconds 480
                                 --processes 15 [--out RECORD]

Problems are small, but every loop has several iterations, rows and tokens do not fill their tiles,
and the plans cover every value of every field. `buckets` are the cases of tests.buckets, run
through public ops: for every plan, the smallest problem that launches it. Parallel processes claim
cases, and share the GPUs of the machine, which must be equal.

Without a tool ("none"), processes compile kernels into the store (HF_VQ_STORE); the first tool
does so, too. Memcheck and racecheck check only our kernels. Under racecheck, which fails with an
internal error in some kernels of cuBLAS, and under initcheck, which reports reads of cuBLAS in its
workspace, matrix products of PyTorch are skipped. Results are always compared with float64 (of
`buckets` by the tests).

All tools together have `--seconds`: later cases do not begin, and a case that runs much longer is
ended. The final table has the number of kernels and problems, of reports, and of omitted cases.
--out writes it into a record, which also has what earlier runs found of other tools. With --resume,
kernels that a tool passed are skipped if the record has the same machine code (sources.py), also
from another GPU of the same target. To find the buckets takes minutes: --problems keeps them in a
file for the next run. --ops limits a run to some ops. Exit status 1, and the output of a process,
if a tool reports anything, a result is wrong, or a case does not end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.buckets`, `benchmarks`

import buckets
import integers
import kv
import torch
import weights
from report import Report, Said
from sources import identities

from hf_vq import paths
from hf_vq.codegen.jit.device import device_arch
from hf_vq.evaluation.record import command_line

MAKERS = weights.MAKERS | kv.MAKERS | integers.MAKERS | buckets.MAKERS
USUAL = [kernel for kernel in MAKERS if kernel not in buckets.MAKERS]
ROOT = Path(__file__).resolve().parents[2]
GRACE = 45  # seconds that the last case of a process may take


def run_part(args: argparse.Namespace) -> None:
    """One process: cases that no other one has taken, while there is time."""
    torch.manual_seed(args.part)
    torch.cuda.synchronize()  # a tool fails without a call, and there may be no case
    cases = chain.from_iterable(MAKERS[kernel]() for kernel in args.kernels)
    for number, (name, run) in enumerate(cases):
        if not taken(args.claims, number):
            continue
        if time.time() > args.until:
            print(f"left {number} {name}", flush=True)
            continue
        print(f"case {number} {name}", flush=True)
        start = time.monotonic()
        run()
        torch.cuda.synchronize()
        print(f"    {time.monotonic() - start:.1f} s", flush=True)
    print("end", flush=True)


def taken(claims: Path, number: int) -> bool:
    """Claim a case for this process; False if another process has it."""
    try:
        (claims / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def command_of(tool: str, args: argparse.Namespace, part: int) -> list[str]:
    """Command line of a worker process."""
    command = [sys.executable, os.path.dirname(__file__), "--part", str(part)]
    command += ["--kernels", *args.kernels, "--claims", str(args.claims)]
    command += ["--until", str(args.until)]
    command += [] if args.found is None else ["--found", str(args.found)]
    if tool == "none":
        return command
    options = ["--error-exitcode", "1", "--show-backtrace", "no", "--print-limit", "10000"]
    # cuda.bindings asks for functions a driver need not have; what we call is checked.
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    if tool != "initcheck":  # which has to see who else writes memory
        ours = paths.kernel_sources() / "cuda", ROOT / "benchmarks"
        for source in sorted(path for folder in ours for path in folder.rglob("*.cu")):
            options += ["--kernel-name", f"kernel_name={source.stem}"]
    command += ["--without-cublas"] if tool in ("racecheck", "initcheck") else []
    return ["compute-sanitizer", "--tool", tool, *options, *shlex.split(args.options), *command]


def gpu_of(part: int) -> str:
    """The GPU of a process, as CUDA_VISIBLE_DEVICES names it; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return gpus[part % len(gpus)] if gpus else ""


def run_process(tool: str, args: argparse.Namespace, part: int) -> list[Said]:
    """Run processes in sequence and return their output; each continues where one ended."""
    every = []
    # Without its own pool of memory, an address beyond a tensor is one that nobody allocated.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = gpu_of(part)
    while True:
        process = subprocess.Popen(
            command_of(tool, args, part), env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            text = process.communicate(timeout=max(args.kill - time.time(), 1))[0]
            said = Said(text, process.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = Said(process.communicate()[0], None)
        every.append(said)
        if said.complete or said.status is None or not said.cases():
            return every


def run_tools(args: argparse.Namespace, report: Report) -> bool:
    """Run all tools; True if a process failed under any of them."""
    failed = False
    for number, tool in enumerate(args.tools):
        start = time.monotonic()
        share = (args.end - time.time()) / (len(args.tools) - number)
        args.kill = time.time() + share
        args.until = args.kill - min(GRACE, share / 4)
        with (
            tempfile.TemporaryDirectory() as claims,
            ThreadPoolExecutor(args.processes) as pool,
        ):
            args.claims = Path(claims)
            for case in report.passed_over(tool):
                taken(args.claims, case)
            every = list(pool.map(partial(run_process, tool, args), range(args.processes)))
        wrong = 0
        for part, processes in enumerate(every):
            for said in processes:
                report.add(tool, said)
                if not said.clean(tool):
                    wrong += 1
                    print(f"---- {tool}, process {part}:\n{said.text}\nstatus {said.status}")
        took = time.monotonic() - start
        report.seconds[tool] = report.seconds.get(tool, 0.0) + took
        count = sum(map(len, every))
        print(f"{tool}: {wrong} of {count} processes failed, {took:.0f} s", flush=True)
        failed |= wrong > 0
    return failed


def tool_version() -> str:
    """Version of compute-sanitizer."""
    said = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=True
    )
    return said.stdout.strip().splitlines()[-1]


def main() -> int:
    """0 if every tool is silent."""
    began = time.time()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["none", "memcheck", "racecheck"])
    parser.add_argument("--kernels", nargs="+", default=USUAL, choices=list(MAKERS))
    parser.add_argument("--processes", type=int, default=8, help="parallel processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=540, help="of all tools (%(default)s)")
    parser.add_argument("--options", default="", help="more, of compute-sanitizer, in one string")
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what --out has of buckets"
    )
    parser.add_argument("--problems", type=Path, help="file of the buckets, made if need be")
    parser.add_argument("--ops", nargs="+", help="of buckets, as the table names them")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--without-cublas", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        buckets.FOUND[:] = [] if args.found is None else [args.found]
        buckets.SKIPPED[:] = [True] if args.without_cublas else []
        run_part(args)
        return 0
    if set(args.tools) != {"none"} and shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is missing: it comes with the CUDA toolkit.")
    with tempfile.TemporaryDirectory() as folder:
        report = Report([])
        if "buckets" in args.kernels:
            if args.kernels != ["buckets"]:
                parser.error("buckets are run alone.")
            args.found = args.problems or Path(folder) / "buckets"
            report.problems = buckets.keep(args.found)
            print(f"{len(report.problems)} problems, {time.time() - began:.0f} s", flush=True)
            plans = set().union(*(plans for _, plans in report.problems))
            report.identity = identities(plans, device_arch(0).name)
            report.ops = frozenset(args.ops) if args.ops else None
            if args.out is not None:
                report.resume(args.out, args.tools, again=not args.resume)
        args.end = began + args.seconds
        failed = run_tools(args, report)
    print(report.table())
    if args.out:
        report.write(args.out, *_of_record(parser, args, report), args.revision)
    return int(failed)


def _of_record(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    report: Report,
) -> tuple[str, dict[str, Any]]:
    """The command that repeats a run, and its settings."""
    options = dict.fromkeys(("tools", "kernels", "ops", "processes", "seconds"), "")
    options["options"] = shlex.quote(args.options)
    command = command_line("python scripts/sanitize_cuda", parser, args, options)
    return command, {
        "sanitizer": tool_version(),
        "processes": args.processes,
        "problems": len(report.problems),
        "kernels": len(frozenset().union(*(plans for _, plans in report.problems))),
    }


if __name__ == "__main__":
    sys.exit(main())
