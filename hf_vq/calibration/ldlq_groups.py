"""LDLQ feedback of the layers that read the same tensor: factorized once for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..fit import FittedWeight, fit_weight, fixed_tensors
from ..fit.correlation import choose
from ..fit.ldlq import DAMPING, Feedback
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.stored_weight import rotation_of
from .hessians import Site
from .targets import Target


class LdlqGroups:
    """Feedback matrices of the layers of a site, one for each rotation, expert and correlation.

    Args:
        damping: of all, which then believe H whole; None is DAMPING, and how far moments between
            different inputs are believed is chosen for each matrix on held-out inputs.
    """

    def __init__(
        self, site: Site, schemes: Mapping[str, LinearScheme], seed: int, damping: float | None
    ) -> None:
        self.site, self.schemes, self.seed, self.damping = site, schemes, seed, damping
        self.raised: dict[str, float] = {}  # dampings that a factorization needed, by tensor
        self._found: dict[tuple[str, int, int, float], Feedback] = {}

    def of(self, target: Target, matrix: Tensor, expert: int = 0) -> Feedback:
        """The feedback of one matrix [out, in]."""
        if self.damping is not None or not self.site.unseen_tokens:
            return self._with(target, expert, 1.0)
        scheme = self.schemes[target.layer]

        def fit(rows: Tensor, feedback: Feedback) -> FittedWeight:
            return fit_weight(rows, scheme, seed=self.seed, where=target.name, feedback=feedback)

        chosen = choose(matrix, scheme, lambda one: self._with(target, expert, one), fit)
        return self._with(target, expert, chosen)

    def _with(self, target: Target, expert: int, correlation: float) -> Feedback:
        scheme = self.schemes[target.layer]
        damping = DAMPING if self.damping is None else self.damping
        rotation = (
            ("none", 0)
            if isinstance(scheme, QoQScheme)
            else (scheme.rotation, scheme.rotation_block)
        )
        key = (*rotation, expert, correlation)
        if key not in self._found:
            if len(self.site.tokens) > 1:
                self._found.clear()  # else the Hessians of all experts are in memory twice
            hessian = self.site.hessian(expert)
            fixed = fixed_tensors(scheme, len(hessian), self.seed, hessian.device)
            where = f"{target.name}[{expert}]" if target.fused else target.name
            self._found[key] = Feedback(
                hessian, scheme, rotation_of(fixed), damping=damping, correlation=correlation,
                where=where, unseen=self.site.unseen_hessian(),
            )  # fmt: skip
        found = self._found[key]
        if found.damping > damping:
            self.raised[target.name] = max(self.raised.get(target.name, 0.0), found.damping)
        return found

    def fallbacks(self, target: Target) -> dict[str, str]:
        """Deviations from the requested calibration of one dense tensor, by its name."""
        reasons = []
        none = [str(expert) for expert, tokens in enumerate(self.site.tokens) if not tokens]
        if none:
            reasons.append(
                f"has experts without a token ({', '.join(none)}): calibrated on the inputs of the "
                "other experts"
            )
        if target.name in self.raised:
            reasons.append(f"was calibrated with a damping of {self.raised[target.name]:g}")
        return {target.name: "; it ".join(reasons)} if reasons else {}
