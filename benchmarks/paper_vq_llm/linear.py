"""Linear layer on the kernel that VQ-LLM describes (vq_llm.cu): a baseline, not used by models."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.jit.launch import LoadedKernel

from .plan import VqLlmPlan


class VqLlmArguments(ctypes.Structure):
    """struct Arguments of vq_llm.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("codebook", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
    ]


@functools.lru_cache(maxsize=1024)
def _kernel(plan: VqLlmPlan, ordinal: int) -> LoadedKernel:
    return LoadedKernel(plan, VqLlmArguments, ordinal, default_store())


class PaperLinear:
    """A plan for one layer on the current device, with the memory in which sums of parts meet.

    Args:
        rows: out_features.
        tokens: at most those of the plan.
    """

    def __init__(self, plan: VqLlmPlan, rows: int, tokens: int) -> None:
        ordinal = torch.cuda.current_device()
        self.kernel, self.ordinal = _kernel(plan, ordinal), ordinal
        self.rows, self.tokens, self.blocks = rows, tokens, plan.blocks(rows)
        sums = plan.split * tokens * rows if plan.split > 1 else 0
        self.partial = torch.full((sums,), float("nan"), device="cuda")
        self.arrived = torch.zeros(self.blocks // plan.split, dtype=torch.int32, device="cuda")

    def __call__(
        self,
        x: Tensor,
        tensors: dict[str, Tensor],
        y: Tensor,
        *,
        overlap: bool = False,
    ) -> None:
        """`x` [tokens, in_features] fp16, rotated, times the weight of `tensors`, to `y`
        [tokens, rows] fp16.

        Args:
            overlap: let it begin while the kernel before it runs.
        """
        self.kernel(
            self.blocks,
            torch._C._cuda_getCurrentRawStream(self.ordinal),
            *(tensors[key].data_ptr() for key in ("codes", "codebook", "scale")),
            x.data_ptr(),
            y.data_ptr(),
            self.partial.data_ptr(),
            self.arrived.data_ptr(),
            self.rows,
            x.shape[-1],
            self.tokens,
            dependent=overlap,
        )
