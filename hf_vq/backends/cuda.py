"""The rows that run generated CUDA kernels, and what they need.

What runs them (`cuda_*`, `codegen`) is imported when a tensor on a GPU asks for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..formats.published import VptqLayout
from ..formats.scheme import VQScheme
from ..ops import dispatch, published
from ..ops.library import parse

if TYPE_CHECKING:
    from ..codegen.choose_vptq import VptqProblem


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


def accepts(problem: dispatch.Problem) -> str | None:
    """None if there are kernels for the codes and the rotation, else the reason why not."""
    from ..codegen.choose import decodable, rotatable
    from ..codegen.choose_dense import restorable
    from ..codegen.plan import Dtype

    if problem.op == "linear" and problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"inputs are {problem.dtype}"
    scheme = VQScheme.parse(problem.scheme)
    in_features = problem.k if problem.op == "linear" else problem.n
    if problem.op == "linear" and scheme.stages == "nested":
        return restorable(scheme, in_features, Dtype(problem.dtype))
    return decodable(scheme) or rotatable(scheme, in_features)


def accepts_few(problem: dispatch.Problem) -> str | None:
    """None if the fused kernel computes with the codes, else the reason why not."""
    from ..codegen.choose import rotatable
    from ..codegen.choose_linear import MOST_TOKENS, LinearProblem, choose, fusable
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    if problem.dtype not in ("float16", "bfloat16"):
        return f"inputs are {problem.dtype}"
    if problem.tokens > MOST_TOKENS:
        return f"{problem.tokens} tokens: decoded rows are used often enough"
    scheme = VQScheme.parse(problem.scheme)
    reason = fusable(scheme, problem.k) or rotatable(scheme, problem.k)
    if reason:
        return reason
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    tokens = problem.tokens if problem.tokens == 1 else max(problem.tokens, 8)
    if choose(LinearProblem(scheme, tokens, problem.n, problem.k, dtype, arch)) is None:
        return f"no plan for {problem.tokens} tokens: shared memory or registers do not suffice"
    return None


def accepts_rows(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that finds the codes of rows, else the reason why not."""
    from ..codegen.choose_encode import encodable
    from ..codegen.device import device_arch

    arch = device_arch(torch.cuda.current_device())
    return encodable(VQScheme.parse(problem.scheme), problem.k, arch)


