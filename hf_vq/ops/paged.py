"""`hf_vq::append_paged` and `hf_vq::attention_paged`: one layer of a KV cache in pages.

Rows of a batch are requests of any lengths; their codes lie in pages of T tokens each, in any order
and also shared. Two tensors on the device say where, the same for all layers, so that a CUDA graph
can be replayed when they have changed:

table   int32 [B, width]   the pages of each row's tokens: token j is in page table[row, j / T]
slots   int64 [n]          of each new token: its page times T, and its place there

All tokens are codes in canonical rows: there are no sinks and no window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..errors import VQCacheError
from ..formats.scheme import VQScheme
from .attention import without_autocast
from .library import define, name_of, only_result, parse


class PagedKV(NamedTuple):
    """One layer's keys and values, and where those of each row are. B rows, H key/value heads.

    Args:
        k_codes: uint8 [pages, H, T, bytes], canonical rows; pages may lie apart.
        k_scale: fp16 [pages, H, T, numbers].
        k_mean: float32 [1, H, 1, D], added to every decoded key; None = 0.
        v_codes: like `k_codes`; values have D numbers, too.
        v_scale: like `k_scale`.
        codebook_k: as for `ops.decode_kv`.
        codebook_v: likewise.
        table: int32 [B, width], pages in the order of the tokens. What lies behind those that hold
            `length` tokens is not read.
        length: int64 [B], tokens of each row with the new ones; 0 = none, which gives zeros.
        longest: no row has more tokens, and its pages are in `table`.
        key_scheme: spec string, how keys are encoded.
        value_scheme: spec string, how values are encoded.
    """

    k_codes: Tensor
    k_scale: Tensor
    k_mean: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    codebook_k: Tensor
    codebook_v: Tensor
    table: Tensor
    length: Tensor
    longest: int
    key_scheme: str
    value_scheme: str


def append_paged(
    x: Tensor,
    mean: Tensor | None,
    codebook: Tensor,
    codes: Tensor,
    scale: Tensor,
    slots: Tensor,
    scheme: str,
) -> None:
    """Encode x - mean [1, H, n, D] and write it to `slots` of pages.

    Args:
        mean: float32 [1, H, 1, D]; None = 0.
        codebook: as for `encode_kv`.
        codes: uint8 [pages, H, T, bytes]; written to.
        scale: fp16 [pages, H, T, numbers]; written to.
        slots: int64 [n], of pages that there are. One that several tokens have gets any of them.
        scheme: spec string.
    """
    run = _append if only_result(x) else torch.ops.hf_vq.append_paged.default
    run(x, mean, codebook, codes, scale, slots, scheme)


def attention_paged(
    query: Tensor,
    cached: PagedKV,
    *,
    scaling: float,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of each row over its codes.

    Args:
        query: [B, Hq, Q, D], Hq a multiple of H; the last query is the token at length - 1.
        cached: the layer.
        scaling: factor of the logits, usually D^-1/2.
        softcap: c of c tanh(s / c); 0 = off.
        s_aux: [Hq] logits that attend to nothing.

    Returns:
        [B, Hq, Q, D] of the dtype of `query`.

    Raises:
        VQCacheError: the shapes do not belong together.
    """
    rows, heads, _, _ = query.shape
    _, kv_heads, tokens, _ = cached.k_codes.shape
    width = cached.table.shape[1] if cached.table.dim() == 2 else -1
    if (
        heads % kv_heads
        or len(cached.table) != rows
        or cached.length.shape != (rows,)
        or cached.longest > width * tokens
    ):
        raise VQCacheError(
            f"attention got queries {list(query.shape)} and a table {list(cached.table.shape)} with"
            f" lengths {list(cached.length.shape)} up to {cached.longest} for pages of {tokens} "
            f"tokens and {kv_heads} heads; rows must be as many and pages enough."
        )
    alone = only_result(query, cached.k_codes, s_aux)
    run = _attention if alone else torch.ops.hf_vq.attention_paged.default
    with without_autocast(query.device):
        out: Tensor = run(query, *cached[:9], s_aux, cached.longest, scaling, softcap, *cached[10:])
    return out


def through_tables(
    keys: VQScheme, values: VQScheme, head_dim: int, page: int, like: Tensor
) -> bool:
    """Whether kernels read and write pages where they are, through tables and slots.

    Args:
        keys: scheme of the keys, rows of `head_dim` numbers.
        values: scheme of the values, likewise.
        page: tokens of a page.
        like: decides device and dtype of the queries.
    """
    names = keys.spec(), values.spec()
    problems: list[dispatch.Problem] = [_attention_problem(like, *names, head_dim, page)]
    problems += [_append_problem(like, name, head_dim, page) for name in names]
    return all(dispatch.select(problem).name != "reference" for problem in problems)


def _append_problem(x: Tensor, scheme: str, dim: int, page: int) -> dispatch.PagedAppendProblem:
    return dispatch.PagedAppendProblem(x.device.type, name_of(x.dtype), scheme, dim, page)


def _attention_problem(
    x: Tensor, key_scheme: str, value_scheme: str, dim: int, page: int
) -> dispatch.PagedAttentionProblem:
    return dispatch.PagedAttentionProblem(
        x.device.type, name_of(x.dtype), key_scheme, value_scheme, dim, page
    )


def _append(x: Tensor, *arguments: Any) -> None:
    *tensors, scheme = arguments
    problem = _append_problem(x, scheme, x.shape[3], tensors[2].shape[2])
    with without_autocast(x.device):
        dispatch.select(problem).run(x, *tensors, parse(scheme))


def _attention(query: Tensor, *arguments: Any) -> Tensor:
    *tensors, key_scheme, value_scheme = arguments
    problem = _attention_problem(
        query, key_scheme, value_scheme, query.shape[3], tensors[0].shape[2]
    )
    out: Tensor = dispatch.select(problem).run(
        query, *tensors, parse(key_scheme), parse(value_scheme)
    )
    return out


def _fake_append(x: Tensor, *arguments: Any) -> None:
    return None


def _fake_attention(query: Tensor, *arguments: Any) -> Tensor:
    return query.new_empty(query.shape)


define(
    "append_paged",
    "(Tensor x, Tensor? mean, Tensor codebook, Tensor(a!) codes, Tensor(b!) scale, Tensor slots, "
    "str scheme) -> ()",
    _append,
    _fake_append,
)
define(
    "attention_paged",
    "(Tensor query, Tensor k_codes, Tensor k_scale, Tensor? k_mean, Tensor v_codes, "
    "Tensor v_scale, Tensor codebook_k, Tensor codebook_v, Tensor table, Tensor length, "
    "Tensor? s_aux, int longest, float scaling, float softcap, str key_scheme, str value_scheme) "
    "-> Tensor",
    _attention,
    _fake_attention,
)
