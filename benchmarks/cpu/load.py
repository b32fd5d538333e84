"""Suite `cpu-load`: loading a published checkpoint of 7B size against reading its bytes.

The checkpoint is AQLM of a Llama-2-7B's shape with random codes, in eight files. Reading is
safetensors: every tensor is copied to memory and kept, like the tensors of a model. Loading is
`from_pretrained` of the adopted checkpoint, followed by one byte of every page: unchanged tensors
are memory-mapped, and the first token would read them. Runs are interleaved, from the disk and
from the page cache.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_vq.errors import VQError
from hf_vq.interop.quantizer import adopt, release

VARIANTS = {"1x16": (1, 16), "2x8": (2, 8)}
SHARDS, GROUP = 8, 8


def llama_2_7b() -> LlamaConfig:
    """Its shape."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype="float16",
        architectures=["LlamaForCausalLM"],
    )


def write(folder: Path, config: LlamaConfig, books: int, bits: int, shards: int) -> int:
    """A checkpoint of random codes, file by file; the bytes of its largest file."""
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    names, largest = list(shapes), 0
    index: dict[str, str] = {}
    each = -(-len(names) // shards)
    for shard in range(shards):
        tensors: dict[str, torch.Tensor] = {}
        for name in names[shard * each : (shard + 1) * each]:
            shape, layer = shapes[name], name.removesuffix(".weight")
            if "_proj" not in name:
                tensors[name] = torch.randn(shape, dtype=torch.float16)
                continue
            rows, columns = shape
            kind, most = (torch.int8, 127) if bits <= 8 else (torch.int16, 32767)
            size = rows, columns // GROUP, books
            tensors[f"{layer}.codes"] = torch.randint(-most - 1, most + 1, size, dtype=kind)
            entries = torch.randn(books, 1 << bits, 1, GROUP, dtype=torch.float16)
            tensors[f"{layer}.codebooks"] = entries / columns**0.5
            tensors[f"{layer}.scales"] = torch.ones(rows, 1, 1, 1, dtype=torch.float16)
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        largest = max(largest, (folder / file).stat().st_size)
    about = {
        "quant_method": "aqlm", "nbits_per_codebook": bits, "num_codebooks": books,
        "in_group_size": GROUP, "out_group_size": 1,
        "linear_weights_not_to_quantize": [name for name in index if name.endswith(".weight")],
    }  # fmt: skip
    text = json.dumps({**config.to_dict(), "quantization_config": about})
    (folder / "config.json").write_text(text)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return largest


def is_in_memory(folder: Path) -> bool:
    """True if a folder is on tmpfs or ramfs, not on a disk (Linux)."""
    kinds = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        kinds[where] = kind
    at = folder.resolve()
    nearest = next(str(place) for place in (at, *at.parents) if str(place) in kinds)
    return kinds[nearest] in ("tmpfs", "ramfs")


def forget(folder: Path) -> None:
    """Have the page cache drop the files, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path) -> Any:
    """The model, its tensors in memory."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for tensor in model.state_dict().values():
        tensor.view(-1).view(torch.uint8)[::4096].sum()
    return model


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the files, copied to memory."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name).clone()
    return found


def anonymous_bytes() -> int:
    """Memory of this process that no file backs (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise VQError("this kernel does not say how much private memory a process has.")


def peak_above(load: Callable[[], Any]) -> int:
    """Bytes of memory that `load` takes for a while, above those of what it returns.

    Bytes of files that are mapped are not counted: they can be dropped at any time.
    """
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded = load()
        gc.collect()
        after = anonymous_bytes()
        del loaded
    finally:
        over.set()
        watcher.join()
    return max(0, peak - after)


def run(
    *,
    threads: Sequence[int] = (1, 2),
    rounds: int = 3,
    config: LlamaConfig | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read and load all variants in interleaved runs; `report` gets each row when it is known.

    Args:
        rounds: of which the medians count.
        config: of another model.

    Returns:
        (settings, results) of the record.
    """
    rows, before = [], torch.get_num_threads()
    model = config or llama_2_7b()
    adopt("aqlm")
    try:
        for name, (books, bits) in VARIANTS.items():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if is_in_memory(folder):
                    raise VQError(f"{folder} is memory, no disk: set TMPDIR to a folder on one.")
                shard = write(folder, model, books, bits, SHARDS)
                nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
                read(folder)
                for count in threads:
                    torch.set_num_threads(count)
                    about = {"name": name, "threads": count}
                    sizes = {"mb": nbytes / 1e6, "shard_mb": shard / 1e6}
                    row = about | sizes | _timed(folder, rounds)
                    rows.append(row)
                    report(row)
    finally:
        torch.set_num_threads(before)
        release("aqlm")
    return {"rounds": rounds, "files": SHARDS, "group": GROUP}, {"rows": rows}


def _timed(folder: Path, rounds: int) -> dict[str, Any]:
    ways = {"read": read, "load": load}
    found: dict[str, Any] = {}
    for where in ("disk", "cache"):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                if where == "disk":
                    forget(folder)
                start = time.perf_counter()
                loaded = ways[way](folder)
                seconds[way].append(time.perf_counter() - start)
                del loaded
                gc.collect()
        ratios = [a / b for a, b in zip(seconds["load"], seconds["read"], strict=True)]
        found |= {f"{where}_{way}_s": statistics.median(seconds[way]) for way in ways}
        found[f"{where}_ratio"] = statistics.median(ratios)
    return {**found, "above_mb": peak_above(lambda: load(folder)) / 1e6}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| AQLM | threads | GB | from the disk, s | times reading | from the page cache, s | "
        "times reading | memory above the model's, MB | the largest file, MB |",
        f"|---|{'---:|' * 8}",
    ]
    for row in rows:
        times = [
            f"{row[f'{where}_{what}']:.2f}"
            for where in ("disk", "cache")
            for what in ("load_s", "ratio")
        ]
        lines.append(
            f"| {row['name']} | {row['threads']} | {row['mb'] / 1e3:.2f} | {' | '.join(times)} | "
            f"{row['above_mb']:.0f} | {row['shard_mb']:.0f} |"
        )
    return "\n".join(lines)
