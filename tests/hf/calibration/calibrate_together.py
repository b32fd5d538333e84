"""One of several processes that calibrate a model: torchrun calibrate_together.py <dense> <out>."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_vq.calibration.resume import Unfinished
from hf_vq.errors import VQCalibrationError
from hf_vq.hf import VQConfig, register

ATTENTION = ["mlp", "o_proj", "v_proj"]  # what is left dense, to be quick
EXPERTS = ["self_attn", "layers.0"]


class Killed(BaseException):
    """Stands for SIGKILL."""


def main(dense: str, out: str, experts: str) -> None:
    """Calibrate, stop after a block and go on; save twice."""
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo")
    work, keep = Path(out) / "work", Unfinished.keep

    def calibrated(folder: str, skip: list[str], **options: Any) -> Any:
        calibration = {"text": "model", "tokens": 192, "context": 32, **options}
        config = VQConfig(
            target_bits=3.5,
            candidates=["turboquant-2", "turboquant-4"],
            calibration=calibration,
            modules_to_not_convert=skip,
            seed=1,
        )
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

    def keep_and_die(self: Any, index: int, *arguments: Any) -> None:
        keep(self, index, *arguments)
        raise Killed

    Unfinished.keep = keep_and_die  # type: ignore[method-assign]
    try:
        calibrated(dense, ATTENTION, resume=str(work))
    except Killed:
        Unfinished.keep = keep  # type: ignore[method-assign]
    names = {path.name for path in work.iterdir()}
    assert names >= {"block-0.safetensors", "hidden-1-0.safetensors", "hidden-1-1.safetensors"}
    dist.barrier()
    calibrated(dense, ATTENTION, resume=str(work)).save_pretrained(Path(out) / "resumed")
    dist.barrier()
    assert not list(work.glob("hidden*"))
    calibrated(dense, ATTENTION).save_pretrained(Path(out) / "whole")
    calibrated(experts, EXPERTS).save_pretrained(Path(out) / "experts")
    try:
        calibrated(dense, ATTENTION, tokens=32)
    except VQCalibrationError as error:
        assert "1 sequences cannot be shared by 2 processes" in str(error)
        print("rank", dist.get_rank(), "is fine", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
