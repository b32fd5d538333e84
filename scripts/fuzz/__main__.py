#!/usr/bin/env python3
"""Fuzzing of file readers, caches, numerics and interrupted saves: `make fuzz`.

    python scripts/fuzz [--seconds 60] [--seed 1] [--subjects checkpoints kills ..] [--tries N]

Each subject gets a share of the time and prints one line of results. A finding is printed with the
command that repeats it. Exit status 1 if there is any. A long run writes a record (--out).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads are not forked
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for `tests.fixtures`

import campaign  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from hf_vq.evaluation.record import make_record, write_record  # noqa: E402
from hf_vq.hf import register  # noqa: E402

SHARES = {
    "checkpoints": 6, "own_checks": 2, "caches": 4, "codebooks": 2, "published": 4, "pickles": 1,
    "c_api": 4, "sequences": 6, "kills": 8, "threads": 2, "numerics": 3,
}  # fmt: skip
"""Subjects, each a module here, and their parts of the time."""
SHOWN = 3  # findings of a kind that are shown whole


def cores() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of all together (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--subjects", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--tries", type=int, help="of each subject, within the time")
    parser.add_argument("--processes", type=int, default=cores(), help="%(default)s")
    parser.add_argument("--only", type=int, metavar="N", help="only try number N, in this process")
    parser.add_argument(
        "--built", type=Path, default=ROOT / "build" / "cpp-tests",
        help="where kernels/cpu/tests/run built the C++ tests (default: where `make native` does)",
    )  # fmt: skip
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--out", type=Path, help="write a record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    register()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(60)
    warnings.simplefilter("ignore")
    shares = sum(SHARES[name] for name in args.subjects)
    start, preparing, reports = time.monotonic(), 0.0, []
    with tempfile.TemporaryDirectory(prefix="hf_vq-fuzz-") as folder:
        (Path(folder) / "built").symlink_to(args.built.resolve())
        for name in args.subjects:
            begun = time.monotonic()
            work = Path(folder) / name
            work.mkdir()
            torch.manual_seed(args.seed)
            module = importlib.import_module(name)
            attempt = module.prepare(work)
            if attempt is None:
                print(f"{name}: DID NOT RUN, {module.MISSING}", flush=True)
                continue
            if args.only is not None:
                outcome, finding, _ = campaign.made(attempt, args.seed, name, args.only)
                print(f"{name} {args.only}: {outcome}\n{finding}")
                continue
            preparing += time.monotonic() - begun
            left = args.seconds * SHARES[name] / shares
            report = campaign.run(
                name, attempt, args.seed, left, args.tries, args.processes,
                **getattr(module, "LIMITS", {}),
            )  # fmt: skip
            reports.append(report)
            _show(report, args.seed)
    found = sum(len(each) for report in reports for each in report.findings.values())
    took = time.monotonic() - start
    print(f"fuzz: {found} findings, {took:.0f} s, {preparing:.0f} of them to prepare")
    if args.out is not None:
        command = f"make fuzz SECONDS={args.seconds:g} SEED={args.seed}"
        settings = {"seconds": args.seconds, "seed": args.seed, "processes": args.processes}
        if args.subjects != list(SHARES):
            command += f' ARGS="--subjects {" ".join(args.subjects)}"'
        rows = [report.row() for report in reports]
        record = make_record("fuzz", command, settings, {"rows": rows}, args.revision)
        write_record(record, args.out)
    return int(found > 0)


def _show(report: campaign.Report, seed: int) -> None:
    print(report.line(), flush=True)
    for kind, each in report.findings.items():
        numbers = ", ".join(str(number) for number, _ in each[:10])
        print(f"  FOUND {len(each)} x {kind}: tries {numbers}")
        for number, text in each[:SHOWN]:
            lines = text.strip().splitlines()
            print(f"    python scripts/fuzz --seed {seed} --subjects {report.name} --only {number}")
            print("\n".join(f"      {line[:200]}" for line in lines[-4:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
