"""Tiny random models of several architectures in vLLM: checkpoints with codes, and dense ones that
become codes while they are loaded. The text is that of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GPT2Config as GPT2
from transformers import GptOssConfig as GptOss
from transformers import MixtralConfig as Mixtral
from transformers import OlmoeConfig as Olmoe
from transformers import Qwen2MoeConfig as Qwen2Moe
from transformers import Qwen3MoeConfig as Qwen3Moe
from vllm import LLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from hf_vq import VQConfig
from hf_vq.errors import VQConfigError
from hf_vq.vllm.config import VQQuantizationConfig
from tests.vllm.test_engine import MODEL, OPTIONS, compare

_SIZES = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "intermediate_size": 256, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"moe_intermediate_size": 256, "num_experts": 8, "decoder_sparse_step": 1}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda v: Mixtral(vocab_size=v, num_local_experts=4, **_SIZES),
    "olmoe": lambda v: Olmoe(vocab_size=v, num_experts=8, **_SIZES),
    "gpt-oss": lambda v: GptOss(vocab_size=v, num_local_experts=4, head_dim=64, **_SIZES),
    "qwen3-moe": lambda v: Qwen3Moe(vocab_size=v, head_dim=64, **_SIZES, **_QWEN),
    "qwen2-moe": lambda v: Qwen2Moe(
        vocab_size=v, shared_expert_intermediate_size=256, **_SIZES, **_QWEN
    ),
    "gpt2": lambda v: GPT2(vocab_size=v, n_positions=256, n_embd=256, n_layer=2, n_head=4),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """An engine of this process leaves groups of processes behind."""
    yield
    cleanup_dist_env_and_memory()


def dense(folder: Path, name: str) -> Path:
    """A random model, saved with the tokenizer of the embedded one."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(0)
    config = CONFIGS[name](len(tokenizer))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantized(source: Path, scheme: str, **options: Any) -> Path:
    """The same with codes, beside it."""
    config = VQConfig(scheme, activations=None, **options)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    folder = source.parent / f"{source.name}-codes"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("mixtral", "vq-4"), ("olmoe", "vq-3"), ("gpt-oss", "vq-4"), ("qwen3-moe", "gptvq-2"),
        ("qwen2-moe", "turboquant-2+2"), ("gpt2", "vq-4"),
    ],
)  # fmt: skip
def test_checkpoints(name: str, scheme: str, tmp_path: Path) -> None:
    folder = quantized(dense(tmp_path / "model", name), scheme, search="norm")
    compare(folder, enforce_eager=True)


def test_compiled_experts(tmp_path: Path) -> None:
    compare(quantized(dense(tmp_path / "model", "mixtral"), "vq-4", search="norm"))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_processes(
    expert_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = quantized(dense(tmp_path / "model", "mixtral"), "vq-4", search="norm")
    compare(
        folder, tensor_parallel_size=2, distributed_executor_backend="mp", enforce_eager=True,
        enable_expert_parallel=expert_parallel,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_on_the_fly(name: str, tmp_path: Path) -> None:
    source = dense(tmp_path / "model", name)
    reference = quantized(source, "vq-4", search="norm")
    compare(source, reference, quantization="vq", enforce_eager=True)


def test_options_on_the_fly(tmp_path: Path) -> None:
    source = dense(tmp_path / "model", "qwen3-moe")
    options = {"layers": {"v_proj": "turboquant-4"}, "modules_to_not_convert": ["layers.0.mlp"]}
    reference = quantized(source, "vq-3", **options)
    given = {"quant_method": "vq", "scheme": "vq-3", "search": "search", **options}
    compare(source, reference, hf_overrides={"quantization_config": given}, enforce_eager=True)


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "vq-4-scaled"}, {"calibration": "model"}, {"target_bits": 3.0},
        {"activations": "random"}, {"embeddings": "int8"},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_on_the_fly(options: dict[str, Any]) -> None:
    with pytest.raises(VQConfigError, match="hf-vq quantize"):
        VQQuantizationConfig.from_config({"quant_method": "vq", **options})


def test_weights_that_vllm_copies_itself(tmp_path: Path) -> None:
    source = dense(tmp_path / "model", "gpt-oss")
    with pytest.raises(Exception, match=r"mlp\.experts: vLLM loaded no weights"):
        LLM(str(source), quantization="vq", enforce_eager=True, **OPTIONS)


def test_weights_that_are_loaded_anew() -> None:
    """As a trainer sends them to a running engine: codes of the old ones may not stay."""
    llm = LLM(str(MODEL), quantization="vq", enforce_eager=True, **OPTIONS)
    with pytest.raises(Exception, match="cannot be loaded anew: start vLLM again"):
        llm.collective_rpc("reload_weights")


def test_command_line() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert parser.parse_args(["--quantization", "vq"]).quantization == "vq"
