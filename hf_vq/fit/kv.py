"""Codebooks of a KV cache from recorded keys and values: what is kept of them, and k-means.

Per channel group: NoMAD-Attention, section 3.5: record the keys of each layer and head while the
original attention runs on a learning set, then cluster each sub-quantizer of each head by itself.
VQ-LLM's CQ does the same with values too, and may weight tokens by their Fisher information.

Per tensor: the universal codebook, moved by Lloyd's rounds to what rotated rows of one length
really are. Rows count by their energy, which is what their error is proportional to. Where that
helps nothing on tokens that it was not learned from, as with rows that are Gaussian, the universal
codebook is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import VQCacheError
from ..formats.nearest import NearestEntry
from ..formats.scheme import VQScheme
from ..formats.tensors import kv_codebook_spec
from ..formats.universal import universal_codebook
from ..transforms import rotate
from .kmeans import kmeans_in_groups, lloyd

ROUNDS = 10  # of k-means; twice as many change the error on keys by under 1 %
PER_ENTRY = 512  # vectors for each entry of a codebook per tensor
_AT_ONCE = 1 << 25  # numbers clustered at once: bounds the float32 copies of a large layer


class TokenSample:
    """The mean of all tokens of a stream, and a uniform sample of at most `size` of them.

    Reservoir sampling (Vitter's algorithm R, by blocks): memory does not grow with the stream, and
    two samples with one size and seed keep the same tokens.

    Args:
        size: tokens to keep; 0 keeps the mean alone.
        seed: of the choice.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: Tensor | None = None  # [H, size, D], filled from the front
        self._sum: Tensor | None = None  # [H, D]; float64: a stream can be long

    def add(self, states: Tensor) -> None:
        """Count the tokens of `states` [B, H, n, D]: all of row 0, then those of row 1, ..."""
        tokens = states.detach().transpose(1, 2).flatten(0, 1)  # [B * n, H, D]
        if not len(tokens):
            return
        total = tokens.float().sum(0).cpu().double()
        self._sum = total if self._sum is None else self._sum + total
        if self.size:
            self._sample(tokens)
        self.seen += len(tokens)

    def _sample(self, tokens: Tensor) -> None:
        if self._kept is None:
            self._kept = tokens.new_empty(self.size, *tokens.shape[1:], device="cpu")
        index = torch.arange(len(tokens))
        number = self.seen + index  # of the token in the stream: it replaces one with chance size/n
        draw = torch.rand(len(tokens), generator=self._generator, dtype=torch.float64)
        slot = torch.where(number < self.size, number, (draw * (number + 1)).long())
        inside = slot < self.size
        newest = torch.full((self.size,), -1)
        newest.scatter_reduce_(0, slot[inside], index[inside], "amax")
        slots = (newest >= 0).nonzero()[:, 0]
        self._kept[slots] = tokens[newest[slots].to(tokens.device)].cpu()

    @property
    def mean(self) -> Tensor:
        """Mean of all tokens seen: float32 [H, D]."""
        assert self._sum is not None, "no token was added"
        return (self._sum / self.seen).float()

    @property
    def tokens(self) -> Tensor:
        """The sample [H, tokens, D], in the dtype of the states, on the CPU."""
        assert self._kept is not None, "no token was added"
        return self._kept[: self.seen].transpose(0, 1)


@torch.no_grad()
def fit_kv_codebook(
    tokens: Tensor,
    scheme: VQScheme,
    *,
    gradients: Tensor | None = None,
    seed: int = 0,
    where: str = "the cache",
    device: torch.device | str = "cpu",
) -> Tensor:
    """Codebooks by k-means of `tokens` [H, n, D].

    Args:
        tokens: keys or values (centred, if the cache will centre them), any float dtype.
        scheme: with a codebook per `channel_group` or `tensor`; its rotation is applied first.
        gradients: of a loss with respect to `tokens`, [H, n, D]: vectors of a channel group then
            count by the squared length of theirs, the diagonal of the Fisher information (CQ).
        where: the layer, for messages.
        device: where to compute.

    Returns:
        fp16 on the CPU, as `kv_codebook_spec` says; codebooks of numbers (x = 1) ascend.

    Raises:
        VQSchemeError: head_dim does not fit the scheme.
        VQCacheError: the tokens are not finite, or too large for fp16 entries.
    """
    heads, _, dim = tokens.shape
    shape = kv_codebook_spec(scheme, heads, dim, where).shape
    if scheme.has_scale:
        codebooks = _of_all_rows(tokens.to(device), scheme, seed).half().cpu()[None]
    else:
        codebooks = _of_channel_groups(tokens, gradients, scheme, shape, seed, device)
    if not bool(codebooks.isfinite().all()):
        raise VQCacheError(
            f"{where} holds NaN, infinity or numbers beyond 65504, of which no codebook can be "
            "learned. Load the model in bfloat16 or float32."
        )
    return codebooks


def _of_channel_groups(
    tokens: Tensor,
    gradients: Tensor | None,
    scheme: VQScheme,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device | str,
) -> Tensor:
    heads, count, dim = tokens.shape
    step = max(1, _AT_ONCE // (count * dim))

    def vectors(states: Tensor) -> Tensor:
        rows = rotate(states.to(device).float(), scheme)
        return rows.unflatten(-1, (shape[1], shape[3])).transpose(1, 2).flatten(0, 1)

    books = []
    for head in range(0, heads, step):
        some = slice(head, head + step)
        weights = None if gradients is None else vectors(gradients[some]).square().sum(2)
        found = kmeans_in_groups(
            vectors(tokens[some]), shape[2], weights=weights, rounds=ROUNDS, seed=seed
        )
        books.append(found.half().cpu())
    return torch.cat(books).reshape(shape)


def _of_all_rows(tokens: Tensor, scheme: VQScheme, seed: int) -> Tensor:
    """A codebook [entries, x] of rotated rows over their root mean square, learned from all tokens
    but the last quarter, which decide whether it is better than the universal one."""
    rows = rotate(tokens.float(), scheme)
    rows, unseen = rows.split([rows.shape[1] - rows.shape[1] // 4, rows.shape[1] // 4], 1)
    size = rows.square().mean(-1, keepdim=True).sqrt()
    vectors = (rows / size.clamp_min(1e-30)).reshape(-1, scheme.vector_size)
    weights = size.square().expand(*size.shape[:2], rows.shape[2] // scheme.vector_size).flatten()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(vectors), generator=generator)[: PER_ENTRY * scheme.entries]
    chosen = chosen.to(vectors.device)
    universal = universal_codebook(scheme.vector_size, scheme.entry_bits).float().to(vectors.device)
    codebook = universal
    for _ in range(ROUNDS):
        codebook = lloyd(vectors[None, chosen], codebook[None], weights[None, chosen])[0]
    worse = _error(unseen, codebook) >= _error(unseen, universal)
    return universal if worse else codebook


def _error(rows: Tensor, codebook: Tensor) -> float:
    """Squared error of rows x [H, n, D] with the scale that a cache stores, |x|^2 / <x, q>."""
    size = rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    search = NearestEntry(codebook, grid=False)
    found = search.index((rows / size).reshape(-1, codebook.shape[1]))
    entries = search.codebook[found].reshape(rows.shape)
    energy = rows.square().sum(-1)
    scale = energy / (rows * entries).sum(-1).clamp_min(1e-30)
    wrong = scale.square() * entries.square().sum(-1) - energy
    return float(wrong.sum(dtype=torch.float64))
