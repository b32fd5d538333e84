"""Fused experts of vLLM with codes compute what hf_vq's own experts compute."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from hf_vq.errors import VQConfigError, VQFormatError
from tests.fixtures.models.random_experts import random_experts
from tests.vllm.experts import compare, layer, load
from tests.vllm.layers import quantization, run_ranks
from tests.vllm.test_layers import SCHEMES

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str) -> None:
    compare("mixtral", scheme)


@pytest.mark.parametrize("scheme", ["vq-4", "gptvq-2", "turboquant-2+2"])
def test_biases_and_gates_between_rows(scheme: str) -> None:
    compare("gpt-oss", scheme)


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "bias", "unknown", "infinite"])
def test_wrong_files_are_refused(change: str) -> None:
    module, made = random_experts("gpt-oss", "vq-4"), layer("gpt-oss", "vq-4")
    parameters, wanted = module._parameters, "experts"
    codes, scale = parameters["vq_down_proj_codes"], parameters["vq_down_proj_scale"]
    if change == "shape":
        parameters["vq_down_proj_codes"] = nn.Parameter(codes[1:], False)
    elif change == "dtype":
        parameters["vq_down_proj_scale"] = nn.Parameter(scale.bfloat16(), False)
    elif change in ("missing", "bias"):
        name = "vq_gate_up_proj_signs" if change == "missing" else "down_proj_bias"
        del parameters[name]
        wanted = f"lacks {name} of experts"
    elif change == "unknown":
        parameters["vq_down_proj_codebook"] = nn.Parameter(scale.clone(), False)
    else:
        scale.data[0, 0] = torch.inf
    with pytest.raises(VQFormatError, match=wanted):
        load(made, module)


def test_experts_that_are_stored_one_by_one_are_refused() -> None:
    with (
        mock.patch(
            "tests.vllm.experts.quantization", lambda scheme, _: quantization(scheme, NAMES)
        ),
        pytest.raises(VQConfigError, match="one by one"),
    ):
        layer("mixtral", "vq-4")


NAMES = ["experts.0.w1", "experts.0.w2"]


@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks(parallel: str, tmp_path: Path) -> None:
    run_ranks("vllm_expert_ranks.py", 2, parallel, str(tmp_path / "store"))
