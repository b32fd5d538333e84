"""Suite `cuda-w4a8-block`: one block of a Llama-3-8B shape with W4A8 weights on a GPU.

The suite compares quantization fused into norms and gated products with quantization in each
layer. Up to 256 tokens are one request each, which attends only to itself: a decode step without
its cache. More tokens are one prompt. Peers: the block with separate quantization, and dense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_vq.errors import VQBackendError
from hf_vq.evaluation.text_tables import markdown_table
from hf_vq.hf.fused_activations import fuse_inputs, separate_inputs

from ..random_llama import llama_config, random_llama
from ..tables.cuda_w4a8 import GROUPED, WHOLE
from ..tables.limits import pick
from ..timing import Candidate, speedup, summary
from .timing import cold_copies, interleave_graphs

SCHEMES = ("qoq-w4a8", "qoq-w4a8-g128")
TOKENS = (1, 16, 64, 256, 1024)
HIDDEN, FFN, KV_HEADS = 4096, 14336, 8
_REQUESTS = 256  # at most; more tokens are a prompt
_DTYPE = torch.bfloat16

Rows = list[dict[str, Any]]


@torch.no_grad()
def run(
    *,
    schemes: Sequence[str] = SCHEMES,
    tokens: Sequence[int] = TOKENS,
    rounds: int = 10,
    hidden: int = HIDDEN,
    ffn: int = FFN,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Time every scheme at every number of tokens; `report` gets each row when it is known.

    Args:
        tokens: that the block is given.
        hidden, ffn: sizes of the block.

    Returns:
        (settings, results) of the record.

    Raises:
        VQBackendError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise VQBackendError("the suite cuda-w4a8-block needs a CUDA device.")
    models = {name: _model(name, hidden, ffn) for name in (None, *schemes)}
    found: Rows = []
    for amount in tokens:
        known = {"bf16": _block(models[None], amount, hidden)}
        for name in schemes:
            known[f"{name} apart"] = _block(models[name], amount, hidden, separate_inputs)
            known[name] = _block(models[name], amount, hidden, fuse_inputs)
        seconds = interleave_graphs(known, rounds)
        for name in schemes:
            peers = {"bf16": seconds["bf16"], "apart": seconds[f"{name} apart"]}
            found.append({
                "name": name, "tokens": amount, **summary(seconds[name]),
                "us_apart": summary(peers["apart"])["us"],
                "speedup": {peer: speedup(seconds[name], of) for peer, of in peers.items()},
            })  # fmt: skip
            report(found[-1])
    settings = {"rounds": rounds, "dtype": str(_DTYPE)[6:], "hidden": hidden, "ffn": ffn}
    return settings, {"rows": found}


def _model(scheme: str | None, hidden: int, ffn: int) -> Any:
    """Build a model with so many blocks that their weights exceed every cache."""
    per_weight = 2 if scheme is None else 0.5
    copies = cold_copies(int(3 * hidden * ffn * per_weight))
    config = llama_config(KV_HEADS, _REQUESTS, layers=copies, hidden=hidden, ffn=ffn)
    return random_llama(config, _DTYPE, scheme, "cuda").model


def _block(
    model: Any,
    tokens: int,
    hidden: int,
    prepare: Callable[[nn.Module], None] = lambda block: None,
) -> Candidate:
    shape = (tokens, 1, hidden) if tokens <= _REQUESTS else (1, tokens, hidden)
    x = torch.randn(shape, dtype=_DTYPE, device="cuda")
    positions = model.rotary_emb(x, torch.arange(shape[1], device="cuda")[None])

    def call(i: int) -> Tensor:
        prepare(model.layers[i])
        y: Tensor = model.layers[i](x, position_embeddings=positions)
        return y

    return Candidate(call, len(model.layers))


def table(rows: Rows) -> str:
    """Times of a block with groups, how many times as fast as its peers it is, and in a line how
    much whole rows differ."""
    whole, grouped = (pick(rows, name=name) for name in (WHOLE, GROUPED))
    cells = [
        [f"{row['tokens']:,}", f"{row['us']:.1f}",
         *(f"{row['speedup'][peer]:.2f}" for peer in ("apart", "bf16"))]
        for row in grouped
    ]  # fmt: skip
    table = markdown_table(["tokens", "us", "x rounding apart", "x bf16"], cells)
    times = [one["us"] / row["us"] for one, row in zip(whole, grouped, strict=True)]
    said = f"takes {min(times):.2f} to {max(times):.2f} times as long."
    return f"{table}\n\n`{GROUPED}`; `{WHOLE}` {said}"
