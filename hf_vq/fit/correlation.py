"""How far block-LDLQ believes the moments between different inputs, chosen by held-out inputs.

    correlation * H + (1 - correlation) * diagonal of H

A text shows the power of each input soon, and what inputs have in common late: a layer that
believes few tokens can end worse than one that is rounded without them. A sample of rows is encoded
with each candidate, and the one whose outputs are nearest on the inputs that H has not seen is
taken. On other texts less is true than on the rest of the same one, so no candidate is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats.catalog import LinearScheme
from ..formats.scheme import VQScheme
from .ldlq import Feedback

if TYPE_CHECKING:
    from .weight import FittedWeight

CANDIDATES = (0.9, 0.7, 0.5)
ROWS = 64  # of a weight that are encoded with each candidate


def choose(
    weight: Tensor,
    scheme: LinearScheme,
    feedback: Callable[[float], Feedback],
    fit: Callable[[Tensor, Feedback], FittedWeight],
) -> float:
    """The correlation of CANDIDATES with the least error on held-out inputs.

    Learned codebooks, which are of a whole weight, and feedback without held-out inputs take 1.

    Args:
        weight: [out, in].
        feedback: of a correlation.
        fit: encodes rows.
    """
    universal = isinstance(scheme, VQScheme) and scheme.codebook == "universal"
    if not universal or feedback(CANDIDATES[0]).unseen is None:
        return 1.0
    count = min(ROWS, len(weight))
    rows = weight[torch.arange(count, device=weight.device) * len(weight) // count]
    errors = {one: fit(rows, feedback(one)).output_error for one in CANDIDATES}
    return min(errors, key=lambda one: errors[one])
