"""`python -m hf_vq.codegen`: explain the choice of a plan; compile kernels without a GPU."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import VQBackendError, VQError
from ..formats.catalog import QOQ_SCHEMES, WEIGHT_SCHEMES, kv_scheme, weight_scheme
from ..formats.published import VptqLayout
from ..formats.qoq import QoQScheme
from ..formats.scheme import VQScheme
from . import tuned
from .attention_plan import Mask
from .families import dequantize as decode
from .families import encode, linear, vptq, w4a8
from .families import kv_attention as attention
from .families import linear_tile_codebook as tiles
from .families import linear_wgmma as wide
from .families import w4a8_wgmma as w4a8_wide
from .families.dequantize import Cost
from .families.dequantize_rotated import dense_plan, restorable
from .jit.compiler import compile_plan, key
from .jit.device import ARCHES, named_arch
from .jit.kernel_store import Store, default_store
from .plan import Dtype, LinearPlan, Plan
from .w4a8_plan import Source

_SHAPE = (4096, 4096)
_TOKENS = (1, 16)
_TILE_TOKENS = (1, 16, 64)
_MANY_TOKENS = (128, 1024)
_COLUMNS = "queries that share a kv head: its query heads times the new tokens (%(default)s)"
_VPTQ = ("v8-k65536-0", "v8-k65536-256", "v12-k65536-4096", "v6-k4096-0")
_CANDIDATES = 8  # scales that fitting tries per group


def build_parser() -> argparse.ArgumentParser:
    """Argument parser of both verbs."""
    parser = argparse.ArgumentParser(prog="python -m hf_vq.codegen", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    explain = verbs.add_parser("explain", help="the candidates of a problem, and the one chosen")
    explain.add_argument("op", choices=["linear", "decode", "attention", "vptq", "w4a8"])
    explain.add_argument(
        "scheme", help="name or spec string; of vptq: v8-k65536-256; of w4a8: qoq-w4a8-g128"
    )
    explain.add_argument("--m", type=int, default=1, help="tokens of linear (%(default)s)")
    explain.add_argument("--n", type=int, default=_SHAPE[0], help="out_features (%(default)s)")
    explain.add_argument("--k", type=int, default=_SHAPE[1], help="in_features (%(default)s)")
    explain.add_argument("--dim", type=int, default=128, help="head_dim (%(default)s)")
    explain.add_argument("--columns", type=int, default=4, help=_COLUMNS)
    explain.add_argument("--context", type=int, default=1 << 14, help="coded tokens (%(default)s)")
    explain.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float16")
    explain.add_argument("--arch", default="sm_90a", help="%(default)s or " + ", ".join(ARCHES))
    explain.add_argument("--top", type=int, default=10, help="candidates shown (%(default)s)")
    compile_ = verbs.add_parser("compile", help="compile kernels into the store")
    decodable = [name for name in WEIGHT_SCHEMES if not decode.decodable(WEIGHT_SCHEMES[name])]
    compile_.add_argument("--schemes", nargs="+", default=decodable, metavar="SCHEME")
    compile_.add_argument("--arches", nargs="+", default=list(ARCHES), metavar="ARCH")
    compile_.add_argument(
        "--dtypes", nargs="+", default=["float16"], choices=[dtype.value for dtype in Dtype]
    )
    compile_.add_argument("--vptq", nargs="*", default=list(_VPTQ), metavar="VARIANT")
    compile_.add_argument("--qoq", nargs="*", default=list(QOQ_SCHEMES), metavar="SCHEME")
    compile_.add_argument("--store", type=Path, help="folder (default: HF_VQ_STORE)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; 0 if it succeeded, 1 if a kernel spills, 2 on a VQError."""
    args = build_parser().parse_args(argv)
    try:
        return _explain(args) if args.verb == "explain" else _compile(args)
    except VQError as error:
        print(f"hf_vq.codegen: error: {error}", file=sys.stderr)
        return 2


