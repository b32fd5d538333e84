"""Suite `cuda-linear`: quantized linear layers on a GPU, against bfloat16 and tinygemm's int4.

The suite also measures each mechanism of the fused kernel, on and off; the host time of a call;
the dequantize kernels as a fraction of the memory roofline, of a kernel that only writes and of
one that reads as much as it writes; and one token as a fraction of reading codes and scales. Codes
are random: the speed of a kernel does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch, ops
from hf_vq.backends.cuda.linear import fused as cuda_fused
from hf_vq.backends.cuda.linear.dequantize import DeviceWeight
from hf_vq.codegen.families.dequantize_rotated import restorable
from hf_vq.codegen.families.linear import LinearProblem, choose, feasible, fusable, x_sets_of
from hf_vq.codegen.families.linear_tile_codebook import tiled
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype, LinearPlan
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import StoredWeight, rotation_of
from hf_vq.ops.library import linear_problem
from tests.fixtures.random_weights import random_tensors

from ..roofline.cuda import PLANS, reading
from ..timing import Candidate, speedup, summary
from .timing import cold_copies, interleave_graphs

SCHEMES = ("vq-4", "turboquant-4", "vq-3", "vq-2", "quip-sharp-2", "quip-sharp-4", "aqlm-2",
           "aqlm-3", "aqlm-2-int7", "aqlm-3-int7", "vq8x16r1-tensor-g0-none",
           "gptvq-2")  # fmt: skip
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096))  # out_features, in_features
TOKENS = (1, 16, 32, 64, 128, 1024, 2048, 4096)
_MECHANISMS = ("vq-4", "vq-2", "aqlm-2", "quip-sharp-2")
_GROUP = 128  # of tinygemm's int4
_HOST_CALLS = 2000
_DTYPE, _OUT = torch.bfloat16, Dtype.BFLOAT16
Layers = dict[str, list[dict[str, Tensor]]]  # `copies_of` of every scheme


def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-linear needs a CUDA device.")

    def sections(shape: tuple[int, int]) -> Iterator[list[dict[str, Any]]]:
        layers = {name: copies_of(weight_scheme(name), *shape) for name in schemes}
        for count in tokens:
            yield _linear_rows(layers, *shape, count, rounds)
        yield _decode_rows(layers, *shape, rounds)
        for name in _MECHANISMS if 1 in tokens else ():
            if name in schemes:
                yield _mechanism_rows(name, layers[name], *shape, rounds)
        if shape == shapes[0]:
            yield _host_rows(schemes, *shape)

    found: list[dict[str, Any]] = []
    for shape in shapes:
        for row in chain.from_iterable(sections(shape)):
            row |= {"out_features": shape[0], "in_features": shape[1]}
            found.append(row)
            report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": found}


@torch.no_grad()
def _linear_rows(
    layers: Layers, out_features: int, in_features: int, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    x = torch.randn(tokens, in_features, dtype=_DTYPE, device="cuda")
    candidates = {"bf16": dense(x, out_features), "int4 tinygemm": _tinygemm(x, out_features)}
    kernels, read = {}, {}
    for name, sets in layers.items():
        scheme = weight_scheme(name)
        candidates[name] = ours(x, sets, scheme)
        problem = linear_problem("linear", x, scheme.spec(), out_features)
        kernels[name] = dispatch.select(problem).name
        if tokens == 1:
            read[name] = sum(t.nbytes for key, t in sets[0].items() if key != "signs")
    reads = {
        _reading(nbytes, i): reading(nbytes, plan)
        for nbytes in set(read.values())
        for i, plan in enumerate(PLANS)
    }
    seconds = interleave_graphs(candidates | reads, rounds)
    found = []
    for name in candidates:
        row: dict[str, Any] = {"what": "linear", "name": name, "tokens": tokens}
        row |= summary(seconds[name])
        peers = [peer for peer in ("bf16", "int4 tinygemm") if peer != name]
        if name in kernels:
            row["kernel"] = kernels[name]
            row["speedup"] = {peer: speedup(seconds[name], seconds[peer]) for peer in peers}
        if name in read:
            limit = min((seconds[_reading(read[name], i)] for i in range(len(PLANS))), key=median)
            row["read_us"] = summary(limit)["us"]
            row["of_reading"] = speedup(seconds[name], limit)
        found.append(row)
    return found


def _reading(nbytes: int, plan: int) -> str:
    return f"reading {nbytes} bytes by plan {plan}"


def dense(x: Tensor, out_features: int) -> Candidate:
    """A layer in bfloat16."""
    weight = torch.randn(out_features, x.shape[-1], dtype=_DTYPE, device="cuda")
    weights = [weight.clone() for _ in range(cold_copies(weight.nbytes))]
    return Candidate(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))


def _tinygemm(x: Tensor, out_features: int) -> Candidate:
    """int4 with scales for groups of 128, as torch computes with it."""
    columns = x.shape[-1]
    plain = torch.randint(256, (out_features, columns // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(plain, 8)
    copies = [packed.clone() for _ in range(cold_copies(packed.nbytes))]
    scales = torch.randn(columns // _GROUP, out_features, 2, dtype=_DTYPE, device="cuda")
    return Candidate(lambda i: torch._weight_int4pack_mm(x, copies[i], _GROUP, scales), len(copies))


def ours(x: Tensor, sets: list[dict[str, Tensor]], scheme: VQScheme) -> Candidate:
    """The layer on codes, by the row that the table chooses."""
    return Candidate(lambda i: ops.linear(x, sets[i], None, scheme), len(sets))


def copies_of(scheme: VQScheme, out_features: int, in_features: int) -> list[dict[str, Tensor]]:
    """Stored tensors of a layer, as often as no cache holds their codes and scales.

    Codebooks of tiles are copied too: they are a part of the weight as its scales are.
    """
    tensors = {
        key: tensor.cuda()
        for key, tensor in random_tensors(scheme, out_features, in_features).items()
    }
    own = ["codes", "scale"] + ["codebook"] * (scheme.codebook == "tile")
    own += [key for key in ("codes_2", "scale_2") if key in tensors]
    copies = cold_copies(sum(tensors[key].nbytes for key in own))
    return [{**tensors, **{key: tensors[key].clone() for key in own}} for _ in range(copies)]


@torch.no_grad()
def _mechanism_rows(
    name: str, sets: list[dict[str, Tensor]], out_features: int, in_features: int, rounds: int
) -> list[dict[str, Any]]:
    """One token by the chosen plan, and by plans that lack one thing each."""
    scheme, arch = weight_scheme(name), device_arch(torch.cuda.current_device())
    problem = LinearProblem(scheme, 1, out_features, in_features, Dtype.BFLOAT16, arch)
    chosen = choose(problem)
    if chosen is None:
        return []
    x = torch.randn(1, in_features, dtype=_DTYPE, device="cuda")
    plans = {"chosen": chosen} | {
        what: plan
        for what, plan in _without(chosen, in_features).items()
        if feasible(plan, problem) is None
    }
    candidates = {
        what: by_plan(x, sets, scheme, plan, out_features) for what, plan in plans.items()
    }
    candidates["no overlapping launches"] = by_plan(
        x, sets, scheme, chosen, out_features, overlap=False
    )
    seconds = interleave_graphs(candidates, rounds)
    return [
        {"what": "mechanism", "name": name, "plan": what, **summary(seconds[what]),
         "times chosen": speedup(seconds["chosen"], seconds[what])}
        for what in candidates
    ]  # fmt: skip


def _without(plan: LinearPlan, in_features: int) -> dict[str, LinearPlan]:
    """Plans that differ in one field, by what they lack."""
    found = {
        "one copy of the codebook (VQ-LLM)": replace(plan, replicas=1, interleaved=1),
        "codebook in L2": replace(plan, in_shared=False, replicas=1, interleaved=1),
        "one chunk on its way": replace(
            plan, pipeline_depth=1, prefetch_x=False, scales_together=False
        ),
        "one warp for all columns": replace(
            plan,
            split_k_warps=1,
            threads=min(plan.threads, 480),
            x_sets=x_sets_of(in_features, plan.unit, 1, plan.pipeline_depth, True),
        ),
    }
    if plan.interleaved == 2 and plan.num_codebooks == 1 and plan.scope.value != "e8p":
        found["addresses by shift and mask"] = replace(plan, interleaved=1)
    if plan.rotate:
        found["rotation by a separate kernel"] = replace(plan, rotate=False)
    if plan.scope.value == "e8p" or plan.fused > 1:  # tables are not what is stored
        del found["codebook in L2"]
    return {what: other for what, other in found.items() if other != plan}


def launch_of(
    plan: LinearPlan, scheme: VQScheme, out_features: int, in_features: int
) -> cuda_fused.Launch:
    """The kernels of a plan, loaded."""
    ordinal = torch.cuda.current_device()
    return cuda_fused.prepare(plan, scheme, (out_features,), in_features, _DTYPE, ordinal)


def by_plan(
    x: Tensor,
    sets: list[dict[str, Tensor]],
    scheme: VQScheme,
    plan: LinearPlan,
    out_features: int,
    *,
    overlap: bool = True,
) -> Candidate:
    """The fused kernel with a plan that nobody chose; see `cuda_fused.run` for `overlap`."""
    launch = launch_of(plan, scheme, out_features, x.shape[-1])
    return by_launch(x, sets, scheme, launch, out_features, overlap=overlap)


def by_launch(
    x: Tensor,
    sets: list[dict[str, Tensor]],
    scheme: VQScheme,
    launch: cuda_fused.Launch,
    out_features: int,
    *,
    overlap: bool = True,
) -> Candidate:
    """A kernel that was prepared for the layer."""
    ordinal = torch.cuda.current_device()
    y = x.new_empty(len(x), out_features)

    def call(i: int) -> None:
        weight = StoredWeight.of(sets[i], scheme, x.shape[-1])
        cuda_fused.run(x, (weight,), (None,), (y,), ordinal, launch, overlap)

    return Candidate(call, len(sets))


@torch.no_grad()
def _host_rows(schemes: Sequence[str], out_features: int, in_features: int) -> list[dict[str, Any]]:
    """Microseconds that the host is busy with a call: of a layer so small that the GPU waits.

    `neg` is the least that an op of PyTorch does: an output, and one launch.
    """
    x = torch.randn(1, 512, dtype=_DTYPE, device="cuda")
    weight = torch.randn(64, 512, dtype=_DTYPE, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: torch.nn.functional.linear(x, weight),
        "neg": lambda: torch.neg(x),
    }
    for name in schemes:
        scheme = weight_scheme(name)
        if fusable(scheme, 512) is None or tiled(scheme, 512) is None:
            tensors = {key: value.cuda() for key, value in random_tensors(scheme, 64, 512).items()}
            calls[name] = lambda t=tensors, s=scheme: ops.linear(x, t, None, s)  # type: ignore[misc]
    return [{"what": "host", "name": name, "us": _host_time(call)} for name, call in calls.items()]


def _host_time(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS // 5):
            call()
        times.append((time.perf_counter() - start) / (_HOST_CALLS // 5) * 1e6)
    torch.cuda.synchronize()
    return median(times)


@torch.no_grad()
def _decode_rows(
    layers: Layers, out_features: int, in_features: int, rounds: int
) -> list[dict[str, Any]]:
    nbytes = 2 * out_features * in_features
    buffers = [
        torch.zeros(out_features, in_features, dtype=_DTYPE, device="cuda")
        for _ in range(cold_copies(nbytes))
    ]
    count = len(buffers)
    candidates = {
        "write": Candidate(lambda i: buffers[i].fill_(1.0), count),
        # A kernel: a copy in a graph would be a slower transfer.
        "read and write": Candidate(
            lambda i: torch.add(buffers[i - 1], 1.0, out=buffers[i]), count
        ),
    }
    moved = {"write": nbytes, "read and write": 2 * nbytes}
    for name, sets in layers.items():
        scheme = weight_scheme(name)
        if scheme.two_passes and restorable(scheme, in_features, _OUT):  # merged first, by PyTorch
            continue
        moved[name] = nbytes + sum(
            tensor.nbytes for key, tensor in sets[0].items() if key != "signs"
        )
        candidates[name] = _decoding(sets, buffers, scheme, in_features)
    seconds = interleave_graphs(candidates, rounds)
    ceilings = {name: moved[name] / min(seconds[name]) for name in ("write", "read and write")}
    found = []
    for name in candidates:
        row: dict[str, Any] = {"what": "decode", "name": name, **summary(seconds[name])}
        row["gb_per_second"] = moved[name] / row["us"] / 1e3
        if name not in ceilings:
            row["of_ceiling"] = {
                ceiling: row["gb_per_second"] * 1e9 / rate for ceiling, rate in ceilings.items()
            }
        found.append(row)
    return found


def _decoding(
    sets: list[dict[str, Tensor]], buffers: list[Tensor], scheme: VQScheme, in_features: int
) -> Candidate:
    book = "codebook_2" if scheme.two_passes else "codebook"  # nested: of both codes
    stored = [
        DeviceWeight(tensors["codes"], tensors[book], tensors["scale"], scheme, in_features)
        for tensors in sets
    ]

    signs = rotation_of(sets[0])
    rotated_back = restorable(scheme, in_features, _OUT) is None

    def call(i: int) -> None:
        ready, out = stored[i % len(stored)], buffers[i % len(buffers)]
        if rotated_back:
            ready.restore(0, signs, out, sets[i % len(sets)].get("codes_2"))
        else:
            ready.decode(0, out)

    return Candidate(call, max(len(stored), len(buffers)))
