"""Calibrate a model in processes that are killed at random times, until one is left alone.

    python killed_calibration.py <model> <out> <deaths>

saves `whole`, in one go, and `resumed`, and prints how far each process that was killed had come.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_vq.hf import VQConfig, register


def calibrate(source: str, target: Path, **options: Any) -> None:
    """Calibrate and save, in a process of its own."""
    calibration = {"text": "model", "tokens": 256, "context": 32, **options}
    config = VQConfig(
        target_bits=3.5,
        candidates=["turboquant-2", "turboquant-4"],
        calibration=calibration,
        modules_to_not_convert=["mlp", "o_proj"],
    )
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(target)


def forked(*arguments: Any, **options: Any) -> int:
    """Begin to calibrate in a child; its process id. Nothing was computed before it was forked."""
    child = os.fork()
    if child == 0:
        calibrate(*arguments, **options)
        os._exit(0)
    return child


def main(source: str, out: str, deaths: str) -> None:
    """Kill as many processes, each one at a time that is drawn from how long one took."""
    torch.set_num_threads(1)
    register()
    folder, draw = Path(out), random.Random(0)
    start = time.monotonic()
    assert os.waitpid(forked(source, folder / "whole"), 0)[1] == 0
    seconds = time.monotonic() - start
    work = folder / "work"
    for _ in range(int(deaths)):
        child = forked(source, folder / "killed", resume=str(work))
        time.sleep(draw.uniform(0.05, 1) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = sorted(path.name for path in work.glob("*.safetensors")) if work.exists() else []
        print(" ".join(left) or "nothing", flush=True)
    assert os.waitpid(forked(source, folder / "resumed", resume=str(work)), 0)[1] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