def _explain(args: argparse.Namespace) -> int:
    if args.op == "attention":
        return _explain_attention(args)
    if args.op == "vptq":
        return _explain_vptq(args)
    if args.op == "w4a8":
        return _explain_w4a8(args)
    arch, scheme, dtype = named_arch(args.arch), weight_scheme(args.scheme), Dtype(args.dtype)
    print(f"{args.op} {scheme.spec()} [{args.n}, {args.k}] {dtype.value} on {arch.name}")
    if args.op == "decode":
        requested = decode.DecodeProblem(scheme, args.n, args.k, dtype, arch)
        chosen = decode.choose(requested)
        every = decode.candidates(requested)
        able = [plan for plan in every if decode.feasible(plan, requested) is None]
        costs = {plan: decode.cost(plan, requested) for plan in able}
        return _show(len(every), chosen, costs, _DECODE_COLUMNS, args.top)
    if scheme.codebook == "tile":
        return _explain_tiles(args, scheme, dtype)
    reason = linear.fusable(scheme, args.k)
    if reason or dtype is Dtype.FLOAT32:
        raise VQBackendError(f"no fused kernel: {reason or 'factors have 16 bits'}.")
    int8 = scheme.activations_bits == 8 and args.m >= wide.FEWEST_INT8_TOKENS
    bits = 8 if int8 and not wide.wide(scheme, args.k, arch, 8) else 16
    suits = bits == 8 or wide.fewest_tokens(scheme) <= args.m <= wide.MOST_TOKENS
    if suits and not wide.wide(scheme, args.k, arch, bits):
        many = wide.token_bucket(args.m)
        requested_many = linear.LinearProblem(scheme, many, args.n, args.k, dtype, arch, bits)
        able_many = {other: wide.cost(other, requested_many) for other in wide.best(requested_many)}
        count = len(wide.candidates(requested_many))
        return _show(count, wide.choose(requested_many), able_many, _WIDE_COLUMNS, args.top)
    problem = linear.LinearProblem(scheme, linear.token_bucket(args.m), args.n, args.k, dtype, arch)
    plan = linear.choose(problem)
    if plan is None:
        raise VQBackendError(
            f"no fused kernel for {args.m} tokens on {arch.name}: shared "
            "memory or registers do not suffice; rows are decoded, and cuBLAS multiplies."
        )
    ranked = {other: linear.cost(other, problem) for other in [*linear.best(problem), plan]}
    print(_verdict(problem, plan))
    return _show(len(linear.candidates(problem)), plan, ranked, tuned.KNOBS, args.top)


def _explain_tiles(args: argparse.Namespace, scheme: VQScheme, dtype: Dtype) -> int:
    reason = tiles.tiled(scheme, args.k)
    if reason or dtype is Dtype.FLOAT32:
        raise VQBackendError(f"no fused kernel: {reason or 'factors have 16 bits'}.")
    most, arch = tiles.MOST_TOKENS, named_arch(args.arch)
    tokens = linear.token_bucket(min(args.m, most))
    requested = linear.LinearProblem(scheme, tokens, args.n, args.k, dtype, arch)
    plan = tiles.choose(requested) if args.m <= tiles.MOST_LAUNCHES * most else None
    if plan is None:
        raise VQBackendError(
            f"no fused kernel for {args.m} tokens on {arch.name}: rows are decoded, and cuBLAS "
            "multiplies."
        )
    if args.m > most:
        print(f"{-(-args.m // most)} launches, of {most} tokens at most")
    able = {other: tiles.cost(other, requested) for other in tiles.best(requested)}
    return _show(len(tiles.candidates(requested)), plan, able, _TILE_COLUMNS, args.top)


def _vptq_layout(name: str, columns: int) -> VptqLayout:
    """Layout of the public checkpoints of a variant, with column scales and a permutation."""
    match = re.fullmatch(r"v(\d+)-k(\d+)-(\d+)", name)
    if match is None:
        raise VQBackendError(f"{name!r} is no variant of VPTQ; write v8-k65536-256.")
    vector, centroids, residual = map(int, match.groups())
    return VptqLayout(vector, centroids, residual, 1, columns, norm=True, perm=True)


