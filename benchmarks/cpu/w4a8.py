"""Suite `cpu-w4a8`: linear layers of 4-bit weights and 8-bit inputs on the CPU, against PyTorch.

Peers: 8-bit weights alone (`_weight_int8pack_mm`, what torchao's int8 weight-only runs), 8-bit
weights and inputs (`_int_mm` with the inputs rounded before it and scaled after it), 4-bit weights
alone (`_weight_int4pack_mm_for_cpu`), and dense layers. The weights of every call come from main
memory. Ours get bfloat16 inputs, and round them at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_vq import dispatch, ops
from hf_vq.formats.catalog import QOQ_SCHEMES
from hf_vq.formats.qoq import encode
from hf_vq.ops.library import linear_problem
from hf_vq.ops.w4a8 import quantize_tokens

from ..timing import Candidate, cold_copies, interleave, speedup, summary
from .linear import peers

SHAPES = ((4096, 4096), (14336, 4096))  # out_features, in_features
TOKENS = (1, 4, 16, 64, 256)


def run(
    *,
    rounds: int = 20,
    threads: Sequence[int] = (1, 2),
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time both schemes at every shape and number of tokens; `report` gets each row when known.

    Returns:
        (settings, results) of the record.
    """
    found: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    try:
        for shape in SHAPES:
            for tokens in TOKENS:
                for count in threads:
                    torch.set_num_threads(count)
                    for row in _rows(*shape, tokens, max(rounds // (1 + tokens // 64), 3)):
                        row["threads"] = count
                        found.append(row)
                        report(row)
    finally:
        torch.set_num_threads(before)
    return {"rounds": rounds, "dtype": "bfloat16"}, {"rows": found}


@torch.inference_mode()
def _rows(out_features: int, in_features: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16)
    against = {**_integers(x, out_features), **peers(x, out_features)}
    candidates = {name: _ours(name, x, out_features) for name in QOQ_SCHEMES} | against
    seconds = interleave(candidates, rounds)
    found = []
    for name in candidates:
        row: dict[str, Any] = {
            "name": name, "out_features": out_features, "in_features": in_features,
            "tokens": tokens, **summary(seconds[name]),
        }  # fmt: skip
        if name in QOQ_SCHEMES:
            problem = linear_problem("w4a8_linear", x, name, out_features)
            row["kernel"] = dispatch.select(problem).name
            row["speedup"] = {peer: speedup(seconds[name], seconds[peer]) for peer in against}
        found.append(row)
    return found


def _ours(name: str, x: Tensor, out_features: int) -> Candidate:
    weight = torch.randn(out_features, x.shape[-1])
    stored = encode(weight, QOQ_SCHEMES[name])
    sets = [
        {**stored, "codes": stored["codes"].clone()}
        for _ in range(cold_copies(stored["codes"].nbytes))
    ]
    return Candidate(lambda i: ops.w4a8_linear(x, sets[i], None, name), len(sets))


def _integers(x: Tensor, out_features: int) -> dict[str, Candidate]:
    """PyTorch's own products with weights of 8 bits."""
    weight = torch.randint(-127, 128, (out_features, x.shape[-1]), dtype=torch.int8)
    copies = [weight.clone() for _ in range(cold_copies(weight.nbytes))]
    scale = torch.rand(out_features).to(x.dtype)

    def both(i: int) -> Tensor:
        numbers, size = quantize_tokens(x)
        return (torch._int_mm(numbers, copies[i].T) * size * scale).to(x.dtype)

    return {
        "int8": Candidate(
            lambda i: torch.ops.aten._weight_int8pack_mm(x, copies[i], scale), len(copies)
        ),
        "int8 x int8": Candidate(both, len(copies)),
    }
