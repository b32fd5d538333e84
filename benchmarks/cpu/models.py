"""Suite `cpu-models`: milliseconds a token of `generate()` of a real model on the CPU.

Ours: 4 bits of weights and of the cache, by two schemes, with the head as the model has it and in
8 bits. Peers: the model in bfloat16 with `DynamicCache`; and llama.cpp, given its `llama-bench` and
GGUF files of the model. All run in turn, round after round. A model of codes is made without data:
which codes it has does not change how long a token takes.

    a time    (seconds of FEW + tokens - those of FEW) / tokens      what precedes a loop drops out
    depth     tokens in the cache before; random ids, read as one prompt
    prompt    tokens a second of a prompt of PROMPT tokens
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from hf_vq import VQCache, VQConfig
from hf_vq.backends.cpu import library as native
from hf_vq.cache.argument import CACHE
from hf_vq.evaluation.record import Recorder, command_line

from ..peers import llama_bench as llama
from ..records import RESULTS

NAME = "cpu-models"
OURS = {  # weights, embeddings, cache
    "vq-4 + u4": ("vq-4", None, "u4"),
    "vq-4 + u4, int8 head": ("vq-4", "int8", "u4"),
    "turboquant-4 + nomad-u4": ("turboquant-4", None, "nomad-u4"),
    "turboquant-4 + nomad-u4, int8 head": ("turboquant-4", "int8", "nomad-u4"),
    "turboquant-8 + u4": ("turboquant-8", None, "u4"),
}
DENSE = "bf16"
LLAMA = {  # weights, flash attention, type of the cache
    "llama.cpp Q4_0": ("Q4_0", 0, "f16"),
    "llama.cpp Q4_0, q4_0 cache, flash": ("Q4_0", 1, "q4_0"),
    "llama.cpp Q4_K_M": ("Q4_K_M", 0, "f16"),
}
DEPTHS = (0, 2048)
FEW, TOKENS = 4, 24
UNTIMED = 48  # tokens of a model's first call, which finds what it will call again
PROMPT = 512
_SHOWN = {"gguf": "GGUF_DIR", "llama_bench": "LLAMA_BENCH", "depths": "", "threads": "",
          "rounds": "", "tokens": ""}  # fmt: skip


def add_verb(verbs: Any) -> None:
    """Add the suite to the parser of `python -m benchmarks`."""
    parser = verbs.add_parser(NAME, help=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL_DIR", help="unquantized causal language model")
    add("--gguf", type=Path, help="folder with MODEL-Q4_0.gguf and MODEL-Q4_K_M.gguf")
    add("--llama-bench", type=Path, help="program of llama.cpp")
    add("--depths", type=int, nargs="+", default=list(DEPTHS), help="tokens in the cache before")
    add("--threads", type=int, nargs="+", default=[1], help="default: %(default)s")
    add("--rounds", type=int, default=5, help="default: %(default)s")
    add("--tokens", type=int, default=TOKENS, help="of a timed call (default: %(default)s)")
    add("--out", type=Path, help="record (default: in results)")
    add("--revision", help="of the source (default: git is asked)")
    parser.set_defaults(parser=parser)


def measure(args: argparse.Namespace) -> int:
    """Run it. Returns the exit status of the command."""
    name = args.model.resolve().name
    command = command_line(f"python -m benchmarks {NAME} MODEL_DIR", args.parser, args, _SHOWN)
    out = args.out or RESULTS / "cpu" / f"{NAME}-{name}.jsonl"
    settings = {"model": name, "rounds": args.rounds, "tokens": args.tokens, "isa": native.isa()}
    recorder = Recorder(out, NAME, command, args.revision, "cpu", settings)

    def report(row: dict[str, Any]) -> None:
        print("  ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
        recorder.add(row)

    run(
        args.model, args.depths, args.threads, args.rounds, args.tokens,
        args.llama_bench, args.gguf, report,
    )  # fmt: skip
    recorder.finish(settings, recorder.record["results"])
    print(f"wrote {out}")
    return 0


def run(
    path: Path,
    depths: list[int],
    threads: list[int],
    rounds: int,
    tokens: int,
    llama_bench: Path | None,
    gguf: Path | None,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Time every model at every depth with every number of threads; `report` gets the rows."""
    before = torch.get_num_threads()
    own = _models(path)
    peers = {} if llama_bench is None or gguf is None else LLAMA
    try:
        for count, depth in itertools.product(threads, depths):
            torch.set_num_threads(count)
            seconds: dict[str, list[float]] = {name: [] for name in (*own, *peers)}
            prompts: dict[str, list[float]] = {name: [] for name in seconds}
            for model in own.values():
                model.fill(depth)
            for _ in range(rounds):
                for name, model in own.items():
                    seconds[name].append(model.token(tokens))
                    prompts[name].append(model.prompt() if depth == 0 else 0.0)
                for name, setting in peers.items():
                    assert llama_bench is not None and gguf is not None
                    file = gguf / f"{path.resolve().name}-{setting[0]}.gguf"
                    found = _llama(llama_bench, file, setting, depth, count, tokens)
                    seconds[name].append(found["tg"])
                    prompts[name].append(found.get("pp", 0.0))
            for name, times in seconds.items():
                row = {"name": name, "depth": depth, "threads": count, "ms": median(times) * 1e3}
                if depth == 0:
                    row["prompt_tokens_per_second"] = PROMPT / median(prompts[name])
                if name in own:
                    row["megabytes"] = own[name].megabytes()
                report(row)
    finally:
        torch.set_num_threads(before)