def _explain_vptq(args: argparse.Namespace) -> int:
    layout, arch, dtype = (
        _vptq_layout(args.scheme, args.k),
        named_arch(args.arch),
        Dtype(args.dtype),
    )
    print(f"{layout.name()} [{args.n}, {args.k}] {dtype.value} on {arch.name}")
    tokens = 8 if args.m <= 8 else 16
    requested = vptq.VptqProblem(layout, tokens, args.n, dtype, arch)
    reason = vptq.fusable(layout, dtype)
    if args.m > vptq.MOST_TOKENS:
        reason = f"{args.m} tokens: rows are decoded, and cuBLAS multiplies"
    plan = None if reason else vptq.choose(requested)
    if plan is None:
        raise VQBackendError(f"no fused kernel: {reason or 'registers do not suffice'}.")
    able = {other: vptq.cost(other, requested) for other in vptq.best(requested)}
    lookups = vptq.l2_lookups(plan, requested)
    times = decode.times_dense(lookups, args.n, args.k, arch)
    print(f"lookups in L2 take {times:.2f} of the time of reading a bfloat16 weight")
    return _show(len(vptq.candidates(requested)), plan, able, _VPTQ_COLUMNS, args.top)


def _w4a8_problem(
    name: str, tokens: int, rows: int, columns: int, dtype: Dtype, arch: str
) -> w4a8.W4A8Problem:
    scheme = QoQScheme.parse(name)
    group = scheme.group and scheme.group_of(columns)
    return w4a8.W4A8Problem(group, tokens, rows, columns, dtype, dtype, named_arch(arch))


def _explain_w4a8(args: argparse.Namespace) -> int:
    reason, dtype = w4a8.multipliable(args.k), Dtype(args.dtype)
    if reason or dtype is Dtype.FLOAT32:
        raise VQBackendError(f"no kernel: {reason or 'inputs are float32'}.")
    print(f"{args.scheme} [{args.n}, {args.k}] {dtype.value} on {args.arch}")
    many = args.m >= w4a8_wide.FEWEST_TOKENS and not w4a8_wide.wide(named_arch(args.arch))
    tokens = (w4a8_wide if many else w4a8).token_bucket(args.m)
    requested = _w4a8_problem(args.scheme, tokens, args.n, args.k, dtype, args.arch)
    if many:
        wide_costs = {plan: w4a8_wide.cost(plan, requested) for plan in w4a8_wide.best(requested)}
        count = len(w4a8_wide.candidates(requested))
        return _show(count, w4a8_wide.choose(requested), wide_costs, _W4A8_WIDE_COLUMNS, args.top)
    costs = {plan: w4a8.cost(plan, requested) for plan in w4a8.best(requested)}
    count = len(w4a8.candidates(requested))
    return _show(count, w4a8.choose(requested), costs, _W4A8_COLUMNS, args.top)


def _explain_attention(args: argparse.Namespace) -> int:
    scheme, arch, dtype = kv_scheme(args.scheme), named_arch(args.arch), Dtype(args.dtype)
    sides = {"keys": scheme.key, "values": scheme.value}
    print(f"attention {args.scheme} head_dim {args.dim} {dtype.value} on {arch.name}")
    reasons = (attention.attendable(side, args.dim, what) for what, side in sides.items())
    reason = next(filter(None, reasons), None)
    if reason or dtype is Dtype.FLOAT32:
        raise VQBackendError(f"no attention kernel: {reason or 'factors have 16 bits'}.")
    requested = attention.AttentionProblem(
        scheme.key, scheme.value, args.dim, args.dim, args.columns, dtype, Mask.NONE, False,
        attention.token_bucket(args.context), arch,
    )  # fmt: skip
    able = {plan: attention.cost(plan, requested) for plan in attention.best(requested)}
    count = len(attention.candidates(requested))
    return _show(count, attention.choose(requested), able, _ATTENTION_COLUMNS, args.top)


_ATTENTION_COLUMNS = ("threads", "blocks_per_sm", "step_tiles", "pipeline_depth", "query_tiles")
_VPTQ_COLUMNS = ("threads", "blocks_per_sm", "row_vectors", "book_in_shared", "rest_in_shared")
_TILE_COLUMNS = (
    "threads",
    "blocks_per_sm",
    "column_warps",
    "row_tiles",
    "cluster_size",
    "x_stages",
)
_W4A8_COLUMNS = (
    "threads",
    "blocks_per_sm",
    "split_k_warps",
    "row_tiles",
    "token_tiles",
    "pipeline_depth",
)
_WIDE_COLUMNS = ("threads", "token_tile", "cluster_size", "x_stages")
_W4A8_WIDE_COLUMNS = ("threads", "token_tile", "split_k_warpgroups", "x_stages", "pipeline_depth")
_DECODE_COLUMNS = ("threads", "pipeline_depth", "unit", "panel_rows", "codebook_in_shared")


