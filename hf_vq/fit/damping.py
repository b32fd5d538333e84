"""The damping of block-LDLQ, chosen by what held-out inputs say.

    H + damping * mean(diagonal of H) * 1

Little damping believes all that few tokens say of the inputs, and a layer can end worse than one
that is rounded without them; much damping believes little. A sample of rows is encoded with each
candidate, and the one whose outputs are nearest on the inputs that H has not seen is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from .ldlq import DAMPING, Feedback

if TYPE_CHECKING:
    from .weight import FittedWeight

CANDIDATES = (DAMPING, 0.03, 0.1)
ROWS = 64  # of a weight that are encoded with each candidate


def choose(
    weight: Tensor,
    scheme: LinearScheme,
    feedback: Callable[[float], Feedback],
    fit: Callable[[Tensor, Feedback], FittedWeight],
) -> float:
    """The damping of CANDIDATES with the least error on held-out inputs.

    Learned codebooks, which are of a whole weight, and feedback without held-out inputs take
    DAMPING.

    Args:
        weight: [out, in].
        feedback: of a damping.
        fit: encodes rows.
    """
    universal = isinstance(scheme, VQScheme) and scheme.codebook == "universal"
    if not universal or feedback(DAMPING).unseen is None:
        return DAMPING
    count = min(ROWS, len(weight))
    rows = weight[torch.arange(count, device=weight.device) * len(weight) // count]
    errors = {one: fit(rows, feedback(one)).output_error for one in CANDIDATES}
    return min(errors, key=lambda one: errors[one])