class _Model:
    """A model of Transformers, and the tokens in its cache.

    Args:
        scheme: of a `VQCache`; None = a `DynamicCache`.
    """

    def __init__(self, path: Path, scheme: str | None, **options: Any) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)
        self.model, self.scheme = model.eval(), scheme
        self.filled: Cache | None = None
        self.depth = 0
        if scheme is not None:
            self._generate(UNTIMED)

    def _empty(self) -> Cache:
        config = self.model.config
        return DynamicCache(config=config) if self.scheme is None else VQCache(config, self.scheme)

    def _ids(self, count: int) -> Tensor:
        words = min(5000, self.model.config.get_text_config().vocab_size)
        return torch.randint(100, words, (1, count), generator=torch.Generator().manual_seed(count))

    def _read(self, cache: Cache, tokens: int) -> None:
        with torch.inference_mode():
            self.model(self._ids(tokens), use_cache=True, logits_to_keep=1, **{CACHE: cache})

    def fill(self, depth: int) -> None:
        """Let timed calls begin behind so many tokens."""
        self.depth, self.filled = depth, None
        if depth:
            self.filled = self._empty()
            self._read(self.filled, depth)

    def _generate(self, tokens: int) -> float:
        """Seconds of a call."""
        cache, ids = self.filled or self._empty(), self._ids(self.depth + 1)
        start = time.perf_counter()
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            eos_token_id=None, **{CACHE: cache},
        )  # fmt: skip
        seconds = time.perf_counter() - start
        if self.filled is not None:
            cache.crop(self.depth - cache.get_seq_length())
        return seconds

    def token(self, tokens: int) -> float:
        """Seconds of a token."""
        few, many = self._generate(FEW), self._generate(FEW + tokens)
        return (many - few) / tokens

    def prompt(self) -> float:
        """Seconds of a prompt of `PROMPT` tokens."""
        cache, start = self._empty(), time.perf_counter()
        self._read(cache, PROMPT)
        return time.perf_counter() - start

    def megabytes(self) -> float:
        """Megabytes of all tensors."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values()) / 1e6


def _models(path: Path) -> dict[str, _Model]:
    found = {}
    for name, (scheme, embeddings, cache) in OURS.items():
        config = VQConfig(scheme, activations=None, embeddings=embeddings)
        found[name] = _Model(path, cache, quantization_config=config)
    return {**found, DENSE: _Model(path, None)}


def _llama(
    program: Path, model: Path, setting: tuple[str, int, str], depth: int, threads: int, tokens: int
) -> dict[str, float]:
    """Seconds of a token (`tg`), and without a depth of a prompt (`pp`)."""
    _, flash, cache = setting
    found = {}
    for row in llama.rows(
        program, model, (flash, cache), prompt=0 if depth else PROMPT, tokens=tokens,
        depth=depth, threads=threads, repeats=1,
    ):  # fmt: skip
        of_prompt = row["n_gen"] == 0
        found["pp" if of_prompt else "tg"] = (PROMPT if of_prompt else 1) / row["avg_ts"]
    return found


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
