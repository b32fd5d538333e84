"""The CUDA kernels of the package `aqlm` (its authors' own), compiled from the installed source.

The package builds an extension with nvcc when it is first used. Here NVRTC compiles the unchanged
kernels of that file with the headers of Triton. They are launched like in the package (`*_matmat`
and `*_matmat_dequant` of its `cuda_kernel.cpp`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_vq.codegen.jit.compiler import compile_source
from hf_vq.codegen.jit.device import checked, device_arch
from hf_vq.errors import VQBackendError

_MOST_WARPS = 16  # THREAD_M: warps of a block, a row each
_SHARED = {  # bytes that the package asks for
    "Code2x8MatVec": 16 * (2 * 256 * 8 + 32 * 9), "Code2x8Dequant": 16 * (2 * 256 * 8 + 32 * 9),
    "Code1x16MatVec": 16 * 32 * 9, "Code1x16Dequant": 0,
}  # fmt: skip
_INSTANCES = """
using In = const int4*; using Out = int4*;
template __global__ void Code2x8MatVec<true>(In, In, Out, In, int, int);
template __global__ void Code2x8Dequant<true>(In, Out, In, int, int);
template __global__ void Code1x16MatVec<true, 8>(In, In, Out, In, int, int);
template __global__ void Code1x16Dequant<8>(In, Out, In, int, int);
"""
_TYPES = """
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned int;
"""
_Launch = Callable[..., None]


def version() -> str | None:
    """Version of the installed package, None without it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of("aqlm")
    except PackageNotFoundError:
        return None


def device_source(text: str) -> str:
    """The kernels of the package's `cuda_kernel.cu`, without what only a host compiler reads.

    Raises:
        VQBackendError: the file is not the one that is known.
    """
    kernels, found, _ = text.partition("inline int ceildiv")
    if not found:
        raise VQBackendError("this version of aqlm is not known: pip install aqlm==1.1.7.")
    kept = re.sub(r"#include <(c10|cuda\.h|cuda_runtime\.h).*", "", kernels)
    return _TYPES + kept + _INSTANCES


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise VQBackendError(f"the package {package} is missing: pip install {package}.")
    return Path(spec.origin).parent


@functools.cache
def _kernel(name: str) -> _Launch:
    """(rows, *addresses, prob_m, prob_k) -> launch on the current stream."""
    from cuda.bindings import driver

    ordinal = torch.cuda.current_device()
    arch = device_arch(ordinal)
    (function,) = checked(driver.cuModuleGetFunction(_module(), _symbols()[name]))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, attribute, _SHARED[name]))

    def launch(*addresses: int, rows: int, columns: int) -> None:
        waves = -(-rows // (_MOST_WARPS * arch.sms))
        warps = -(-rows // (waves * arch.sms))
        values = (*addresses, rows, columns)
        types = (*[ctypes.c_void_p] * len(addresses), ctypes.c_int, ctypes.c_int)
        checked(driver.cuLaunchKernel(
            function, -(-rows // warps), 1, 1, 32 * warps, 1, 1, _SHARED[name],
            torch._C._cuda_getCurrentRawStream(ordinal), (values, types), 0,
        ))  # fmt: skip

    return launch


@functools.cache
def _image() -> bytes:
    source = _folder("aqlm") / "inference_kernels" / "cuda_kernel.cu"
    includes = _folder("triton") / "backends" / "nvidia" / "include"
    arch = device_arch(torch.cuda.current_device()).name
    text = device_source(source.read_text(encoding="utf-8"))
    options = ("--std=c++17", f"-I{includes}")
    return compile_source(text, "aqlm.cu", {}, arch, options=options)[0]


@functools.cache
def _module() -> object:
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # there is a context
    return checked(driver.cuModuleLoadData(_image()))[0]


def _symbols() -> dict[str, bytes]:
    return {name: mangled(_image(), name) for name in _SHARED}


def mangled(image: bytes, name: str) -> bytes:
    """The name of a kernel's one instance in machine code."""
    match = re.search(rb"_Z\d+" + name.encode() + rb"I\w+", image)
    assert match is not None
    return match[0]


class Layer:
    """A weight in the package's format, in bfloat16, and both ways in which it computes with it.

    Args:
        codes: 2x8: uint8 [out, in / 8, 2]; 1x16: uint16 or int16 [out, in / 8, 1].
        codebooks: [books, entries, 8].
        scales: [out].
    """

    def __init__(self, codes: Tensor, codebooks: Tensor, scales: Tensor) -> None:
        self.codes, self.codebooks = codes.contiguous(), codebooks.to(torch.bfloat16).contiguous()
        self.scales = scales.to(torch.bfloat16)
        self.kind = "2x8" if codes.shape[-1] == 2 else "1x16"
        self.rows, self.columns = codes.shape[0], 8 * codes.shape[1]

    def looped(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]: a launch for every token, then the scales, then a copy."""
        out = self.products(x)
        out *= self.scales
        return out.clone()

    def products(self, x: Tensor) -> Tensor:
        """The launches of `looped` alone: what is left out are two small kernels."""
        out, kernel = x.new_empty(len(x), self.rows), _kernel(f"Code{self.kind}MatVec")
        for token, y in zip(x, out, strict=True):
            kernel(
                self.codes.data_ptr(), token.data_ptr(), y.data_ptr(), self.codebooks.data_ptr(),
                rows=self.rows, columns=self.columns,
            )  # fmt: skip
        return out

    def dequantized(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]: the dense weight, a product, the scales, a copy."""
        weight = x.new_empty(self.rows, self.columns)
        _kernel(f"Code{self.kind}Dequant")(
            self.codes.data_ptr(), weight.data_ptr(), self.codebooks.data_ptr(),
            rows=self.rows, columns=self.columns,
        )  # fmt: skip
        out = torch.nn.functional.linear(x, weight)
        out *= self.scales
        return out.clone()
