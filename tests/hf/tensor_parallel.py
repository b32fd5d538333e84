"""One of several processes that share a model: torchrun tensor_parallel.py <quantized> <dense>."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from tiny import tokens
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_vq.errors import VQConfigError
from hf_vq.hf import VQConfig, register

LOAD = AutoModelForCausalLM.from_pretrained


def split(folder: str, **options: Any) -> Any:
    """Load a model over all processes."""
    size = int(os.environ["WORLD_SIZE"])
    return LOAD(folder, distributed_config=DistributedConfig(tp_size=size), **options)


def refused(folder: str, **options: Any) -> str:
    """The message of the error that loading ends with."""
    try:
        split(folder, **options)
    except VQConfigError as error:
        return str(error)
    return "was loaded"


def main(quantized: str, twice: str, experts: str, dense: str, target: str) -> None:
    """Compare with the model in one process, and save."""
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo")
    with torch.no_grad():
        expected = LOAD(quantized)(tokens()).logits
        model = split(quantized)
        layer = model.model.layers[0]
        for module, rows, columns in (
            (layer.self_attn.q_proj, 2, 1),
            (layer.mlp.down_proj, 1, 2),
        ):
            whole, part = module.weight.shape, module.weight.to_local().shape
            assert whole == (part[0] * rows, part[1] * columns), (whole, part)
        exact = LOAD(quantized).dequantize().double()(tokens()).logits
        allowed = 2 * (expected - exact).abs().max() + 1e-5 * exact.abs().max()
        error = (model(tokens()).logits - exact).abs().max()
        assert error <= allowed, (error, allowed)
    model.save_pretrained(target)
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(LOAD(target)(tokens()).logits, expected)
    assert "residual stages" in refused(twice)
    assert "experts cannot be split" in refused(experts)
    assert "quantize and save it" in refused(dense, quantization_config=VQConfig())
    print("rank", dist.get_rank(), "is fine", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
