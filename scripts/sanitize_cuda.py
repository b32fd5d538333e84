#!/usr/bin/env python3
"""Run every generated CUDA kernel under compute-sanitizer: memcheck, racecheck.

    python scripts/sanitize_cuda.py [--tools none memcheck racecheck] [--kernels linear wide ..]

Problems are small, but each loop takes several turns, rows and tokens do not fill their tiles, and
plans are as many as it takes to meet every value of every field of a plan. They are dealt out to
processes. First these run without a tool ("none"), which compiles kernels into the store
(HF_VQ_STORE); then under each tool. What is computed is always compared with float64. Exit status
1, and the output of a process, where a tool reports anything, a result is wrong, or a process takes
more seconds than allowed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor

from hf_vq.backends import (
    cuda_append,
    cuda_encode,
    cuda_fused,
    cuda_linear,
    cuda_prefill,
    cuda_store,
    cuda_tiles,
    cuda_wide,
)
from hf_vq.backends.attention_maths import Maths
from hf_vq.bench.cpu_linear import random_tensors
from hf_vq.bench.cuda_mechanisms import plans_of
from hf_vq.bench.paper_kernel import PaperLinear
from hf_vq.codegen import choose, choose_dense, choose_linear, choose_tiles, choose_wide
from hf_vq.codegen.choose_linear import LinearProblem
from hf_vq.codegen.device import device_arch
from hf_vq.codegen.launch import Kernel
from hf_vq.codegen.plan import DecodePlan, Dtype, LinearPlan, Plan, TilePlan, WidePlan
from hf_vq.codegen.store import default_store
from hf_vq.codegen.vq_llm import VqLlmPlan
from hf_vq.fit.scale import FACTORS
from hf_vq.formats import KV_SCHEMES, VQScheme, weight_scheme
from hf_vq.formats.packing import packed_size
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec
from hf_vq.ops import reference, static_reference
from hf_vq.ops.codes import rotation_of

Case = tuple[str, Callable[[], None]]
FLOATS = {Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16,
          Dtype.FLOAT32: torch.float32}  # fmt: skip
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


def covering(plans: Iterable[Plan], seen: set[tuple[str, Any]]) -> Iterator[Plan]:
    """Plans that have a value of a field which none before them had, in an arbitrary order."""
    plans = sorted(plans, key=repr)
    for plan in random.Random(0).sample(plans, len(plans)):
        values = {(field.name, getattr(plan, field.name)) for field in fields(plan)}
        if not values <= seen:
            seen |= values
            yield plan


def stored(
    scheme: VQScheme, rows: int, columns: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors of a layer, here and on the GPU. What the GPU gets is copied: tools would look
    at every kernel of PyTorch, too."""
    tensors = random_tensors(scheme, rows, columns)
    return tensors, {key: tensor.cuda() for key, tensor in tensors.items()}


def few_tokens() -> Iterator[Case]:
    """Plans of linear.cu."""
    seen: dict[int, set[tuple[str, Any]]] = {tokens: set() for tokens in FEW}
    for n, ((name, columns), tokens) in enumerate(product(PRODUCTS, FEW)):
        scheme, dtype = weight_scheme(name), (Dtype.FLOAT16, Dtype.BFLOAT16)[n % 2]
        problem = LinearProblem(scheme, tokens, 4096, columns, dtype, device_arch(0))
        for plan in covering(choose_linear.best(problem), seen[tokens]):
            teams = plan.threads // 32 // plan.split
            rows = 3 * teams * plan.row_tiles * choose_linear.TILE_ROWS - 3
            yield (
                f"linear {tokens} x {rows} x {columns} {name} {plan}",
                partial(multiply, plan, scheme, tokens, rows, columns),
            )


