"""Fine-tune one model by LoRA on a CPU: codes, 16 bits and NF4, side by side.

Each method runs in a separate process (`worker`), so that its memory can be told. All do the same
few steps at the same time, so that what else the machine does falls on all alike. Codes are made
first by `hf-vq quantize`, as for a model that is fine-tuned more than once, or by `hf-vq calibrate`
on the text that is trained on (`vq-4+calibrated`); with `vq-4+loftq`, the adapter begins with what
the codes lost. NF4 is made while it is loaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hf_vq.errors import VQError
from hf_vq.evaluation.record import Recorder, command_line

from ..records import RESULTS
from .table import DENSE
from .worker import LOFTQ, TURN, read_data

NAME = "finetune"
METHODS = ("vq-4", "vq-4+loftq", "vq-4+calibrated", "bf16", "nf4")
CALIBRATED = "+calibrated"
_WITHOUT_CODES = (DENSE, "float32", "nf4")
_SHOWN = {"data": "DATA", "methods": "", "steps": "", "tokens": "", "rank": "", "held_out": "",
          "threads": "", "merge": "", "seed": ""}  # fmt: skip


def add_verb(verbs: Any) -> None:
    """Add the suite to the parser of `python -m benchmarks`."""
    parser = verbs.add_parser(NAME, help=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", metavar="MODEL_DIR", help="unquantized causal language model")
    add("--data", type=Path, required=True, metavar="DATA",
        help="JSON Lines of question and answer; the last are held out")  # fmt: skip
    add("--methods", nargs="+", default=list(METHODS), metavar="METHOD",
        help=f"schemes of hf_vq, with {CALIBRATED}, {LOFTQ} or without; bf16, float32, nf4 "
        "(default: %(default)s)")  # fmt: skip
    add("--steps", type=int, default=100, help="default: %(default)s")
    add("--tokens", type=int, default=256, help="of a sequence, one each step")
    add("--held-out", type=int, default=16, help="sequences that are held out")
    add("--rank", type=int, default=16, help="of LoRA, on all linear layers")
    add("--seed", type=int, default=0, help="of adapters and of the order of the data")
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--codes", type=Path, metavar="FOLDER", help="where codes are kept, by scheme")
    add("--merge", action="store_true", help="measure merging, too")
    add("--out", type=Path, help="record (default: in results)")
    add("--revision", help="of the source (default: git is asked)")
    parser.set_defaults(parser=parser)


def measure(args: argparse.Namespace) -> int:
    """Run it. Returns the exit status of the command.

    Raises:
        VQError: the methods lack DENSE.
    """
    if DENSE not in args.methods:
        raise VQError(f"--methods needs {DENSE}, which the others are compared with.")
    name = Path(args.model).resolve().name
    command = command_line(f"python -m benchmarks {NAME} MODEL_DIR", args.parser, args, _SHOWN)
    path = args.out or RESULTS / "quality" / f"{NAME}-{name}.jsonl"
    settings = {
        "model": name, "data": args.data.stem, "steps": args.steps, "sequence": args.tokens,
        "held_out": args.held_out, "rank": args.rank, "seed": args.seed,
        "threads": args.threads, "turn": TURN,
    }  # fmt: skip
    recorder = Recorder(path, NAME, command, args.revision, settings=settings)
    rows = run(args)
    for row in rows:
        shown = {k: v for k, v in row.items() if not isinstance(v, list)}
        print("  ".join(f"{k} {v:.4g}" if k != "name" else v for k, v in shown.items()))
        recorder.add(row)
    recorder.finish(settings, {"rows": rows})
    print(f"wrote {path}")
    return 0


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each method."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.codes or Path(temporary)
        workers = [_Worker(method, args, folder) for method in args.methods]
        try:
            for worker in workers:
                worker.make_codes()
            for worker in workers:
                worker.start()
            while waiting := [worker for worker in workers if worker.row is None]:
                for worker in waiting:
                    worker.wait()
                for worker in waiting:
                    worker.go_on()
        finally:
            for worker in workers:
                worker.stop()
    return [worker.row for worker in workers if worker.row is not None]


class _Worker:
    """The process of one method, which waits whenever it was not told to go on."""

    def __init__(self, method: str, args: argparse.Namespace, folder: Path) -> None:
        self.method = method
        self.row: dict[str, Any] | None = None
        names = ("data", "steps", "tokens", "held_out", "rank", "seed", "threads", "merge")
        self.options = {name: getattr(args, name) for name in names}
        self.options |= {"method": method, "model": str(args.model), "data": str(args.data)}
        name = method.removesuffix(LOFTQ)
        if CALIBRATED in method:  # others may have seen rows held out here
            text = Path(args.data).read_bytes() + str(args.held_out).encode()
            name += f"-{hashlib.sha256(text).hexdigest()[:8]}"
        self.options["codes"] = None if method in _WITHOUT_CODES else str(folder / name)
        self.process: subprocess.Popen[str] | None = None

    def make_codes(self) -> None:
        """Quantize the model as `hf-vq` does, if the method is a scheme."""
        model, codes = self.options["model"], self.options["codes"]
        if codes is None or Path(codes).is_dir():
            return
        scheme = self.method.removesuffix(LOFTQ).removesuffix(CALIBRATED)
        command = [sys.executable, "-m", "hf_vq"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as text:
            if CALIBRATED not in self.method:
                command += ["quantize", model, codes, "--scheme", scheme]
            else:
                rows, _ = read_data(self.options["data"], self.options["held_out"])
                text.write("\n\n".join(f"{row['question']}\n{row['answer']}" for row in rows))
                text.flush()
                command += ["calibrate", model, codes, "--scheme", scheme, "--text", text.name]
            if subprocess.run(command, check=False).returncode:
                raise VQError(f"quantizing to {self.method} failed; its error is above.")

    def start(self) -> None:
        """Start the process, which loads and evaluates the model up to the first step."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.options["threads"]),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # freed tensors leave memory
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fine_tuning.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._tell(json.dumps(self.options))

    def go_on(self) -> None:
        """Let it do its next steps, if it has not ended."""
        if self.row is None:
            self._tell("")

    def stop(self) -> None:
        """End the process, if it has not ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _tell(self, line: str) -> None:
        assert self.process is not None and self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        """Wait until it has done its steps, or ends with its row."""
        assert self.process is not None and self.process.stdout
        answer = self.process.stdout.readline()
        if not answer:
            raise VQError(f"fine-tuning with {self.method} failed; its error is above.")
        message = json.loads(answer)
        if "waits" in message:
            print(f"{self.method}: {message['waits']} steps", file=sys.stderr, flush=True)
        self.row = message.get("row")
