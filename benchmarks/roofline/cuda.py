"""Reading bytes and nothing else, on a GPU: the time that no kernel undercuts that needs them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.jit.launch import LoadedKernel
from hf_vq.codegen.plan import Plan

from ..cuda.timing import cold_copies
from ..timing import Candidate


@dataclass(frozen=True)
class ReadPlan(Plan):
    """Bytes that are read for nothing (read.cu).

    Args:
        steps: words of 16 bytes that a thread has in flight.
    """

    template: ClassVar[str] = "read"
    template_folder: ClassVar[Path | None] = Path(__file__).parent
    steps: int


PLANS = tuple(
    ReadPlan(threads=threads, blocks_per_sm=resident, steps=steps)
    for threads, resident, steps in ((512, 2, 4), (512, 2, 8), (1024, 2, 2), (1024, 1, 8))
)


class ReadArguments(ctypes.Structure):
    """`struct Arguments` of read.cu, field by field."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("never", ctypes.c_void_p),
        ("words", ctypes.c_int64),
    )


def reading(nbytes: int, plan: ReadPlan) -> Candidate:
    """Reads of `nbytes` bytes that no cache holds, in grids that overlap as ours do."""
    ordinal = torch.cuda.current_device()
    kernel = LoadedKernel(plan, ReadArguments, ordinal, default_store())
    words = -(-nbytes // 16)
    buffers = [
        torch.zeros(4 * words, dtype=torch.int32, device="cuda") for _ in range(cold_copies(nbytes))
    ]
    never = torch.empty(1, dtype=torch.int32, device="cuda")
    blocks = min(device_arch(ordinal).sms * plan.blocks_per_sm, -(-words // plan.threads))

    def call(i: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(ordinal)
        kernel(blocks, stream, buffers[i].data_ptr(), never.data_ptr(), words, dependent=True)

    return Candidate(call, len(buffers))
