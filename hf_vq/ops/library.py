"""The `hf_vq::` namespace of torch.library, where every op's schema is defined once.

`define` + `impl` and never `@custom_op`, which costs several microseconds more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats.scheme import VQScheme
from . import dispatch

library = torch.library.Library("hf_vq", "DEF")


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `hf_vq::name` with its schema, its implementation (the dispatch) and its fake."""
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_vq::{name}", fake, lib=library)


def problem(op: str, x: torch.Tensor, spec: str, n: int) -> dispatch.Problem:
    """The problem of an op whose input `x` is [..., k] and whose output has `n` features."""
    k = x.shape[-1]
    return dispatch.Problem(
        op, x.device.type, str(x.dtype)[6:], spec, dispatch.bucket(x.numel() // max(k, 1)), n, k
    )


def attention_problem(
    query: torch.Tensor,
    key_scheme: str,
    value_scheme: str,
    head_dim: int,
    value_dim: int,
    *,
    queries: int = 1,
    length: int = 0,
    layout: str = "",
) -> dispatch.Problem:
    """The problem of attention: `queries` of all rows over a cache of `length` tokens.

    Args:
        query: decides device and dtype.
        layout: of keys and of values; empty to ask what a new cache's should be.
    """
    return dispatch.Problem(
        "attention", query.device.type, str(query.dtype)[6:], f"{key_scheme} {value_scheme}",
        dispatch.bucket(queries), dispatch.bucket(length), head_dim, value_dim, layout,
    )  # fmt: skip


parse = VQScheme.parse