def _verdict(problem: linear.LinearProblem, plan: LinearPlan) -> str:
    """Compare the modelled cycles of the plan with reading a dense bfloat16 weight."""
    arch = problem.arch
    dense = 2 * problem.rows * problem.in_features / arch.sms / arch.dram_bytes_per_clock
    cycles = linear.cost(plan, problem).cycles
    verdict = f"modelled {cycles:.0f} cycles; reading a bfloat16 weight takes {dense:.0f}"
    if cycles > dense and problem.tokens == 1:
        verdict += (
            ": on this GPU these codes save memory, not time. Entries of a codebook this large are "
            "looked up in L2 or collide in shared memory; vq-2 or quip-sharp-2 would not"
        )
    return verdict


def _show(
    count: int, chosen: Plan | None, costs: Mapping[Any, Cost], columns: Sequence[str], top: int
) -> int:
    """Print the plans of the lowest cost, and mark the one that was chosen."""
    ranked = sorted(costs.items(), key=lambda pair: pair[1].cycles)
    print(f"{count} candidates, {len(ranked)} feasible; modelled, lowest first:")
    print(
        "  " + "".join(f"{name:>{len(name) + 2}}" for name in columns) + "      MB    cycles  bound"
    )
    shown = ranked[:top]
    shown += [pair for pair in ranked[top:] if pair[0] == chosen]  # measured to be better
    for plan, costs_ in shown:
        knobs = "".join(f"{getattr(plan, name):>{len(name) + 2}}" for name in columns)
        mark = "*" if plan == chosen else " "
        print(f"{mark} {knobs}{costs_.bytes / 1e6:8.2f}{costs_.cycles:10.0f}  {costs_.bound}")
    print(f"chosen: {chosen}")
    return 0


def _compile(args: argparse.Namespace) -> int:
    store = Store(args.store) if args.store else default_store()
    schemes = {name: weight_scheme(name) for name in args.schemes}
    spilled = 0
    for arch in args.arches:
        dtypes = [Dtype(dtype) for dtype in args.dtypes]
        plans = _plans(schemes, arch, dtypes) + _vptq_plans(args.vptq, arch, dtypes)
        plans += _w4a8_plans(args.qoq, arch, dtypes)
        for name, plan in plans:
            image, found = compile_plan(plan, arch)
            store.fetch(key(plan, arch), lambda image=image: image)  # type: ignore[misc]
            spilled += bool(found.stack or found.spilled)
            print(
                f"{arch:7} {name:34} {len(image):6} bytes  {found.registers:3} registers  "
                f"{plan.shared_bytes + found.shared:6} shared  {found.stack:3} local",
                flush=True,
            )
    return 1 if spilled else 0


def _vptq_plans(names: Sequence[str], arch: str, dtypes: list[Dtype]) -> list[tuple[str, Plan]]:
    """The kernels of linear layers as VPTQ publishes them, without repetitions."""
    found: dict[Plan, str] = {}
    for name in names:
        layout = _vptq_layout(name, _SHAPE[1])
        for dtype in dtypes:
            decoded = vptq.decode_plan(layout, _SHAPE[1], dtype)
            found.setdefault(decoded, f"vptq_decode {name} {dtype.value}")
            for tokens in _TOKENS:
                requested = vptq.VptqProblem(layout, tokens, _SHAPE[0], dtype, named_arch(arch))
                plan = vptq.choose(requested)
                if plan is not None:
                    found.setdefault(plan, f"vptq {name} {dtype.value} x{tokens}")
                    inputs = vptq.inputs_plan(plan, layout)
                    found.setdefault(inputs, f"vptq_inputs {dtype.value} x{tokens}")
    return [(name, plan) for plan, name in found.items()]


