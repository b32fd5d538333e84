"""Distance of a model from the original: perplexity, KL divergence, top-1 agreement.

Every number is paired: both models predict the same tokens from the same contexts. The mean KL
divergence KL(original || other) is the number to compare; perplexity can improve by luck.
Standard errors are over sequences: tokens of one sequence are not independent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.argument import cache_argument
from ..errors import VQError

Forward = Callable[[Tensor], Tensor]
"""Token ids [sequences, tokens] -> float32 logits [sequences, tokens - 1, vocabulary]."""


@dataclass(frozen=True)
class Score:
    """One model against the original, over every predicted token of a text.

    Args:
        perplexity: exp of the mean negative log-likelihood.
        change: perplexity over the original's, minus 1, in percent; `change_se` its standard error.
        kld: mean KL(original || model) in nats; `kld_se` its standard error.
        kld_p99: 99th percentile of the per-token divergence: the tail that a mean hides.
        top1: predictions with the original's argmax, in percent; `top1_se` its standard error.
        tokens_per_second: of the scoring passes.
    """

    perplexity: float
    change: float
    change_se: float
    kld: float
    kld_se: float
    kld_p99: float
    top1: float
    top1_se: float
    tokens_per_second: float

    def to_dict(self) -> dict[str, float]:
        """JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class _Row:
    """Predictions of the original for the n scored tokens of one sequence."""

    probabilities: Tensor  # [n, vocabulary]
    negative_entropy: Tensor  # [n]
    best: Tensor  # [n]
    nll: float


class Reference:
    """The original's predictions on a text, computed once and kept while they fit `keep_bytes`.

    Args:
        forward: the original.
        sequences: token ids [sequences, tokens].
        skip: predictions at the start of each sequence that are not scored; for all, or for each.
        keep_bytes: what does not fit is computed again.
    """

    def __init__(
        self,
        forward: Forward,
        sequences: Tensor,
        *,
        skip: int | Sequence[int] = 0,
        keep_bytes: int = 2 << 30,
    ) -> None:
        self.forward = forward
        self.sequences = sequences
        self.skip = [skip] * len(sequences) if isinstance(skip, int) else list(skip)
        self._room = keep_bytes
        self._kept: dict[int, _Row] = {}

    def __getitem__(self, index: int) -> _Row:
        row = self._kept.get(index)
        if row is None:
            ids = self.sequences[index]
            logits = self.forward(ids[None])[0, self.skip[index] :]
            log_p = logits.log_softmax(-1)
            p = log_p.exp()
            negative_entropy = torch.einsum("tv,tv->t", p, log_p)
            row = _Row(p, negative_entropy, logits.argmax(-1), _nll(log_p, ids))
            if p.nbytes <= self._room:
                self._room -= p.nbytes
                self._kept[index] = row
        return row

    @property
    def perplexity(self) -> float:
        """Perplexity of the original."""
        count = len(self.sequences)
        return math.exp(sum(self[i].nll for i in range(count)) / count)


@torch.no_grad()
def score(forward: Forward, reference: Reference, batch: int = 1) -> Score:
    """Score a model on the reference's text, in batches of `batch` sequences.

    Raises:
        VQError: the vocabularies differ, or the model gives NaN.
    """
    nll, kld, top1, each = [], [], [], []
    seconds = 0.0
    for index, ids in enumerate(reference.sequences):
        row = reference[index]
        if index % batch == 0:
            start = time.perf_counter()
            several = forward(reference.sequences[index : index + batch])
            seconds += time.perf_counter() - start
        log_q = several[index % batch, reference.skip[index] :].log_softmax(-1)
        if log_q.shape != row.probabilities.shape:
            raise VQError(
                f"the model predicts {log_q.shape[-1]} tokens, the reference "
                f"{row.probabilities.shape[-1]}: they do not share a vocabulary."
            )
        log_q = log_q.to(row.probabilities.device)
        cross = torch.einsum("tv,tv->t", row.probabilities, log_q)
        divergence = (row.negative_entropy - cross).double()
        if not bool(divergence.isfinite().all()):
            raise VQError(f"the model predicts NaN or infinity in sequence {index} of the text.")
        each.append(divergence)
        kld.append(divergence.mean().item())
        top1.append((log_q.argmax(-1) == row.best).double().mean().item())
        nll.append((_nll(log_q, ids), row.nll))
    ours, theirs = torch.tensor(nll, dtype=torch.float64).unbind(1)
    mean_change, se_change = _mean_se(ours - theirs)
    kld_mean, kld_se = _mean_se(torch.tensor(kld, dtype=torch.float64))
    top1_mean, top1_se = _mean_se(torch.tensor(top1, dtype=torch.float64))
    tail = torch.cat(each)
    return Score(
        perplexity=math.exp(ours.mean().item()),
        change=100 * math.expm1(mean_change),
        change_se=100 * se_change,
        kld=kld_mean,
        kld_se=kld_se,
        kld_p99=tail.kthvalue(max(1, math.ceil(0.99 * len(tail)))).values.item(),
        top1=100 * top1_mean,
        top1_se=100 * top1_se,
        tokens_per_second=reference.sequences.numel() / max(seconds, 1e-9),
    )


def model_forward(
    model: Any, new_cache: Callable[[], Any] | None = None, *, prompt: int = 1, chunk: int = 8
) -> Forward:
    """The forward pass of a Transformers causal language model, as `score` wants it.

    Args:
        model: the model.
        new_cache: makes an empty KV cache. The tokens are then fed in steps, so that predictions
            read what was stored; those of the prompt do not.
        prompt: tokens of the first step.
        chunk: tokens of every later step. A query has up to `chunk` - 1 more exact tokens behind it
            than in generation.
    """

    @torch.no_grad()
    def forward(ids: Tensor) -> Tensor:
        ids = ids.to(model.device)
        if new_cache is None:
            whole: Tensor = model(ids, use_cache=False).logits[:, :-1].float()
            return whole
        cache = new_cache()
        steps = [
            model(piece, **{cache_argument(model): cache}, use_cache=True).logits.float()
            for piece in (ids[:, :prompt], *ids[:, prompt:].split(chunk, dim=1))
        ]
        return torch.cat(steps, 1)[:, :-1]

    return forward


def _nll(log_p: Tensor, ids: Tensor) -> float:
    targets = ids[-len(log_p) :, None].to(log_p.device)
    return -log_p.gather(1, targets).double().mean().item()


def _mean_se(values: Tensor) -> tuple[float, float]:
    """Mean and standard error over sequences."""
    spread = values.std().item() if len(values) > 1 else math.nan
    return values.mean().item(), spread / math.sqrt(len(values))
