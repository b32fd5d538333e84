"""llama.cpp's own benchmark of a GGUF file, run as a program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from hf_vq.errors import VQError


def rows(
    program: Path,
    model: Path,
    setting: tuple[int, str],
    *,
    prompt: int = 0,
    tokens: int,
    depth: int,
    threads: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Run `llama-bench` and return its rows: of a prompt, if there is one, and of generated tokens.

    Args:
        setting: flash attention (0 or 1), and the type of the cache.
        depth: tokens in the cache before.

    Raises:
        VQError: the file is missing, or the program failed.
    """
    if not model.is_file():
        raise VQError(f"{model} is missing; make it with llama-quantize.")
    flash, cache = setting
    call = [
        str(program), "-m", str(model), "-p", str(prompt), "-n", str(tokens), "-d", str(depth),
        "-t", str(threads), "-fa", str(flash), "-ctk", cache, "-ctv", cache,
        "-r", str(repeats), "-o", "jsonl",
    ]  # fmt: skip
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VQError(f"llama-bench failed: {done.stderr.strip()[-300:]}")
    return [json.loads(line) for line in done.stdout.strip().splitlines()]
