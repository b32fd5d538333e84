"""Suite `serve-vllm`: tokens per second of vLLM, with weights and KV cache of floats and of codes.

A Llama with random weights answers random prompts. Weights, KV cache and a fixed reserve share one
budget of memory. A row has the milliseconds between the tokens of several requests at once, and the
tokens per second of as many requests as the KV cache holds.

Each pair of weights and KV cache is an engine in a process. All engines start side by side, then
each measures while the others wait.

    this process                     a process for each pair
    make the checkpoints    ----->   load, compile, capture
    wait for all            <-----   "ready", bytes of the weights
    in order                ----->   measure
    report                  <-----   the row
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_vq
from hf_vq import env
from hf_vq.evaluation.text_tables import markdown_table

from ..random_llama import random_llama
from . import serve

FLOATS = serve.FLOATS
PAIRS = ("dense/floats", "vq-4/floats", "vq-4/u4")
REQUESTS = {"cpu": (1, 2), "cuda": (1, 16, 64)}
RESERVE = {"cpu": 0.1, "cuda": 2.0}
"""GiB of the budget that are neither weights nor KV cache, by device."""
_MEMORY = {"cpu": 0.25, "cuda": 24.0}
_GB = 1 << 30
_MARK = "serve-vllm: "  # before what a process says, among the lines that vLLM logs
_BATCH = 8192  # tokens of a forward at most, as of `vllm serve` on a large GPU
_SHORT, _STEPS = 64, 64  # tokens of a prompt, and steps that are timed, for time between tokens


def run(
    *,
    pairs: Sequence[str] | None = None,
    requests: Sequence[int] | None = None,
    prompt: int | None = None,
    new: int | None = None,
    memory_gb: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serve with every pair of weights and KV cache; `report` gets each row.

    Args:
        pairs: WEIGHTS/KV, schemes or `dense` and `floats`.
        requests: at once, of the time between tokens.
        prompt: tokens, of the requests that fill the cache.
        new: tokens that these answer.
        memory_gb: GiB for weights, KV cache and the reserve.

    Returns:
        (settings, results) of the record. An engine that failed has a row that says so, and its
        log is printed.
    """
    from vllm import __version__ as version

    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = serve.CASES[device].but(
        pairs=PAIRS, requests=REQUESTS[device], memory_gb=_MEMORY[device]
    )
    case = case.but(pairs=pairs, requests=requests, prompt=prompt, new=new, memory_gb=memory_gb)
    job = {"requests": case.requests, "prompt": case.prompt, "new": case.new}
    rows = []
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines: list[tuple[dict[str, Any], subprocess.Popen[str]]] = []
        for pair in case.pairs:
            weights, _, kv = pair.partition("/")
            size = _checkpoint(root / weights, case.config, weights, device)
            left = int((case.memory_gb - RESERVE[device]) * _GB) - size
            row = {"weights": weights, "kv": kv}
            more = {"folder": str(root / weights), "left": left, "memory": case.memory_gb}
            started = _engine(job | row | more, root / f"{len(engines)}.log")
            engines.append((row, stack.enter_context(started)))
        first = [_said(engine) for _, engine in engines]
        for (row, engine), said in zip(engines, first, strict=True):
            rows.append(row | (said if "failed" in said else _said(engine, tell="measure")))
            report(rows[-1])
    return {**case.settings, "vllm": version}, {"rows": rows}


def _checkpoint(folder: Path, config: LlamaConfig, weights: str, device: str) -> int:
    """Write random weights, once; bytes that they take in memory. Dense ones have no file."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config.architectures, config.dtype = ["LlamaForCausalLM"], dtype
    if weights == serve.DENSE:
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        return sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if not folder.exists():
        model = random_llama(config, dtype, None, device)
        quick = hf_vq.VQConfig(weights, search="norm", activations=None)
        hf_vq.quantize_model(model, quick).save_pretrained(folder)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextlib.contextmanager
def _engine(job: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `main`, killed at the end."""
    chosen = "" if job["kv"] == FLOATS else job["kv"]
    switches = {env.VLLM_KV.name: chosen, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True,
            env=os.environ | switches,
        )  # fmt: skip
        process.log = log  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def _said(process: subprocess.Popen[str], tell: str = "") -> dict[str, Any]:
    """Tell a process to go on, and wait for what it says; of one that ended, the last that vLLM
    logged."""
    assert process.stdin is not None and process.stdout is not None
    if tell:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(tell + "\n")
            process.stdin.flush()
    for line in process.stdout:
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    log: Path = process.log  # type: ignore[attr-defined]
    lines = log.read_text().rstrip().splitlines() or ["it logged nothing"]
    print("\n".join(lines[-30:]), file=sys.stderr, flush=True)
    return {"failed": lines[-1]}