def accepts_rotation(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel for the rotation, else the reason why not."""
    from ..codegen.choose import rotatable
    from ..codegen.plan import Dtype

    if problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"numbers are {problem.dtype}"
    return rotatable(VQScheme.parse(problem.scheme), problem.k)


def several_kinds() -> bool:
    """Whether there are GPUs for which kernels are compiled differently."""
    from ..codegen.device import device_arch

    return len({device_arch(ordinal).name for ordinal in range(torch.cuda.device_count())}) > 1


def accepts_many(problem: dispatch.Problem) -> str | None:
    """None if the kernel for many tokens computes with the codes, else the reason why not."""
    from ..codegen.choose import rotatable
    from ..codegen.choose_linear import LinearProblem
    from ..codegen.choose_wide import MOST_TOKENS, choose, fewest_tokens, token_bucket, wide
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    if problem.dtype not in ("float16", "bfloat16"):
        return f"inputs are {problem.dtype}"
    scheme = VQScheme.parse(problem.scheme)
    if problem.tokens < fewest_tokens(scheme):
        return f"{problem.tokens} tokens are few"
    if problem.tokens > MOST_TOKENS:
        return f"{problem.tokens} tokens: decoded rows are used often enough"
    if several_kinds():
        return "there are GPUs of several kinds"
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    reason = wide(scheme, problem.k, arch) or rotatable(scheme, problem.k)
    if reason:
        return reason
    tokens = token_bucket(problem.tokens)
    if choose(LinearProblem(scheme, tokens, problem.n, problem.k, dtype, arch)) is None:
        return f"no plan for {problem.tokens} tokens: shared memory or registers do not suffice"
    return None


def accepts_tiles(problem: dispatch.Problem) -> str | None:
    """None if the kernel for codebooks of tiles takes the codes, else the reason why not."""
    from ..codegen.choose import rotatable
    from ..codegen.choose_linear import LinearProblem, token_bucket
    from ..codegen.choose_tiles import MOST_LAUNCHES, MOST_TOKENS, choose, tiled
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    if problem.dtype not in ("float16", "bfloat16"):
        return f"inputs are {problem.dtype}"
    if problem.tokens > MOST_LAUNCHES * MOST_TOKENS:
        return f"{problem.tokens} tokens: decoded rows are used often enough"
    if several_kinds():
        return "there are GPUs of several kinds"
    scheme = VQScheme.parse(problem.scheme)
    reason = tiled(scheme, problem.k) or rotatable(scheme, problem.k)
    if reason:
        return reason
    arch, dtype = device_arch(torch.cuda.current_device()), Dtype(problem.dtype)
    tokens = token_bucket(min(problem.tokens, MOST_TOKENS))
    if choose(LinearProblem(scheme, tokens, problem.n, problem.k, dtype, arch)) is None:
        return f"no plan for {problem.tokens} tokens: shared memory or registers do not suffice"
    return None


def accepts_vptq(problem: dispatch.Problem) -> str | None:
    """None if there is a kernel that decodes VPTQ's codes, else the reason why not."""
    from ..codegen.choose_vptq import decodable
    from ..codegen.plan import Dtype

    layout = published.parse(problem.scheme)
    if not isinstance(layout, VptqLayout):
        return f"kernels know VPTQ's layout, not that of {layout.name()}"
    if problem.dtype not in {dtype.value for dtype in Dtype}:
        return f"inputs are {problem.dtype}"
    return decodable(layout)


def accepts_vptq_few(problem: dispatch.Problem) -> str | None:
    """None if the fused kernel multiplies with VPTQ's codes, else the reason why not."""
    from ..codegen.choose_vptq import MOST_TOKENS, choose, fusable

    reason = accepts_vptq(problem)
    if reason:
        return reason
    if problem.tokens > MOST_TOKENS:
        return f"{problem.tokens} tokens: decoded rows are used often enough"
    asked = _vptq_problem(problem)
    reason = fusable(asked.layout, asked.dtype)
    if reason is None and choose(asked) is None:
        return "no plan: shared memory or registers do not suffice"
    return reason


def _vptq_problem(problem: dispatch.Problem) -> VptqProblem:
    from ..codegen.choose_vptq import VptqProblem
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    layout, tokens = published.parse(problem.scheme), 16 if problem.tokens > 8 else 8
    assert isinstance(layout, VptqLayout)
    arch = device_arch(torch.cuda.current_device())
    return VptqProblem(layout, tokens, problem.n, Dtype(problem.dtype), arch)


def slower_than_dense(problem: dispatch.Problem) -> str | None:
    """What to say of a layer that a GPU multiplies by a dense bfloat16 weight in less time."""
    from ..codegen import choose, choose_linear, choose_vptq
    from ..codegen.device import device_arch
    from ..codegen.plan import Dtype

    if problem.tokens > 1:
        return None
    arch, lookups = device_arch(torch.cuda.current_device()), 0.0
    if problem.op == "published_linear":
        asked = _vptq_problem(problem)
        if (plan := choose_vptq.choose(asked)) is not None:
            lookups = choose_vptq.l2_lookups(plan, asked)
    else:
        scheme, dtype = VQScheme.parse(problem.scheme), Dtype(problem.dtype)
        few = choose_linear.LinearProblem(scheme, 1, problem.n, problem.k, dtype, arch)
        chosen = choose_linear.choose(few)
        if chosen is not None and not chosen.in_shared:
            lookups = problem.n * problem.k / scheme.vector_size * scheme.streams
    if choose.times_dense(lookups, problem.n, problem.k, arch) <= 1:
        return None
    return (
        "entries of a codebook this large are looked up in L2, which takes longer than reading a "
        "bfloat16 weight: on this GPU these codes save memory, not time; `hf-vq convert "
        "--requantize vq-2` makes a model that saves both"
    )


def _fused(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cuda_fused

    x, codes, codebook, scale, rotation, codes_2, codebook_2, *_, bias, scheme = arguments
    if codes_2 is not None:  # nested: one table for both
        codebook = codebook_2
    return cuda_fused.linear(x, codes, codebook, scale, rotation, bias, scheme, codes_2)  # type: ignore[arg-type]


def _wide(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cuda_wide

    x, codes, codebook, scale, rotation, *_second_pass, bias, scheme = arguments
    return cuda_wide.linear(x, codes, codebook, scale, rotation, bias, scheme)  # type: ignore[arg-type]


def _tiles(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cuda_tiles

    x, codes, codebook, scale, rotation, *_second_pass, bias, scheme = arguments
    return cuda_tiles.linear(x, codes, codebook, scale, rotation, bias, scheme)  # type: ignore[arg-type]


def _direct(problem: dispatch.Problem) -> dispatch.Direct | None:
    from . import cuda_direct

    scheme = parse(problem.scheme)
    return None if scheme.two_passes else cuda_direct.direct(problem, scheme)


def _direct_tiles(problem: dispatch.Problem) -> dispatch.Direct:
    """Eager calls without gradients leave out the dispatcher."""
    from . import cuda_tiles

    scheme, linear = parse(problem.scheme), cuda_tiles.linear

    def run(
        x: Tensor,
        codes: Tensor,
        codebook: Tensor,
        scale: Tensor,
        rotation: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return linear(x, codes, codebook, scale, rotation, bias, scheme)

    return run


def _together(*arguments: Any) -> list[Tensor]:
    from . import cuda_fused

    return cuda_fused.linears(*arguments)


def _linear(*arguments: Tensor | VQScheme | None) -> Tensor:
    from . import cuda_linear

    return cuda_linear.linear(*arguments)  # type: ignore[arg-type]


def _decode(*arguments: Tensor | VQScheme | int | None) -> Tensor:
    from . import cuda_linear

    return cuda_linear.decode(*arguments)  # type: ignore[arg-type]


def _rotate(x: Tensor, rotation: Tensor | None, scheme: VQScheme, inverse: bool) -> Tensor:
    from . import cuda_linear

    return cuda_linear.rotate(x, rotation, scheme, inverse)


def _vptq_few(*arguments: Any) -> Tensor:
    from . import cuda_vptq

    return cuda_vptq.linear_few(*arguments)


def _vptq_many(*arguments: Any) -> Tensor:
    from . import cuda_vptq

    return cuda_vptq.linear_many(*arguments)


def _encode_weight(
    rows: Tensor, codebook: Tensor, scheme: VQScheme, factors: tuple[float, ...], refit: bool
) -> tuple[Tensor, Tensor]:
    from . import cuda_encode

    return cuda_encode.encode_weight(rows, codebook, scheme, factors, refit)


def register() -> None:
    """Add the rows to the top of the dispatch table."""
    rows = (
        dispatch.Kernel("cuda.rotate", "rotate", _rotate, "cuda", needs, accepts_rotation),
        dispatch.Kernel(
            "cuda.encode_weight", "encode_weight", _encode_weight, "cuda", needs, accepts_rows
        ),
        dispatch.Kernel("cuda.decode", "decode", _decode, "cuda", needs, accepts),
        dispatch.Kernel("cuda.linear", "linear", _linear, "cuda", needs, accepts),
        dispatch.Kernel(
            "cuda.fused_linear",
            "linear",
            _fused,
            "cuda",
            needs,
            accepts_few,
            direct=_direct,
            together=_together,
            remark=slower_than_dense,
        ),
        dispatch.Kernel(
            "cuda.vptq_decoded", "published_linear", _vptq_many, "cuda", needs, accepts_vptq
        ),
        dispatch.Kernel(
            "cuda.vptq_linear",
            "published_linear",
            _vptq_few,
            "cuda",
            needs,
            accepts_vptq_few,
            remark=slower_than_dense,
        ),
        dispatch.Kernel("cuda.wide_linear", "linear", _wide, "cuda", needs, accepts_many),
        dispatch.Kernel(
            "cuda.tile_linear", "linear", _tiles, "cuda", needs, accepts_tiles, direct=_direct_tiles
        ),
    )
    for row in rows:
        dispatch.register(row, first=True)
