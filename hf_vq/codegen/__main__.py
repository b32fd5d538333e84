"""`python -m hf_vq.codegen`: why a plan was chosen, and kernels compiled ahead without a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import VQError
from ..formats.catalog import WEIGHT_SCHEMES, weight_scheme
from ..formats.scheme import VQScheme
from .choose import DecodeProblem, candidates, choose, cost, decodable, feasible, rotate_plan
from .compiler import compile_plan, key
from .device import ARCHES, named_arch
from .plan import Dtype, Plan
from .store import Store, default_store

_SHAPE = (4096, 4096)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of both verbs."""
    parser = argparse.ArgumentParser(prog="python -m hf_vq.codegen", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    explain = verbs.add_parser("explain", help="the candidates of a problem, and the one chosen")
    explain.add_argument("op", choices=["decode"])
    explain.add_argument("scheme", help="name or spec string")
    explain.add_argument("--n", type=int, default=_SHAPE[0], help="out_features (%(default)s)")
    explain.add_argument("--k", type=int, default=_SHAPE[1], help="in_features (%(default)s)")
    explain.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="float16")
    explain.add_argument("--arch", default="sm_90a", help="%(default)s or " + ", ".join(ARCHES))
    explain.add_argument("--top", type=int, default=10, help="candidates shown (%(default)s)")
    compile_ = verbs.add_parser("compile", help="compile decode and rotate kernels into the store")
    decodable_names = [name for name in WEIGHT_SCHEMES if not decodable(WEIGHT_SCHEMES[name])]
    compile_.add_argument("--schemes", nargs="+", default=decodable_names, metavar="SCHEME")
    compile_.add_argument("--arches", nargs="+", default=list(ARCHES), metavar="ARCH")
    compile_.add_argument(
        "--dtypes", nargs="+", default=["float16"], choices=[dtype.value for dtype in Dtype]
    )
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
    arch = named_arch(args.arch)
    problem = DecodeProblem(weight_scheme(args.scheme), args.n, args.k, Dtype(args.dtype), arch)
    chosen = choose(problem)
    every = candidates(problem)
    ranked = [(cost(plan, problem), plan) for plan in every if feasible(plan, problem) is None]
    ranked.sort(key=lambda pair: pair[0].cycles)
    print(f"decode {problem.scheme.spec()} [{args.n}, {args.k}] to {args.dtype} on {arch.name}")
    print(f"{len(every)} candidates, {len(ranked)} feasible; modelled, lowest first:")
    print("  threads  steps  unit  panel rows  codebook        MB    cycles  bound by")
    for costs, plan in ranked[: args.top]:
        print(
            f"{'*' if plan == chosen else ' '} {plan.threads:7}{plan.steps:7}{plan.unit:6}"
            f"{plan.panel_rows:12}  {'shared' if plan.codebook_in_shared else 'L2':8}"
            f"{costs.bytes / 1e6:10.2f}{costs.cycles:10.0f}  {costs.bound}"
        )
    print(f"chosen: {chosen}")
    return 0


def _compile(args: argparse.Namespace) -> int:
    store = Store(args.store) if args.store else default_store()
    schemes = {name: weight_scheme(name) for name in args.schemes}
    spilled = 0
    for arch in args.arches:
        for name, plan in _plans(schemes, arch, [Dtype(dtype) for dtype in args.dtypes]):
            image, found = compile_plan(plan, arch)
            store.fetch(key(plan, arch), lambda image=image: image)  # type: ignore[misc]
            spilled += bool(found.stack or found.spilled)
            print(
                f"{arch:7} {name:34} {len(image):6} bytes  {found.registers:3} registers  "
                f"{plan.shared_bytes + found.shared:6} shared  {found.stack:3} local",
                flush=True,
            )
    return 1 if spilled else 0


def _plans(schemes: dict[str, VQScheme], arch: str, dtypes: list[Dtype]) -> list[tuple[str, Plan]]:
    """The kernels that a linear layer of each scheme runs, without repetitions."""
    found: dict[Plan, str] = {}
    for name, scheme in schemes.items():
        for dtype in dtypes:
            problem = DecodeProblem(scheme, *_SHAPE, dtype, named_arch(arch))
            found.setdefault(choose(problem), f"decode {name} {dtype.value}")
            block = scheme.block(_SHAPE[1])
            if scheme.rotation.endswith("hadamard"):
                signs = scheme.rotation == "random_hadamard"
                plan = rotate_plan(dtype, dtype, block, signs, inverse=False)
                found.setdefault(plan, f"rotate {block} {dtype.value}")
    return [(name, plan) for plan, name in found.items()]


if __name__ == "__main__":
    sys.exit(main())