def many_tokens() -> Iterator[Case]:
    """Plans of wide.cu."""
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
    """Plans of tiles.cu."""
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
    block, or cluster, which has several tiles, one after another (of tiles.cu, as many as rows
    need)."""
    dtype, arch = FLOATS[plan.dtype], device_arch(0)
    if isinstance(plan, LinearPlan):
        launch = cuda_fused.prepare(plan, scheme, (rows,), columns, dtype, 0)
        launch.blocks = (1,)
    elif isinstance(plan, TilePlan):
        launch = cuda_tiles.prepare(plan, scheme, rows, columns, dtype, 0)
    else:
        launch = cuda_wide.prepare(plan, scheme, rows, columns, tokens, dtype, 0)
        if plan.split == 1:
            launch.blocks = (choose_wide.blocks(plan, 1, 1, arch),)  # one cluster
    here, there = stored(scheme, rows, columns)
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    given = (there["codes"], there["codebook"], there["scale"], rotation_of(there), bias.cuda())
    moved = x.cuda()
    outputs = [torch.full((tokens + 1, rows), float("nan"), dtype=dtype).cuda() for _ in range(2)]
    for y in outputs:
        cuda_fused.run(moved, *given, scheme, y[:tokens], 0, launch)
    inputs = reference.rotate(x.double(), rotation_of(here), scheme, False)
    for y in outputs:
        close(y, inputs @ decoded(here, scheme, columns).T + bias.double(), 2.0**-6)


def several_matrices() -> Iterator[Case]:
    """linear.cu with matrices that have one input, but signs and learned codebooks of their own."""
    for name, tokens in product(("vq-4", "aqlm-2", "quip-sharp-2"), (1, 29)):
        yield f"together {tokens} {name}", partial(together, weight_scheme(name), tokens)


def together(scheme: VQScheme, tokens: int, columns: int = 1152) -> None:
    """One launch."""
    layers = [stored(scheme, rows, columns) for rows in (130, 7, 33)]
    x = torch.randn(tokens, columns).half()
    keys = ("codes", "codebook", "scale", "signs")
    given = ([there.get(key) for _, there in layers] for key in keys)
    found = cuda_fused.linears(x.cuda(), *given, [None] * 3, scheme)
    for (here, _), y in zip(layers, found, strict=True):
        exact = reference.rotate(x.double(), rotation_of(here), scheme, False)
        beyond = torch.full((1, y.shape[1]), float("nan"))
        close(torch.cat((y.cpu(), beyond)), exact @ decoded(here, scheme, columns).T, 2.0**-6)


def dense_rows() -> Iterator[Case]:
    """Plans of decode.cu."""
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
    ready = cuda_linear.Stored(codes, codebook, scale, scheme, columns)  # pads codes
    out = torch.full((rows + 1, columns), float("nan"), dtype=FLOATS[plan.out]).cuda()
    pointers = (t.data_ptr() for t in (ready.codes, ready.codebook, ready.scale, out))
    kernel = Kernel(plan, cuda_linear.DecodeArguments, 0, default_store())
    stream = torch.cuda.current_stream().cuda_stream
    kernel(choose.panels(plan, rows, columns), stream, *pointers, 0, rows, columns)
    close(out, decoded(here, scheme, columns), 2.0**-7)


def rows_rotated_back() -> Iterator[Case]:
    """Plans of dense.cu."""
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
    ready = cuda_linear.Stored(codes, codebook, scale, scheme, columns)
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


def keys_and_values() -> Iterator[Case]:
    """Plans of append.cu: one token, some, and more than are few."""
    names = ("u4", "u3", "u2", "nomad-u4", "cq-4", "cq-2", "nomad-2")
    for name, dim, tokens in product(names, (80, 128), (1, 30, 1101)):
        yield f"append {tokens} x {dim} {name}", partial(append, KV_SCHEMES[name].key, dim, tokens)


def kv_codebook(scheme: VQScheme, heads: int, dim: int) -> Tensor:
    """The universal one, or random ones."""
    if scheme.has_scale:
        return universal_tensor(scheme)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape).half()


def append(scheme: VQScheme, dim: int, tokens: int) -> None:
    """One launch."""
    x, book = torch.randn(1, 2, tokens, dim), kv_codebook(scheme, 2, dim)
    size = packed_size(dim // scheme.vector_size, scheme.entry_bits)
    codes = torch.full((1, 2, tokens + 1, size), 7, dtype=torch.uint8).cuda()
    scale = torch.full((1, 2, tokens + 1, int(scheme.has_scale)), 7).half().cuda()
    mean = torch.zeros(1, 2, 1, dim).cuda() if scheme.has_scale else None
    cuda_append.append(x.half().cuda(), mean, book.cuda(), codes, scale, 0, scheme, "rows")
    codes, scale = codes.cpu(), scale.cpu()
    assert (codes[:, :, -1] == 7).all() and (scale[:, :, -1] == 7).all()
    given = (codes[:, :, :-1], book, scale[:, :, :-1], None, None, None, None, None)
    error = ((reference.decode(*given, scheme, dim) - x).norm() / x.norm()).item()
    assert error < 0.8, f"relative error {error}"


def steps_of_a_cache() -> Iterator[Case]:
    """Plans of store.cu."""
    for name, tokens in product(("u4", "k4v2", "cq-4", "nomad-2"), (1, 3)):
        yield f"store {tokens} {name}", partial(store_steps, name, tokens)


def store_steps(name: str, tokens: int, dim: int = 128) -> None:
    """Launches until the tape is full, with a mean that is found on the way."""
    schemes = KV_SCHEMES[name].key, KV_SCHEMES[name].value
    tapes = [
        (torch.zeros(2, 2, 12, packed_size(dim // s.vector_size, s.entry_bits)).byte(),
         torch.zeros(2, 2, 12, int(s.has_scale)).half())
        for s in schemes
    ]  # fmt: skip
    centred = KV_SCHEMES[name].centre_keys
    floats = [torch.zeros(2, 2, slots, dim).half() for slots in (2, 2, 12, 12)]
    here = [
        floats[0], floats[1], *tapes[0], torch.zeros(2, 2, 1, dim) if centred else None, *tapes[1],
        floats[2], floats[3], *(kv_codebook(s, 2, dim) for s in schemes), torch.tensor([0, 3]),
        torch.zeros((), dtype=torch.int64), torch.zeros(2, 2).bool() if centred else None,
    ]  # fmt: skip
    there = [None if part is None else part.cuda() for part in here]
    for _ in range(18 // tokens):
        new = [torch.randn(2, 2, tokens, dim).half() for _ in range(2)]
        static_reference.store(*new, *here, 4, *schemes)  # type: ignore[arg-type]
        cuda_store.store(*(x.cuda() for x in new), *there, 4, *schemes)  # type: ignore[arg-type]
    for expected, found in zip(here, there, strict=True):
        if expected is not None and found is not None:
            same = torch.isclose(found.cpu().double(), expected.double(), rtol=2.0**-9, atol=1e-6)
            assert same.double().mean() > 0.99, f"{same.double().mean()} of {expected.shape}"


def decoded(tensors: dict[str, Tensor], scheme: VQScheme, columns: int) -> Tensor:
    """The weight, still rotated, in float64."""
    arguments = (tensors["codes"], tensors["codebook"], tensors["scale"])
    return reference.decode_rotated(*arguments, scheme, columns).double()


def coded_parts() -> Iterator[Case]:
    """Plans of decode_kv.cu and merge.cu."""
    for n, (name, head_dim) in enumerate(product(KV_SCHEMES, (80, 128, 192))):
        yield f"decode_kv {name} {head_dim}", partial(decode_kv, name, head_dim, n)
    for head_dim, coded in product((64, 80, 96, 128, 192, 256), (0, 3)):
        yield f"merge {head_dim} {coded}", partial(merge, head_dim, coded)


def decode_kv(name: str, head_dim: int, number: int) -> None:
    """Launches for some tokens of a tape, of keys and of values."""
    dtype = list(FLOATS.values())[number % 3]
    for scheme in (KV_SCHEMES[name].key, KV_SCHEMES[name].value):
        book = kv_codebook(scheme, 3, head_dim)
        width = packed_size(head_dim // scheme.vector_size, scheme.entry_bits)
        codes = torch.randint(0, 256, (2, 3, 1100, width), dtype=torch.uint8)
        scale = torch.rand(2, 3, 1100, int(scheme.has_scale)).half()
        mean = torch.randn(2, 3, 1, head_dim)
        some = slice(7, 7 + (1, 129, 1093)[number % 3])
        exact = reference.decode_rotated(codes, book, scale, scheme, head_dim)[:, :, some] + mean
        found = cuda_prefill.decode(
            codes.cuda()[:, :, some], scale.cuda()[:, :, some], book.cuda(), mean.cuda(), scheme,
            head_dim, dtype,
        )  # fmt: skip
        assert torch.equal(found.cpu(), exact.to(dtype))


def merge(head_dim: int, coded: int) -> None:
    """One launch; the reference is that of the CPU."""
    parts = [
        (torch.randn(2, 3, 37, head_dim).half(), torch.randn(2, 3, 37)) for _ in range(coded + 2)
    ]
    aux, scheme = torch.randn(3), KV_SCHEMES["u4"].value
    exact = Maths().merge(parts[:coded], parts[coded:], aux, scheme, torch.float32)
    there = [(out.cuda(), lse.cuda()) for out, lse in parts]
    found = cuda_prefill.merge(there[:coded], there[coded:], aux.cuda(), scheme, torch.float16)
    assert (found.cpu() - exact).norm() < 2.0**-9 * exact.norm()


def close(found: Tensor, exact: Tensor, bound: float) -> None:
    """The result without its last row, which nobody may have written; `bound` is far above what
    rounding does, and far below what a wrong tile does."""
    y = found.cpu().double()
    assert y[-1].isnan().all(), "a row beyond the last was written"
    error = ((y[:-1] - exact).norm() / exact.norm()).item()
    assert error < bound, f"relative error {error}"


MAKERS = {"wide": many_tokens, "linear": few_tokens, "together": several_matrices,
          "tiles": tiled, "paper": of_the_paper, "decode": dense_rows, "dense": rows_rotated_back,
          "rotate": rotations, "encode": codes_and_scales, "append": keys_and_values,
          "store": steps_of_a_cache, "kv": coded_parts}  # fmt: skip


def run_part(kernels: Sequence[str], part: int, parts: int) -> None:
    """Every case of one process, each told before it begins."""
    torch.manual_seed(part)
    cases = chain.from_iterable(MAKERS[kernel]() for kernel in kernels)
    for name, run in islice(cases, part, None, parts):
        print(name, flush=True)
        start = time.monotonic()
        run()
        torch.cuda.synchronize()
        print(f"    {time.monotonic() - start:.1f} s", flush=True)


def run_process(tool: str, args: argparse.Namespace, part: int) -> str:
    """What is wrong with one process, with all that it said; empty if nothing is."""
    command = [sys.executable, __file__, "--part", str(part), "--processes", str(args.processes)]
    command += ["--kernels", *args.kernels]
    if tool != "none":
        options = ["--error-exitcode", "1", "--show-backtrace", "no", "--print-limit", "20"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    # Without its own pool of memory, an address beyond a tensor is one that nobody allocated.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=args.seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nnot done after {args.seconds:.0f} s"
    summaries = re.findall(r"SUMMARY: (\d+)", said)
    clean = not process.returncode and (tool == "none" or set(summaries) == {"0"})
    return "" if clean else f"{said}\nexit status {process.returncode}"


def main() -> int:
    """0 if every tool is silent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["none", "memcheck", "racecheck"])
    parser.add_argument("--kernels", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--processes", type=int, default=8, help="at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="of a tool (%(default)s)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        run_part(args.kernels, args.part, args.processes)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is missing: it comes with the CUDA toolkit.")
    failed = False
    for tool in args.tools:
        start = time.monotonic()
        with ThreadPoolExecutor(args.processes) as pool:
            wrong = list(pool.map(partial(run_process, tool, args), range(args.processes)))
        for part, said in enumerate(wrong):
            if said:
                print(f"---- {tool}, process {part}:\n{said}")
        bad, took = sum(map(bool, wrong)), time.monotonic() - start
        print(f"{tool}: {bad} of {len(wrong)} processes failed, {took:.0f} s", flush=True)
        failed |= bad > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