def _w4a8_plans(names: Sequence[str], arch: str, dtypes: list[Dtype]) -> list[tuple[str, Plan]]:
    """The kernels of products with 8-bit inputs, without repetitions."""
    found: dict[Plan, str] = {}
    for name in names:
        for dtype in dtypes:
            if dtype is Dtype.FLOAT32:
                continue
            for module, counts in ((w4a8, _TILE_TOKENS), (w4a8_wide, _MANY_TOKENS)):
                swizzled = module is w4a8_wide
                for tokens in counts:
                    requested = _w4a8_problem(name, tokens, *_SHAPE, dtype, arch)
                    plan = module.choose(requested)
                    if plan is not None:
                        found.setdefault(plan, f"{plan.kernel} {name} {dtype.value} x{tokens}")
                        for source in Source:
                            inputs = w4a8.inputs_plan(dtype, _SHAPE[1], swizzled, source)
                            name_of = f"w4a8_inputs {source.value} {dtype.value} {swizzled}"
                            found.setdefault(inputs, name_of)
    return [(name, plan) for plan, name in found.items()]


def _plans(schemes: dict[str, VQScheme], arch: str, dtypes: list[Dtype]) -> list[tuple[str, Plan]]:
    """The kernels that make and run linear layers of each scheme, without repetitions."""
    found: dict[Plan, str] = {}
    for name, scheme in schemes.items():
        if encode.encodable(scheme, _SHAPE[1], named_arch(arch)) is None:
            encoding = encode.encode_plan(scheme, _SHAPE[1], _CANDIDATES, True)
            found.setdefault(encoding, f"encode {name}")
        chunk = min(scheme.block(_SHAPE[1]), scheme.group(_SHAPE[1]))  # of block-LDLQ
        if scheme.rotation != "none" and not encode.roundable(scheme, chunk, named_arch(arch)):
            found.setdefault(encode.round_plan(scheme, chunk), f"round {name}")
        for dtype in dtypes:
            decoding = decode.DecodeProblem(scheme, *_SHAPE, dtype, named_arch(arch))
            found.setdefault(decode.choose(decoding), f"decode {name} {dtype.value}")
            if restorable(scheme, _SHAPE[1], dtype) is None:
                found.setdefault(dense_plan(decoding), f"dense {name} {dtype.value}")
            block = scheme.block(_SHAPE[1])
            diagonal = decode.diagonal_of(scheme)
            if scheme.rotation.endswith("hadamard"):
                rotation = decode.rotate_plan(dtype, dtype, block, diagonal, inverse=False)
                found.setdefault(rotation, f"rotate {block} {dtype.value}")
            if dtype is Dtype.FLOAT32:
                continue
            for tokens in _TILE_TOKENS:
                tiled = linear.LinearProblem(scheme, tokens, *_SHAPE, dtype, named_arch(arch))
                own = tiles.choose(tiled)
                if own is not None:
                    found.setdefault(own, f"tiles {name} {dtype.value} x{tokens}")
            if linear.fusable(scheme, _SHAPE[1]):
                continue
            for tokens in _TOKENS:
                few = linear.LinearProblem(scheme, tokens, *_SHAPE, dtype, named_arch(arch))
                plan = linear.choose(few)
                if plan is None:
                    continue
                found.setdefault(plan, f"linear {name} {dtype.value} x{tokens}")
                if tokens > 1:
                    rotation = decode.rotate_plan(dtype, dtype, block, diagonal, False, plan.unit)
                    found.setdefault(rotation, f"arrange {block} {dtype.value}")
            for tokens in _MANY_TOKENS:
                many = linear.LinearProblem(scheme, tokens, *_SHAPE, dtype, named_arch(arch))
                best = wide.choose(many)
                if best is not None:
                    found.setdefault(best, f"wide {name} {dtype.value} x{tokens}")
                    rotation = decode.rotate_plan(
                        dtype, dtype, block, diagonal, False, best.unit, True
                    )
                    found.setdefault(rotation, f"swizzle {block} {dtype.value}")
                integers = replace(many, activations_bits=8)
                best = wide.choose(integers)
                if best is not None:
                    found.setdefault(best, f"int8 {name} {dtype.value} x{tokens}")
                    rounding = wide.rotate_int8_plan(integers)
                    found.setdefault(rounding, f"int8 inputs {name} {dtype.value}")
    return [(name, plan) for plan, name in found.items()]


if __name__ == "__main__":
    sys.exit(main())
