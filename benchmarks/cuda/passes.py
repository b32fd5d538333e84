"""Suite `cuda-passes`: products of two nested passes on a GPU, by every kernel that supports them.

Generated CUDA, Triton and cuTile, against a dense bfloat16 weight. One token is also compared with
a kernel that only reads the same number of bytes, and with a matrix whose rows fill the last wave
of tiles. Codes are random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch
from hf_vq.codegen.families.linear import TILE_ROWS, LinearProblem, choose
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError
from hf_vq.formats.catalog import weight_scheme
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import StoredWeight
from hf_vq.ops.library import linear_problem

from ..peers import cutile_cubins
from ..roofline.cuda import PLANS, reading
from ..timing import Candidate, summary
from .linear import by_plan, copies_of, dense, ours
from .timing import interleave_graphs

SCHEMES = ("turboquant-4+4", "turboquant-4+2")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096))  # out_features, in_features
TOKENS = (1, 16, 32, 64)
_DTYPE = torch.bfloat16


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    cubins: Path | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every shape; `report` gets each row when it is known.

    Args:
        tokens: rows of the input.
        cubins: folder with cuTile's kernel (`cutile_cubins`), which then takes part.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU, or no Triton.
    """
    from hf_vq.backends.triton import supports

    reason = "there is no CUDA device" if not torch.cuda.is_available() else supports.available()
    if reason:
        raise VQBackendError(f"the suite cuda-passes needs a CUDA device and Triton: {reason}.")
    rows = []
    for name in schemes:
        scheme = weight_scheme(name)
        for shape in shapes:
            sets = copies_of(scheme, *shape)
            for count in tokens:
                x = torch.randn(count, shape[1], dtype=_DTYPE, device="cuda")
                row = {"name": name, "tokens": count, "out_features": shape[0]}
                found = _timed(x, sets, scheme, shape[0], rounds, cubins)
                row |= {"in_features": shape[1], **found}
                rows.append(row)
                report(row)
    return {"rounds": rounds, "dtype": str(_DTYPE)[6:]}, {"rows": rows}


def _timed(
    x: Tensor,
    sets: list[dict[str, Tensor]],
    scheme: VQScheme,
    out_features: int,
    rounds: int,
    cubins: Path | None,
) -> dict[str, Any]:
    candidates = {
        "bf16": dense(x, out_features),
        "cuda": ours(x, sets, scheme),
        "triton": _by_triton(x, sets, scheme),
    }
    if len(x) == 1:
        nbytes = sum(t.nbytes for key, t in sets[0].items() if key in ("codes", "codes_2", "scale"))
        candidates |= {f"read {i}": reading(nbytes, plan) for i, plan in enumerate(PLANS)}
        filled_rows, candidates["filled"] = _filled(x, scheme, out_features)
    if cubins is not None and cutile_cubins.runnable(scheme, x.shape[-1]):
        candidates["cutile"] = cutile_cubins.by_driver(x, sets, scheme, cubins)
    seconds = interleave_graphs(candidates, rounds)
    found = {f"{n}_us": summary(t)["us"] for n, t in seconds.items() if not n.startswith("read ")}
    read_times = [median(times) for name, times in seconds.items() if name.startswith("read ")]
    if read_times:
        found |= {"read_us": 1e6 * min(read_times), "filled_rows": filled_rows}
    row = dispatch.select(linear_problem("linear", x, scheme.spec(), out_features))
    return {"kernel": row.name, **found}


def _filled(x: Tensor, scheme: VQScheme, out_features: int) -> tuple[int, Candidate]:
    """Round `out_features` up to rows that fill the last wave of tiles, and time that layer."""
    columns, arch = x.shape[-1], device_arch(torch.cuda.current_device())
    plan = choose(LinearProblem(scheme, 1, out_features, columns, Dtype.BFLOAT16, arch))
    assert plan is not None
    teams = arch.sms * plan.blocks_per_sm * (plan.threads // 32 // plan.split_k_warps)
    at_a_time = teams * TILE_ROWS * plan.row_tiles
    rows = -(-out_features // at_a_time) * at_a_time
    return rows, by_plan(x, copies_of(scheme, rows, columns), scheme, plan, rows)


def _by_triton(x: Tensor, sets: list[dict[str, Tensor]], scheme: VQScheme) -> Candidate:
    from hf_vq.backends.triton import linear as triton_linear

    linear: Callable[..., Tensor] = triton_linear.linear
    weights = [StoredWeight.of(tensors, scheme, x.shape[-1]) for tensors in sets]
    return Candidate(lambda i: linear(x, weights[i], None), len(sets))
