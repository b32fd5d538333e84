"""Cases of the kernels for weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from cases import FLOATS, Case, close, covering, decoded, stored

from benchmarks.paper_vq_llm.linear import PaperLinear
from benchmarks.paper_vq_llm.mechanisms import plans_of
from benchmarks.paper_vq_llm.plan import VqLlmPlan
from hf_vq.backends.cuda import encode as cuda_encode
from hf_vq.backends.cuda.linear import dequantize as cuda_linear
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear import tile_codebook as cuda_tiles
from hf_vq.backends.cuda.linear import wgmma as cuda_wide
from hf_vq.codegen.families import dequantize as choose
from hf_vq.codegen.families import dequantize_rotated as choose_dense
from hf_vq.codegen.families import linear as choose_linear
from hf_vq.codegen.families import linear_tile_codebook as choose_tiles
from hf_vq.codegen.families import linear_wgmma as choose_wide
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.codegen.jit.launch import LoadedKernel
from hf_vq.codegen.plan import DecodePlan, Dtype, LinearPlan, TilePlan, WidePlan
from hf_vq.formats import VQScheme, weight_scheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.reference import codes as reference
from hf_vq.ops.reference.encode_weight import FACTORS, Assigner

PRODUCTS = [  # scheme, columns
    ("vq-4", 1536), ("turboquant-4", 1152), ("vq-3", 1152), ("aqlm-2", 1152), ("aqlm-3", 1152),
    ("aqlm-2-int7", 1536), ("aqlm-3-int7", 1152), ("quip-sharp-2", 1152), ("quip-sharp-4", 1280),
    ("vq8x16r1-tensor-g0-none", 1024), ("vq2x8r1-tensor-g32-none", 1152),
    ("vq2x8r1-tensor-g0-none", 1160), ("vq4x8r1-universal-g64-random_hadamard64", 1088),
    ("vq16x8r1-tensor-g0-none", 1024), ("vq1x2r2-tensor-g128-none", 1024),
]  # fmt: skip
TILES = [  # scheme, columns
    ("gptvq-2", 1152), ("gptvq-2", 2048), ("vq2x8r1-tile128x128-g0-none", 320),
    ("vq4x8r1-tile256x256-g0-random_hadamard128", 1024), ("vq16x8r1-tile256x512-g0-none", 1024),
]  # fmt: skip
PAPER = [  # scheme, rows, columns
    ("vq4x8r1-universal-g128-none", 130, 1152), ("aqlm-2", 130, 1024), ("aqlm-3", 70, 1024),
    ("gptvq-2", 300, 1024),
]  # fmt: skip
FEW, MANY = (1, 7, 29, 64), (75, 270)  # tokens
DECODED = [  # scheme, rows, columns
    ("vq-4", 130, 1152), ("aqlm-3", 65, 640), ("aqlm-3-int7", 65, 640), ("quip-sharp-4", 70, 640),
    ("vq1x3r1-tensor-g0-none", 7, 77), ("vq4x8r1-tile24x20-g0-none", 50, 92),
    ("vq16x9r4-tensor-g128-none", 30, 384), ("vq8x16r1-tensor-g0-none", 30, 512),
    ("vq4x4r4-tensor-int7-g0-none", 7, 640),
]  # fmt: skip
ENCODED = [  # scheme, rows, columns
    ("vq-4", 37, 1152), ("turboquant-4", 37, 1152), ("quip-sharp-2", 9, 640),
    ("quip-sharp-4", 9, 640), ("aqlm-2", 9, 1280), ("vq4x6r1-tensor-g0-none", 9, 4480),
    ("vq1x3r1-tensor-g16-none", 7, 48), ("vq8x12r1-tensor-g128-none", 5, 256),
    ("vq2x1r1-tensor-g32-none", 9, 160), ("vq4x5r2-tensor-g64-none", 7, 256),
]  # fmt: skip
BLOCKS = (2, 4, 8, 32, 128, 256, 1024)  # of rotations


def few_tokens() -> Iterator[Case]:
    """Plans of linear.cu."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in FEW}
    for n, ((name, columns), tokens) in enumerate(product(PRODUCTS, FEW)):
        scheme, dtype = weight_scheme(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
        problem = LinearProblem(scheme, tokens, 4096, columns, dtype, device_arch(0))
        for plan in covering(choose_linear.best(problem), seen[tokens]):
            teams = plan.threads // 32 // plan.split_k_warps
            rows = 3 * teams * plan.row_tiles * choose_linear.TILE_ROWS - 3
            yield (
                f"linear {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply, plan, scheme, tokens, rows, columns),
            )


def many_tokens() -> Iterator[Case]:
    """Plans of linear_wgmma.cu."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in MANY}
    for n, ((name, columns), tokens) in enumerate(product(PRODUCTS, MANY)):
        scheme, dtype = weight_scheme(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
        problem = LinearProblem(scheme, tokens, 4096, columns, dtype, device_arch(0))
        if choose_wide.wide(scheme, columns, problem.arch) is None:
            for plan in covering(choose_wide.best(problem), seen[tokens]):
                rows = 2 * 64 * plan.warpgroups - 3
                yield (
                    f"wide {tokens} x {rows} x {columns} {name} {plan}",
                    partial(multiply, plan, scheme, tokens, rows, columns),
                )


def tiled() -> Iterator[Case]:
    """Plans of linear_tile_codebook.cu."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in FEW}
    for n, ((name, columns), tokens) in enumerate(product(TILES, FEW)):
        scheme, dtype = weight_scheme(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
        problem = LinearProblem(scheme, tokens, 4096, columns, dtype, device_arch(0))
        for plan in covering(choose_tiles.best(problem), seen[tokens]):
            rows = 2 * plan.band - 3
            yield (
                f"tiles {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply, plan, scheme, tokens, rows, columns),
            )


def of_the_paper() -> Iterator[Case]:
    """Plans of vq_llm.cu."""
    for (name, rows, columns), tokens in product(PAPER, (1, 7)):
        scheme = weight_scheme(name)
        plans = plans_of(scheme, device_arch(0), rows, columns, tokens)
        for plan in covering(plans.values(), set()):
            yield (
                f"paper {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply_as_published, plan, scheme, tokens, rows, columns),
            )


def multiply_as_published(
    plan: VqLlmPlan, scheme: VQScheme, tokens: int, rows: int, columns: int
) -> None:
    """Two launches."""
    here, there = stored(scheme, rows, columns)
    x = torch.randn(tokens, columns).half()
    moved, layer = x.cuda(), PaperLinear(plan, rows, tokens)
    outputs = [torch.full((tokens + 1, rows), float("nan")).half().cuda() for _ in range(2)]
    for y in outputs:
        layer(moved, there, y[:tokens])
    for y in outputs:
        close(y, x.double() @ decoded(here, scheme, columns).T, 2.0**-6)


def multiply(
    plan: LinearPlan | TilePlan | WidePlan, scheme: VQScheme, tokens: int, rows: int, columns: int
) -> None:
    """Two launches, of which the second may begin before the first has ended. They have one
    block, or cluster, which has several tiles (of
    linear_tile_codebook.cu, as many as rows need)."""
    dtype, arch = FLOATS[plan.dtype], device_arch(0)
    if isinstance(plan, LinearPlan):
        launch = cuda_fused.prepare(plan, scheme, (rows,), columns, dtype, 0)
        if plan.cluster_size == 1:  # else clusters have one turn
            launch.blocks = (1,)
    elif isinstance(plan, TilePlan):
        launch = cuda_tiles.prepare(plan, scheme, rows, columns, dtype, 0)
    else:
        launch = cuda_wide.prepare(plan, scheme, rows, columns, tokens, dtype, 0)
        if plan.split_k_warps == 1:
            launch.blocks = (choose_wide.blocks(plan, 1, 1, arch),)  # one cluster
    here, there = stored(scheme, rows, columns)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    weight, added, moved = StoredWeight.of(there, scheme, columns), bias.cuda(), x.cuda()
    outputs = [torch.full((tokens + 1, rows), float("nan"), dtype=dtype).cuda() for _ in range(2)]
    for y in outputs:
        cuda_fused.run(moved, (weight,), (added,), (y[:tokens],), 0, launch)
    inputs = reference.rotate(x.double(), rotation_of(here), scheme, False)
    for y in outputs:
        close(y, inputs @ decoded(here, scheme, columns).T + bias.double(), 2.0**-6)


def several_matrices() -> Iterator[Case]:
    """linear.cu with matrices that have one input, but separate signs and learned codebooks."""
    for name, tokens in product(("vq-4", "aqlm-2", "quip-sharp-2"), (1, 29)):
        yield f"together {tokens} {name}", partial(together, weight_scheme(name), tokens)


def together(scheme: VQScheme, tokens: int, columns: int = 1152) -> None:
    """One launch."""
    layers = [stored(scheme, rows, columns) for rows in (130, 7, 33)]
    x = torch.randn(tokens, columns).half()
    weights = [StoredWeight.of(there, scheme, columns) for _, there in layers]
    found = cuda_fused.grouped(x.cuda(), weights, [None] * 3)
    for (here, _), y in zip(layers, found, strict=True):
        exact = reference.rotate(x.double(), rotation_of(here), scheme, False)
        beyond = torch.full((1, y.shape[1]), float("nan"))
        close(torch.cat((y.cpu(), beyond)), exact @ decoded(here, scheme, columns).T, 2.0**-6)


def dense_rows() -> Iterator[Case]:
    """Plans of dequantize.cu."""
    seen: set[tuple[str, Any]] = set()
    for n, (name, rows, columns) in enumerate(DECODED):
        scheme, out = weight_scheme(name), list(FLOATS)[n % 3]
        problem = choose.DecodeProblem(scheme, rows, columns, out, device_arch(0))
        plans = [p for p in choose.candidates(problem) if choose.feasible(p, problem) is None]
        for plan in covering(plans, seen):
            yield (
                f"decode {rows} x {columns} {name} {plan}",
                partial(decode, plan, scheme, rows, columns),
            )


def decode(plan: DecodePlan, scheme: VQScheme, rows: int, columns: int) -> None:
    """One launch."""
    here, there = stored(scheme, rows, columns)
    codes, codebook, scale = (there[key] for key in ("codes", "codebook", "scale"))
    ready = cuda_linear.DeviceWeight(codes, codebook, scale, scheme, columns)  # pads codes
    out = torch.full((rows + 1, columns), float("nan"), dtype=FLOATS[plan.out]).cuda()
    pointers = (t.data_ptr() for t in (ready.codes, ready.codebook, ready.scale, out))
    kernel = LoadedKernel(plan, cuda_linear.DecodeArguments, 0, default_store())
    stream = torch.cuda.current_stream().cuda_stream
    kernel(choose.panels(plan, rows, columns), stream, *pointers, 0, rows, columns)
    close(out, decoded(here, scheme, columns), 2.0**-7)


def rows_rotated_back() -> Iterator[Case]:
    """Plans of dequantize_rotated.cu."""
    for n, (name, columns) in enumerate(PRODUCTS):
        scheme, dtype = weight_scheme(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
        if choose_dense.restorable(scheme, columns, dtype) is None:
            yield (
                f"dense {columns} {name} {dtype}",
                partial(restore, scheme, columns, FLOATS[dtype]),
            )


def restore(scheme: VQScheme, columns: int, dtype: torch.dtype) -> None:
    """Two launches, for some rows each."""
    here, there = stored(scheme, 301, columns)
    codes, codebook, scale = (there[key] for key in ("codes", "codebook", "scale"))
    ready = cuda_linear.DeviceWeight(codes, codebook, scale, scheme, columns)
    out = torch.full((302, columns), float("nan"), dtype=dtype).cuda()
    for rows in (slice(0, 256), slice(256, 301)):
        ready.restore(rows.start, rotation_of(there), out[rows])
    exact = reference.rotate(decoded(here, scheme, columns), rotation_of(here), scheme, True)
    close(out, exact, 2.0**-7)


def rotations() -> Iterator[Case]:
    """Blocks of all ways through rotate.cu; those that arrange x run before every product."""
    for n, (block, inverse) in enumerate(product(BLOCKS, (False, True))):
        kind, dtype = ("random_hadamard", "hadamard")[n % 2], list(FLOATS.values())[n % 3]
        scheme = VQScheme(1, 4, rotation=kind, rotation_block=block, scale_group=0)
        columns = max(8, 3 * block)
        yield (
            f"rotate {columns} {scheme.spec()} {dtype} {inverse}",
            partial(rotate, scheme, columns, dtype, inverse),
        )


def rotate(scheme: VQScheme, columns: int, dtype: torch.dtype, inverse: bool) -> None:
    """One launch."""
    x, signs = torch.randn(37, columns).to(dtype), None
    if scheme.rotation == "random_hadamard":
        signs = torch.randint(256, (-(-columns // 8),), dtype=torch.uint8)
    out = torch.full((38, columns), float("nan")).cuda()
    moved = None if signs is None else signs.cuda()
    cuda_linear._rotate(x.cuda(), moved, scheme, out[:37], inverse)
    close(out, reference.rotate(x.double(), signs, scheme, inverse), 2.0**-18)


def codes_and_scales() -> Iterator[Case]:
    """Plans of encode.cu."""
    for (name, rows, columns), factors in product(ENCODED, ((1.0,), FACTORS)):
        yield (
            f"encode {rows} x {columns} {name} {len(factors)}",
            partial(encode, weight_scheme(name), rows, columns, factors),
        )


def encode(scheme: VQScheme, rows: int, columns: int, factors: tuple[float, ...]) -> None:
    """One launch, which fits scales to codes where it tries several."""
    here, there = stored(scheme, rows, columns)
    values, refit = torch.randn(rows, columns), len(factors) > 1
    given = (values.cuda(), there["codebook"], scheme, factors, refit)
    codes, scale = cuda_encode.encode_weight(*given)
    found = {"codes": codes.cpu(), "codebook": here["codebook"], "scale": scale.cpu()}
    error = ((decoded(found, scheme, columns) - values).norm() / values.norm()).item()
    assert error < 1.4, f"relative error {error}"  # that of any rows of the same size


def rounded_rows() -> Iterator[Case]:
    """Plans of round_rows.cu."""
    for (name, rows, _), size in product(ENCODED, (16, 128)):
        yield (
            f"round {rows} x {3 * size} {name}",
            partial(round_rows, weight_scheme(name), rows, size),
        )


def round_rows(scheme: VQScheme, rows: int, size: int) -> None:
    """One launch; no errors are passed on, so that codes are of the nearest entries."""
    _, there = stored(scheme, rows, 3 * size)
    values, scale = torch.randn(rows, 3 * size).cuda(), torch.ones(rows, 3).half().cuda()
    feedback = torch.zeros(3, size, size).cuda()
    codes = cuda_encode.round_weight(values, scale, there["codebook"], scheme, feedback)
    entries = Assigner(there["codebook"], scheme).entries(codes.flatten(0, 1).long())
    error = ((entries.view_as(values) - values).norm() / values.norm()).item()
    assert error < 1.2, f"relative error {error}"  # 1.0 with two random entries


MAKERS = {"linear_wgmma": many_tokens, "linear": few_tokens, "together": several_matrices,
          "linear_tile_codebook": tiled, "paper": of_the_paper, "dequantize": dense_rows,
          "dequantize_rotated": rows_rotated_back,
          "rotate": rotations, "encode": codes_and_scales, "round_rows": rounded_rows}  # fmt: skip
