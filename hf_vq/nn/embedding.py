"""`VQEmbedding`: an embedding whose rows are integers, and the output head that is tied to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import env
from ..dispatch.entry import load
from ..dispatch.table import HEADS
from ..errors import VQConfigError
from ..formats.integers import decode_rows, encode_rows, row_bytes
from ..ops.library import autocasts, is_plain_eager
from .quantized_module import mark_initialized

_ROWS = 8192  # of the vocabulary, that a head decodes at a time


def head_product(x: Tensor, rows: Tensor, kind: str) -> Tensor:
    """x E^T with E in `rows`, uint8 [num_embeddings, row_bytes], in the dtype of `x`.

    One row of inputs is multiplied without decoding, in 15 bits, where `dispatch.HEADS` has what
    does it and no backend is forced.
    """
    width = x.shape[-1]
    forced = env.BACKEND.get()
    if kind == "int8" and x.numel() == width and x.device.type in HEADS and not forced:
        y: Tensor | None = None
        if is_plain_eager(x) and not autocasts(x.device):
            y = load(HEADS[x.device.type])(x, rows)
        if y is not None:
            return y
    parts = (decode_rows(part, kind, width).to(x.dtype) for part in rows.split(_ROWS))
    return torch.cat([nn.functional.linear(x, part) for part in parts], -1)


class _Rows(nn.Module):
    """What both have in common: `weight`, uint8 [num_embeddings, row_bytes].

    A tied head has the same parameter, which Transformers ties, moves and saves as any other.
    """

    kind: str
    features: int

    def _hold(self, kind: str, features: int, weight: Tensor) -> None:
        self.kind, self.features = kind, features
        self.register_parameter("weight", mark_initialized(weight))  # type: ignore[arg-type]

    def _decoded(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return decode_rows(rows, self.kind, self.features).to(dtype)


class VQEmbedding(_Rows, nn.Embedding):
    """An embedding whose rows are stored as `formats.integers`; only rows that are looked up are
    decoded.

    Args:
        source: the embedding to replace; on the meta device, an empty one is made.
        kind: `int8` or `int4`.
        where: its name, for errors.

    Raises:
        VQConfigError: an embedding that does more than look rows up.
        VQSchemeError: the rows cannot be stored.
        VQFormatError: they are not finite.
    """

    def __init__(self, source: nn.Embedding, kind: str, where: str = "the embedding") -> None:
        nn.Module.__init__(self)
        if type(source) is not nn.Embedding or source.max_norm is not None:
            raise VQConfigError(
                f"{where} ({type(source).__name__}) does more than look rows up, and stays dense. "
                "Leave embeddings out."
            )
        dense = source.weight
        self.num_embeddings, self.embedding_dim = dense.shape
        self.padding_idx, self.max_norm, self.norm_type = source.padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        size = self.num_embeddings, row_bytes(kind, self.embedding_dim, where)
        if dense.is_meta:
            stored = torch.empty(size, dtype=torch.uint8, device="meta")
        else:
            parts = dense.detach().split(_ROWS)
            stored = torch.cat([encode_rows(part, kind, where) for part in parts])
        self._hold(kind, self.embedding_dim, nn.Parameter(stored, requires_grad=False))
        # Empty: its dtype is that of what comes out. Transformers takes the dtype of a model's
        # first floating parameter for the model's, and casts it with the others.
        like = torch.empty(0, dtype=dense.dtype, device=dense.device)
        self.like = mark_initialized(nn.Parameter(like, requires_grad=False))
        self.train(source.training)

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., embedding_dim] of token ids, in the dtype of the model."""
        return self._decoded(nn.functional.embedding(input, self.weight), self.like.dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The dense embedding [num_embeddings, embedding_dim]."""
        return torch.cat([self._decoded(rows, dtype) for rows in self.weight.split(_ROWS)])

    def reset_parameters(self) -> None:
        """Do nothing: codes have no random initial value."""


class VQTiedHead(_Rows, nn.Linear):
    """y = E x with E the rows of a `VQEmbedding`, some thousand of which are decoded at a time.

    Args:
        embedding: whose parameter it shares.
    """

    bias: None  # type: ignore[assignment]

    def __init__(self, embedding: VQEmbedding) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("bias", None)
        self._hold(embedding.kind, embedding.embedding_dim, embedding.weight)
        self.train(embedding.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of `x`."""
        return head_product(x, self.weight, self.kind)

    def reset_parameters(self) -> None:
        """Do nothing: codes have no random initial value."""
