"""Feedback of the layers that read the same, made once for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from ..fit import fixed_tensors
from ..fit.ldlq import Feedback
from ..formats.catalog import LinearScheme
from ..formats.qoq import QoQScheme
from ..formats.stored_weight import rotation_of
from .hessians import Site
from .targets import Part


class Feedbacks:
    """What the inputs of the layers of a site say about their weights, for every rotation and
    expert."""

    def __init__(
        self, site: Site, schemes: Mapping[str, LinearScheme], seed: int, damping: float
    ) -> None:
        self.site, self.schemes, self.seed, self.damping = site, schemes, seed, damping
        self.most = 0.0  # damping that was needed
        self._found: dict[tuple[str, int, int], Feedback] = {}

    def of(self, part: Part, expert: int = 0) -> Feedback:
        """The feedback of one matrix."""
        scheme = self.schemes[part.layer]
        turned = (
            ("none", 0)
            if isinstance(scheme, QoQScheme)
            else (scheme.rotation, scheme.rotation_block)
        )
        key = (*turned, expert)
        if key not in self._found:
            if len(self.site.tokens) > 1:
                self._found.clear()  # the experts' second moments would be in memory twice
            moments = self.site.moments(expert)
            fixed = fixed_tensors(scheme, len(moments), self.seed, moments.device)
            where = f"{part.name}[{expert}]" if part.fused else part.name
            self._found[key] = Feedback(
                moments, scheme, rotation_of(fixed), damping=self.damping, where=where
            )
            self.most = max(self.most, self._found[key].damping)
        return self._found[key]

    def fallbacks(self, part: Part) -> dict[str, str]:
        """What was done otherwise than asked for one part, by name."""
        reasons = []
        none = [str(expert) for expert, tokens in enumerate(self.site.tokens) if not tokens]
        if none:
            reasons.append(
                f"has experts that no token was sent to ({', '.join(none)}): calibrated on what "
                "the other experts read"
            )
        if self.most > self.damping:
            reasons.append(f"was calibrated with a damping of {self.most:g}")
        return {part.name: "; it ".join(reasons)} if reasons else {}
