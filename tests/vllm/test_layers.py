"""Linear layers of vLLM with codes compute what hf_vq's own layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.model_executor.layers import linear as layers

from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.formats.catalog import QOQ_SCHEMES, WEIGHT_SCHEMES
from hf_vq.vllm.config import VQQuantizationConfig
from tests.fixtures.random_weights import SCALED_SCHEMES
from tests.vllm.layers import (
    HIDDEN,
    SHARDS,
    SIZES,
    block,
    compare,
    load,
    matrices,
    quantization,
    run_ranks,
)

SCHEMES = [*WEIGHT_SCHEMES, *SCALED_SCHEMES, *QOQ_SCHEMES]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str) -> None:
    compare(0, 1, scheme)


@pytest.mark.parametrize("scheme", ["vq-4", "vq-3-scaled", "quip-sharp-2", "qoq-w4a8", "aqlm-2"])
def test_matrices_that_agree_are_one_product(scheme: str) -> None:
    found = compare(0, 1, scheme, alike=True)
    assert set(found.values()) == {1}


def test_matrices_that_differ_are_several_products() -> None:
    assert compare(0, 1, "vq-4-scaled") == {
        "qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1
    }  # fmt: skip


def test_dense_matrices_beside_codes() -> None:
    stored: dict[str, nn.Module] = dict(matrices("vq-4"))
    coded = [name for name in stored if name not in ("v_proj", "gate_proj", "up_proj")]
    for name in set(stored) - set(coded):
        stored[name] = nn.Linear(HIDDEN, SIZES[name][0], bias=False)
    made = block(quantization("vq-4", coded))
    for name in ("gate_proj", "up_proj"):
        assert type(made["gate_up_proj"].quant_method).__name__ == "UnquantizedLinearMethod"
        stored.pop(name)
    made.pop("gate_up_proj")
    load(made, stored)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        wanted = torch.cat([stored[name](x) for name in ("q_proj", "k_proj", "v_proj")], -1)
        torch.testing.assert_close(made["qkv_proj"](x)[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", ["shape", "dtype", "float", "missing", "unknown", "infinite"])
def test_wrong_files_are_refused(change: str) -> None:
    stored = {"down_proj": matrices("vq-4")["down_proj"]}
    made = {"down_proj": block(quantization("vq-4", SIZES))["down_proj"]}
    parameters = stored["down_proj"]._parameters
    wanted = "down_proj"
    if change == "shape":
        parameters["vq_scale"] = nn.Parameter(torch.ones(HIDDEN, 3).half(), False)
    elif change == "dtype":
        parameters["weight"] = nn.Parameter(parameters["weight"].to(torch.int16), False)
    elif change == "float":
        parameters["vq_scale"] = nn.Parameter(parameters["vq_scale"].bfloat16(), False)
    elif change == "missing":
        del parameters["vq_signs"]
        wanted = "lacks vq_signs of down_proj"
    elif change == "unknown":
        made["down_proj"].register_parameter("vq_codebook", made["down_proj"].vq_scale)
        parameters["vq_codebook"] = nn.Parameter(torch.ones(1, 256, 2).half(), False)
        del parameters["vq_scale"]
    else:
        parameters["vq_scale"].data[0, 0] = torch.inf
    with pytest.raises(VQFormatError, match=wanted):
        load(made, stored)


def test_what_cannot_be_loaded_as_one() -> None:
    made = block(quantization("vq-4", SIZES))
    parameter = made["qkv_proj"].weight
    with pytest.raises(VQConfigError, match="q_proj, k_proj, v_proj"):
        parameter.weight_loader(parameter, torch.zeros(1, dtype=torch.uint8))


def encoded(layer: str, dense: dict[str, torch.Tensor], x: torch.Tensor, size: int) -> torch.Tensor:
    """Product of a layer that `size` ranks encode while they load it, each its own part."""
    parts: list[torch.Tensor] = []
    config = VQQuantizationConfig()
    config.packed_modules_mapping = quantization("vq-4", ()).packed_modules_mapping
    by_column = layer in ("o_proj", "down_proj")
    for rank in range(size):
        with (
            mock.patch.object(layers, "get_tensor_model_parallel_world_size", lambda: size),
            mock.patch.object(layers, "get_tensor_model_parallel_rank", lambda: rank),  # noqa: B023
        ):
            made: Any = block(config)[layer]
        for name, weight in dense.items():
            _, *shard = SHARDS.get(name, (name,))
            made.weight.weight_loader(made.weight, weight, *shard)
        made.quant_method.process_weights_after_loading(made)
        assert len(made.vq_parts) == 1
        given = x.chunk(size, -1)[rank] if by_column else x
        y = made.quant_method.apply(made, given.contiguous())
        parts += [y] if by_column else y.split(made.output_partition_sizes, -1)
    if by_column:
        return torch.stack(parts).sum(0)
    matrices = len(dense)
    return torch.cat([part for i in range(matrices) for part in parts[i::matrices]], -1)


@pytest.mark.parametrize("layer", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_ranks_that_encode_their_own_parts_lose_no_more(layer: str) -> None:
    """Parts of the rows have the codes of one rank. Parts of the columns have other rotations, so
    other codes; how far those are from the weights is no other."""
    torch.manual_seed(0)
    names = [name for name, (owner, *_) in SHARDS.items() if owner == layer] or [layer]
    dense = {name: torch.randn(SIZES[name]) for name in names}
    for weight in dense.values():
        weight[:, ::37] *= 4  # columns of a trained layer differ
    x = torch.randn(64, SIZES[names[0]][1])
    exact = x.double() @ torch.cat(list(dense.values())).double().T
    found = {size: encoded(layer, dense, x, size) for size in (1, 2)}
    assert torch.equal(found[1], found[2]) == (layer in ("qkv_proj", "gate_up_proj"))
    loss = {size: float((y - exact).norm() / exact.norm()) for size, y in found.items()}
    assert 0 < loss[2] < 1.05 * loss[1] < 0.15  # of hundreds of thousands of weights: 1 % is noise


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(size: int, tmp_path: Path) -> None:
    """Of four ranks, two hold the same head of keys."""
    run_ranks("vllm_ranks.py", size, str(size), str(tmp_path / "store"))
