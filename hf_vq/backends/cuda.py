"""The rows `cuda.linear` and `cuda.decode`, and what they need.

What runs them (`cuda_linear`, `codegen`) is imported when a tensor on a GPU asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import env
from ..formats.scheme import VQScheme
from ..ops import dispatch


@functools.cache
def needs() -> str | None:
    """None if this machine has GPUs and a compiler for them, else the reason why not."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "no CUDA device"
    from ..codegen import compiler, device

    reason = compiler.why_not()
    if reason:
        return reason
    for ordinal in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(ordinal)
        name = torch.cuda.get_device_name(ordinal)
        if 10 * major + minor < device.OLDEST:
            return f"{name} has compute capability {major}.{minor}, less than 8.0"
        if 10 * major + minor not in compiler.known_targets():
            version = ".".join(map(str, compiler.version()))
            return f"NVRTC {version} does not compile for {name}: install a newer one"
    return None


def asked_for() -> str | None:
    """`needs`; and as long as the kernels have not run on a GPU, somebody who asks for them.

    Nor has `needs` itself looked at a GPU: until somebody asks, it does not.
    """
    asked = env.BACKEND.get().startswith("cuda")
    if torch.version.cuda and torch.cuda.is_available() and not asked:
        return "they have not run on a GPU yet, HF_VQ_BACKEND=cuda asks for them"
    return needs()


def accepts(problem: dispatch.Problem) -> str | None:
    """None if there are kernels for the codes and the rotation, else the reason why not."""
    from ..codegen.choose import decodable, rotatable
    from ..codegen.plan import Dtype

    if problem.op == "linear" and problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"inputs are {problem.dtype}"
    scheme = VQScheme.parse(problem.scheme)
    in_features = problem.k if problem.op == "linear" else problem.n
    return decodable(scheme) or rotatable(scheme, in_features)


def _linear(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cuda_linear

    return cuda_linear.linear(*arguments)  # type: ignore[arg-type]


def _decode(*arguments: Tensor | VQScheme | int | None) -> Tensor:
    from . import cuda_linear

    return cuda_linear.decode(*arguments)  # type: ignore[arg-type]


def register() -> None:
    """Add the rows to the top of the dispatch table."""
    rows: tuple[tuple[str, Callable[..., Tensor]], ...] = (("linear", _linear), ("decode", _decode))
    for op, run in rows:
        kernel = dispatch.Kernel(f"cuda.{op}", op, run, "cuda", asked_for, accepts)
        dispatch.register(kernel, first=True)