def main(job: dict[str, Any]) -> None:
    """Run one engine: start, say so, wait for a line, measure, say the row."""
    from vllm import LLM

    cuda = torch.cuda.is_available()
    on_gpu: dict[str, Any] = {}
    if cuda:
        on_gpu = {"gpu_memory_utilization": _part(job["memory"]), "max_num_batched_tokens": _BATCH}
    llm = LLM(
        job["folder"], skip_tokenizer_init=True,
        max_model_len=max(job["prompt"] + job["new"], _SHORT + 1 + _STEPS),
        load_format="dummy" if job["weights"] == serve.DENSE else "auto",
        kv_cache_memory_bytes=job["left"], enable_prefix_caching=False, max_num_seqs=512,
        enforce_eager=not cuda, disable_log_stats=True, **on_gpu,
    )  # fmt: skip
    _say({})
    input()
    cache = llm.llm_engine.vllm_config.cache_config
    capacity = cache.num_gpu_blocks * cache.block_size
    between = {count: _between_tokens(llm, count) for count in job["requests"]}
    fitting = max(1, min(capacity // (job["prompt"] + job["new"]), 512))
    _seconds(llm, fitting, job["prompt"], 2)
    seconds = _seconds(llm, fitting, job["prompt"], job["new"])
    _say({
        "capacity_tokens": capacity, "ms_between_tokens": between, "requests": fitting,
        "tokens_per_second": fitting * job["new"] / seconds,
    })  # fmt: skip


def _part(memory: float) -> float:
    """Part of the GPU's memory: vLLM refuses to start if the other engines left less."""
    return memory * _GB / torch.cuda.mem_get_info()[1]


def _say(what: dict[str, Any]) -> None:
    print(_MARK + json.dumps(what), flush=True)


def _between_tokens(llm: Any, count: int) -> float:
    """Milliseconds between two tokens of `count` requests at once: the best of three."""
    _seconds(llm, count, _SHORT, 4)
    times = [
        _seconds(llm, count, _SHORT, 1 + _STEPS) - _seconds(llm, count, _SHORT, 1) for _ in range(3)
    ]
    return min(times) / _STEPS * 1e3


def _seconds(llm: Any, count: int, prompt: int, new: int) -> float:
    """Time of `count` requests at once, all of the same lengths, all different."""
    from vllm import SamplingParams

    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, words, (count, prompt), generator=generator).tolist()
    greedy = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": row} for row in ids], greedy, use_tqdm=False)
    return time.perf_counter() - start


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each pair: milliseconds between tokens at each number of requests, the tokens that
    the KV cache holds, and the tokens per second of as many requests as fit."""
    ran = [row for row in rows if "failed" not in row]
    counts = list(ran[0]["ms_between_tokens"]) if ran else []
    head = ["weights", "KV cache", *(f"{n} request{'s' * (n != '1')}, ms" for n in counts),
            "tokens that fit", "as many as fit, tokens/s"]  # fmt: skip
    lines = []
    for row in rows:
        cells = ["-"] * (len(counts) + 2)
        if row in ran:
            between = [f"{row['ms_between_tokens'][n]:.2f}" for n in counts]
            speed = f"{row['tokens_per_second']:,.0f} ({row['requests']})"
            cells = [*between, f"{row['capacity_tokens']:,}", speed]
        lines.append([f"`{row['weights']}`", f"`{row['kv']}`", *cells])
    return markdown_table(head, lines)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
