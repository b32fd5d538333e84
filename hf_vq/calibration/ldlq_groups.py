"""LDLQ feedback of the layers that read the same tensor: factorized once for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from ..fit import fixed_tensors
from ..fit.ldlq import Feedback
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.stored_weight import rotation_of
from .hessians import Site
from .targets import Target


class LdlqGroups:
    """Feedback matrices of the layers of a site, one for each rotation and expert."""

    def __init__(
        self, site: Site, schemes: Mapping[str, LinearScheme], seed: int, damping: float
    ) -> None:
        self.site, self.schemes, self.seed, self.damping = site, schemes, seed, damping
        self.most = 0.0  # largest damping that a factorization needed
        self._found: dict[tuple[str, int, int], Feedback] = {}

    def of(self, target: Target, expert: int = 0) -> Feedback:
        """The feedback of one matrix."""
        scheme = self.schemes[target.layer]
        rotation = (
            ("none", 0)
            if isinstance(scheme, QoQScheme)
            else (scheme.rotation, scheme.rotation_block)
        )
        key = (*rotation, expert)
        if key not in self._found:
            if len(self.site.tokens) > 1:
                self._found.clear()  # else the Hessians of all experts are in memory twice
            hessian = self.site.hessian(expert)
            fixed = fixed_tensors(scheme, len(hessian), self.seed, hessian.device)
            where = f"{target.name}[{expert}]" if target.fused else target.name
            self._found[key] = Feedback(
                hessian, scheme, rotation_of(fixed), damping=self.damping, where=where
            )
            self.most = max(self.most, self._found[key].damping)
        return self._found[key]

    def fallbacks(self, target: Target) -> dict[str, str]:
        """Deviations from the requested calibration of one dense tensor, by its name."""
        reasons = []
        none = [str(expert) for expert, tokens in enumerate(self.site.tokens) if not tokens]
        if none:
            reasons.append(
                f"has experts without a token ({', '.join(none)}): calibrated on the inputs of the "
                "other experts"
            )
        if self.most > self.damping:
            reasons.append(f"was calibrated with a damping of {self.most:g}")
        return {target.name: "; it ".join(reasons)} if reasons else {}
