"""`hf-vq demo`: the whole path on a small model, and one table.

Quantize, save, reload in a new process that imports Transformers and nothing of ours, generate
with and without a quantized KV cache, and measure how far the reloaded model is from the original
(with the cache: where it is read, after the first quarter of each context).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .. import env
from ..errors import VQError
from ..hf.config import VQConfig
from .evaluate import BATCH, CHUNK, cache_factory, prompt_length
from .load import check_model, load_model, load_tokenizer
from .score import Reference, model_forward, score
from .storage import file_storage, model_storage, read_config, read_headers
from .text import read_sequences, text_facts
from .text_tables import significant

SCHEMES = ("vq-4", "vq-2")
CONTEXT = 512
NEW_TOKENS = 24
PROMPT = 448  # tokens; the sinks and the window are 68 of them

# What runs in the new process: its own imports are the ones a user writes.
_CHILD = """
import hashlib, json, sys, time, warnings
warnings.simplefilter("ignore")
job = json.loads(sys.argv[1])
if job["import_hf_vq"]:
    import hf_vq
import torch
from transformers import AutoModelForCausalLM
loaded_early = "hf_vq" in sys.modules
model = AutoModelForCausalLM.from_pretrained(job["model"]).eval()
torch.set_num_threads(job["threads"])
ids = torch.tensor([job["prompt"]])
with torch.no_grad():
    logits = model(ids, use_cache=False).logits.float().numpy()
class Clock:
    def __init__(self):
        self.seconds = []
    def put(self, tokens):  # the prompt, then each token
        self.seconds.append(time.perf_counter())
    def end(self):
        pass
def generate(count, options):
    clock = Clock()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True,
        min_new_tokens=count, max_new_tokens=count, streamer=clock, **options,
    )
    return out, clock.seconds[-1] - clock.seconds[1]
runs = {}
for name, options in job["caches"].items():
    generate(2, options)  # the first calls are slower
    out, seconds = generate(job["count"], options)
    cache = out.past_key_values
    if hasattr(cache, "nbytes"):
        nbytes, bits = cache.nbytes, cache.bits_per_element
    else:
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        nbytes = sum(t.nbytes for t in tensors)
        bits = 8 * nbytes / sum(t.numel() for t in tensors)
    runs[name] = dict(kv_bytes=int(nbytes), bits_per_kv_element=float(bits),
                      tokens_per_second=(job["count"] - 1) / seconds)
digest = hashlib.sha256(logits.tobytes()).hexdigest()
print(json.dumps({"early": loaded_early, "runs": runs, "logits": digest}))
"""
_CACHES: dict[str, dict[str, Any]] = {
    "model's dtype": {},
    "VQCache": {"cache_implementation": "quantized", "cache_config": {"backend": "vq"}},
}


def run(
    model_dir: str,
    text: str | Path,
    *,
    schemes: Sequence[str] = SCHEMES,
    tokens: int = 8192,
    new_tokens: int = NEW_TOKENS,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the demo; `say` gets a line per step.

    Returns:
        (settings, results) of a record; `results["rows"]` are the rows of the table.

    Raises:
        VQError: the model, the text or a scheme cannot be used, or the reloaded model differs.
    """
    from ..formats.catalog import weight_scheme

    for scheme in schemes:
        weight_scheme(scheme)
    check_model(model_dir)
    if read_config(model_dir).get("quantization_config"):
        raise VQError(f"{model_dir} is quantized already; the demo starts from the original.")
    tokenizer = load_tokenizer(model_dir)
    sequences = read_sequences(tokenizer, text, context=CONTEXT, tokens=tokens)
    prompt = sequences[0][:PROMPT].tolist()
    original = load_model(model_dir)
    unscored = prompt_length(CONTEXT)  # in all rows, so that they can be compared
    reference = Reference(model_forward(original), sequences, skip=unscored)
    say(f"original: perplexity {reference.perplexity:.2f} on {sequences.numel()} tokens")
    base, _ = generate_apart(model_dir, prompt, new_tokens, ["model's dtype"])
    size = model_storage(original)
    quality = [{"perplexity": reference.perplexity, "kld": 0.0}]
    rows = _rows("original", size.nbytes, size.bits_per_parameter, base, quality)
    with tempfile.TemporaryDirectory(prefix="hf_vq_demo_") as folder:
        for scheme in schemes:
            saved = str(Path(folder) / scheme.replace("/", "_"))
            rows += _one_scheme(model_dir, scheme, saved, prompt, new_tokens, reference, say)
    settings = {
        "model": Path(model_dir).name,
        **text_facts(text),
        "tokens": sequences.numel(),
        "context": CONTEXT,
        "not scored": f"the first {unscored} of each context",
        "generated": f"{new_tokens} after a prompt of {len(prompt)}",
    }
    return settings, {"rows": rows}


