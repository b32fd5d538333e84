"""The old name of what `docs/evaluation.md` imports; it goes with the next release.

Suites were run as `python -m hf_vq.bench`; they are `python -m benchmarks` of a checkout.
"""

import sys
import warnings

from ..evaluation import compare, evaluate

warnings.warn(
    "hf_vq.bench is hf_vq.evaluation now, and its suites are `python -m benchmarks` of a checkout.",
    FutureWarning,
    stacklevel=2,
)
for _module in (compare, evaluate):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
