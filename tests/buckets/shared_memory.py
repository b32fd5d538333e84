"""What kernels find in shared memory: a number that they read before they write it shows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import checked, device_arch

NAN, LARGE = 0x7FC07FC0, 0x5BD05BD0
"""A word that is no number as float32, and as two fp16 or bfloat16; and one that is large."""
_THREADS = 1024
_SOURCE = """
extern "C" __global__ void fill(unsigned word, int words) {
  extern __shared__ unsigned shared[];
  volatile unsigned* const to = shared;
  for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = word;
}
"""


def fill(word: int, device: torch.device) -> None:
    """Fill the shared memory of every multiprocessor with a word, behind what the stream holds."""
    from cuda.bindings import driver

    ordinal = device.index or 0
    arch, function = device_arch(ordinal), _kernel(ordinal)
    stream = torch.cuda.current_stream(device).cuda_stream
    # A block takes all of a multiprocessor, so there is one on each.
    nbytes = arch.shared_per_block
    values = (word, nbytes // 4)
    checked(driver.cuLaunchKernel(
        function, arch.sms, 1, 1, _THREADS, 1, 1, nbytes, stream,
        (values, (ctypes.c_uint, ctypes.c_int)), 0,
    ))  # fmt: skip


@functools.cache
def _kernel(ordinal: int) -> Any:
    from cuda.bindings import driver

    arch = device_arch(ordinal)
    image, _ = compiler.compile_source(_SOURCE, "fill.cu", {}, arch.name)
    torch.zeros(1, device=f"cuda:{ordinal}")  # its context is the current one
    module = checked(driver.cuModuleLoadData(image))[0]
    function = checked(driver.cuModuleGetFunction(module, b"fill"))[0]
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, most, arch.shared_per_block))
    return function
