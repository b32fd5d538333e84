"""Products by the tiles of a CPU with AMX: it multiplies bfloat16 several times faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def multiplied_by_tiles() -> torch.dtype | None:
    """bfloat16 on a CPU with AMX, else None."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return torch.bfloat16 if has_tiles() else None


@contextmanager
def rounded_products() -> Iterator[None]:
    """Let such a CPU round the factors of float32 products for the duration of the block; sums stay
    in float32."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if multiplied_by_tiles() is not None:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