def _one_scheme(
    model_dir: str,
    scheme: str,
    saved: str,
    prompt: list[int],
    new_tokens: int,
    reference: Reference,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    say(f"{scheme}: quantizing while loading")
    quantized = load_model(model_dir, config=VQConfig(scheme))
    quantized.save_pretrained(saved)
    say(f"{scheme}: saved, reloading in a new process and generating")
    apart, there = generate_apart(saved, prompt, new_tokens, list(_CACHES))
    if there != logits_digest(quantized, prompt):
        raise VQError(f"{scheme}: the reloaded model has other logits than the one in memory.")
    say(f"{scheme}: measuring against the original")
    reloaded = load_model(saved)
    new_cache = cache_factory(reloaded, "u4")
    plain = score(model_forward(reloaded), reference, BATCH)
    with_cache = model_forward(reloaded, new_cache, prompt=reference.skip[0], chunk=CHUNK)
    cached = score(with_cache, reference, len(reference.sequences))  # weights are decoded per step
    stored = reloaded.config.quantization_config.vq_scheme
    storage = file_storage(read_headers(saved), lambda layer: stored)
    quality = [plain.to_dict(), cached.to_dict()]
    return _rows(scheme, storage.nbytes, storage.bits_per_weight, apart, quality)


def _rows(
    name: str,
    nbytes: int,
    bits: float,
    runs: dict[str, dict[str, Any]],
    quality: list[dict[str, float]],
) -> list[dict[str, Any]]:
    same = {"weights": name, "bytes": nbytes, "bits_per_weight": bits}
    return [
        {**same, "cache": cache, **run, "perplexity": found["perplexity"], "kld": found["kld"]}
        for (cache, run), found in zip(runs.items(), quality, strict=True)
    ]


def logits_digest(model: Any, prompt: list[int]) -> str:
    """Identifies the logits of a prompt, bit for bit."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([prompt], device=model.device)
        logits = model(ids, use_cache=False).logits.float().cpu().numpy()
    return hashlib.sha256(logits.tobytes()).hexdigest()


def generate_apart(
    model: str, prompt: list[int], count: int, caches: list[str]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Generate in a new process that imports only Transformers.

    Returns:
        By cache, `kv_bytes`, `bits_per_kv_element` and `tokens_per_second` after the prefill; and
        the `logits_digest` of the prompt.

    Raises:
        VQError: the process failed, or imported hf_vq without a VQ model.
    """
    import torch

    job = {
        "model": model,
        "prompt": prompt,
        "count": count,
        "threads": torch.get_num_threads(),
        "caches": {name: _CACHES[name] for name in caches},
        "import_hf_vq": not autoloads(),
    }
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(job)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        check=False,
    )
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit status {done.returncode}")
        raise VQError(f"the new process could not load and run {Path(model).name}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if found["early"] and not job["import_hf_vq"]:
        raise VQError(
            "hf_vq was imported by `import transformers`; its autoload hook is too eager."
        )
    runs: dict[str, dict[str, Any]] = found["runs"]
    return runs, found["logits"]


def autoloads() -> bool:
    """True if a process that never imports hf_vq can load a VQ model: hf_vq is installed, not only
    on the path, and HF_VQ_AUTOLOAD is not 0.
    """
    installed = any(
        point.value.startswith("hf_vq_autoload") for point in entry_points(group="torch.backends")
    )
    return installed and env.AUTOLOAD.get()


def demo_files() -> tuple[str, str]:
    """The embedded model and its evaluation text, which are in a checkout of the repository.

    Raises:
        VQError: this is not a checkout.
    """
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        model = root / "tests" / "models" / "tinybooks-5m"
        text = model.with_name("tinybooks-5m-eval.txt")
        if (model / "config.json").is_file() and text.is_file():
            return str(model), str(text)
    raise VQError(
        "the demo model is in the repository, not in the installed package: run `hf-vq demo` in a "
        "checkout, or give --model and --text."
    )


def default_text(model: str) -> str:
    """The demo's text, for the demo's model.

    Raises:
        VQError: the model has another tokenizer.
    """
    original, text = demo_files()
    if load_tokenizer(model).get_vocab() != load_tokenizer(original).get_vocab():
        raise VQError(
            "the demo's text was sampled from the demo's model and says little of another one: "
            "give --text."
        )
    return text


def cells(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the demo's table."""
    head = [
        *("weights", "KV cache", "MB", "bits/weight", "perplexity", "KLD", "bits/KV"),
        *("KV kB", "tokens/s"),
    ]
    rows = [
        [
            row["weights"],
            row["cache"],
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bits_per_weight']:.3f}",
            f"{row['perplexity']:.2f}",
            significant(row["kld"]),
            f"{row['bits_per_kv_element']:.2f}",
            f"{row['kv_bytes'] / 1e3:.1f}",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in found
    ]
    return head, rows
