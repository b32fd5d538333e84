"""Save a model in processes that die in the middle.

    python killed_save.py <model> <point>=<target> ...

prints one line for each: the point, and the signal that ended its process.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, modeling_utils

from hf_vq.hf import register
from hf_vq.hf.checkpoint import atomic_dir, save


def die(*arguments: Any) -> None:
    """End at once, without any cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(owner: Any, name: str) -> None:
    """End just after a function returned."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        die()

    setattr(owner, name, call)


def write_half(tensors: Any, filename: str, metadata: Any = None) -> None:
    """Begin to write a file."""
    with open(filename, "wb") as file:
        file.write(b"half")
    die()


def save_and_die(model: Any, target: str, point: str) -> None:
    """Save and die at `point`."""
    if point == "config":
        die_after(PreTrainedConfig, "save_pretrained")
    elif point == "half weights":
        modeling_utils.safe_save_file = write_half
    elif point == "weights":
        die_after(modeling_utils, "safe_save_file")
    elif point == "card":
        die_after(save, "_write_card")
    elif point == "before exchange":
        atomic_dir.exchange = die
    elif point == "after exchange":
        die_after(atomic_dir, "exchange")
    elif point == "between the renames":
        atomic_dir.exchange = lambda *paths: False
        die_after(Path, "rename")
    model.save_pretrained(target)


def main(source: str, *deaths: str) -> None:
    """Load once and fork for each point: a process of its own would import for seconds."""
    torch.set_num_threads(1)
    register()
    model = AutoModelForCausalLM.from_pretrained(source)
    for death in deaths:
        point, _, target = death.partition("=")
        child = os.fork()
        if child == 0:
            save_and_die(model, target, point)
            os._exit(0)
        print(point, os.waitpid(child, 0)[1] & 0x7F, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
