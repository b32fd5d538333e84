"""`VQEmbedding`: an embedding whose rows are integers or codes, and the output head that is tied to
it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import VQConfigError
from ..formats import coded_rows
from ..formats.integers import decode_rows
from ..formats.scheme import VQScheme
from ..ops.program import Dense
from .dense_head import multiply_row
from .quantized_module import mark_initialized

_ROWS = 8192  # of the vocabulary, that a head decodes at a time


def head_product(x: Tensor, rows: Tensor, kind: str) -> Tensor:
    """x E^T with E in `rows` of `formats.integers`, in the dtype of `x`.

    One row of inputs is multiplied without decoding, in 15 bits, where `dispatch.HEADS` has what
    does it.
    """
    width = x.shape[-1]
    y = multiply_row(x, Dense(rows, kind, width)) if kind == "int8" else None
    if y is not None:
        return y
    parts = (decode_rows(part, kind, width).to(x.dtype) for part in rows.split(_ROWS))
    return torch.cat([nn.functional.linear(x, part) for part in parts], -1)


class _Rows(nn.Module):
    """What both have in common: `weight`, uint8 [num_embeddings, bytes], and what rows of codes
    have in addition.

    A tied head has the same parameters, which Transformers ties, moves and saves as any others.
    """

    kind: str
    features: int
    scheme: VQScheme | None  # of codes; None: integers
    keys: tuple[str, ...]  # of the tensors besides the codes

    def _hold(self, kind: str, features: int, stored: Mapping[str, nn.Parameter | None]) -> None:
        self.kind, self.features = kind, features
        self.scheme = coded_rows.scheme_of(kind)
        self.keys = tuple(stored)[1:]
        for key, parameter in stored.items():
            self.register_parameter("weight" if key == "codes" else key, parameter)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of rows of codes, by key (`formats.tensor_specs`)."""
        stored = {"codes": self.weight, **{key: getattr(self, key) for key in self.keys}}
        return coded_rows.tensors_of(stored)

    def _decoded(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return decode_rows(rows, self.kind, self.features).to(dtype)


class VQEmbedding(_Rows, nn.Embedding):
    """An embedding whose rows are stored as `formats.integers` or `formats.coded_rows`; only rows
    that are looked up are decoded.

    Args:
        source: the embedding to replace.
        kind: of the rows.
        stored: the tensors of the rows by key, codes first.
        where: its name, for errors.

    Raises:
        VQConfigError: an embedding that does more than look rows up.
    """

    def __init__(
        self,
        source: nn.Embedding,
        kind: str,
        stored: Mapping[str, Tensor],
        where: str = "the embedding",
    ) -> None:
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
        constants = {key: _constant(tensor) for key, tensor in stored.items()}
        self._hold(kind, self.embedding_dim, constants)
        # Empty: its dtype is that of what comes out. Transformers takes the dtype of a model's
        # first floating parameter for the model's, and casts it with the others.
        self.like = _constant(torch.empty(0, dtype=dense.dtype, device=dense.device))
        self.train(source.training)

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., embedding_dim] of token ids, in the dtype of the model."""
        if self.scheme is not None:
            rows = ops.look_up(input, self.tensors(), self.scheme, self.features)
            return rows.to(self.like.dtype)
        return self._decoded(nn.functional.embedding(input, self.weight), self.like.dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The dense embedding [num_embeddings, embedding_dim]."""
        if self.scheme is not None:
            return ops.decode_weight(self.tensors(), self.scheme, self.features, dtype)
        return torch.cat([self._decoded(rows, dtype) for rows in self.weight.split(_ROWS)])

    def reset_parameters(self) -> None:
        """Do nothing: codes have no random initial value."""


class VQTiedHead(_Rows, nn.Linear):
    """y = E x with E the rows of a `VQEmbedding`: rows of codes are multiplied as those of a
    `VQLinear`; of integers, some thousand are decoded at a time.

    Args:
        embedding: whose parameters it shares.
    """

    bias: None  # type: ignore[assignment]

    def __init__(self, embedding: VQEmbedding) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("bias", None)
        shared = {key: embedding._parameters[key] for key in embedding.keys}
        codes = {"codes": embedding._parameters["weight"]}
        self._hold(embedding.kind, embedding.embedding_dim, codes | shared)
        # Transformers reads it when it saves: which names of shared tensors are left out.
        self._tied_weights_keys = {key: key for key in self.keys}
        self.train(embedding.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of `x`."""
        if self.scheme is not None:
            return ops.linear(x, self.tensors(), None, self.scheme)
        return head_product(x, self.weight, self.kind)

    def reset_parameters(self) -> None:
        """Do nothing: codes have no random initial value."""


def _constant(tensor: Tensor) -> nn.Parameter:
    return mark_initialized(nn.Parameter(tensor, requires_grad=False))  # type: ignore[return-value]
