"""Plans of the W4A8 kernels: 4-bit weights times 8-bit activations (QoQ, formats/qoq.py)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan, ring_bytes

CHUNK = 128  # columns of one chunk: four lanes, 32 each


class Source(enum.Enum):
    """Input of the 8-bit quantizer: tokens in memory, RMSNorm or SiLU * up (w4a8_inputs.cu)."""

    TOKENS = "tokens"
    NORM = "norm"
    GATED = "gated"


@dataclass(frozen=True)
class RoundingPlan(Plan):
    """Kernels that quantize tokens to 8 bits (kernels/cuda/w4a8/w4a8_round.cuh).

    Args:
        dtype: of x, FLOAT16 or BFLOAT16.
        group: weights that share an integer step and zero; 0 = the whole row.
        bias: dtype of the bias.
        columns: in_features, a multiple of 32.
    """

    dtype: Dtype
    group: int
    bias: Dtype
    columns: int

    @property
    def padded(self) -> int:
        """Columns, rounded up to whole chunks."""
        return -(-self.columns // CHUNK) * CHUNK


@dataclass(frozen=True)
class W4A8InputsPlan(RoundingPlan):
    """Tokens to int8 in MMA-fragment order (kernels/cuda/w4a8/w4a8_inputs.cu).

    Args:
        swizzled: the order is that of a `W4A8WidePlan` (128-byte swizzle); else of a `W4A8Plan`.
        source: input of the quantizer.
    """

    template: ClassVar[str] = "w4a8/w4a8_inputs"
    swizzled: bool
    source: Source


@dataclass(frozen=True)
class W4A8Plan(RoundingPlan):
    """4-bit weights times few 8-bit tokens (kernels/cuda/w4a8/w4a8.cu).

    Args:
        split_k_warps: warps that split the columns of the same rows (split-K).
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        pipeline_depth: chunks whose codes a warp has in flight.
        single: there is one token; x is in its own order.
        rounds: each block quantizes the token itself; else an inputs kernel did.
    """

    template: ClassVar[str] = "w4a8/w4a8"
    split_k_warps: int
    row_tiles: int
    token_tiles: int
    pipeline_depth: int
    single: bool
    rounds: bool

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return 16 * self.row_tiles * self.threads // 32 // self.split_k_warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: scales, steps and zeros, a token, sums."""
        groups = self.columns // self.group if self.group else 0
        inputs = self.padded * self.single + 256 * self.rounds
        sums = self.tile_rows // 16 * self.token_tiles * self.split_k_warps * 512
        factors = self.tile_rows * 16 + 8 * 8 * self.token_tiles
        return factors + 2 * self.tile_rows * groups + inputs + sums * (self.split_k_warps > 1)


@dataclass(frozen=True)
class W4A8WidePlan(Plan):
    """4-bit weights times many 8-bit tokens with wgmma (kernels/cuda/w4a8/w4a8_wgmma.cu).

    Args:
        dtype: of y, FLOAT16 or BFLOAT16.
        group: weights that share an integer step and zero; 0 = the whole row.
        groups: groups of a row; 0 = the whole row is one group.
        bias: dtype of the bias.
        token_tile: tokens of a block.
        split_k_warpgroups: warpgroups that share rows and take chunks round-robin (split-K).
        x_stages: buffers of the TMA ring for x, 128 columns each.
        pipeline_depth: chunks whose codes a lane has in flight, an even number.
        l2_prefetch: distance in chunks of the L2 prefetch of codes; 0 = no prefetch.
    """

    template: ClassVar[str] = "w4a8/w4a8_wgmma"
    dtype: Dtype
    group: int
    groups: int
    bias: Dtype
    token_tile: int
    split_k_warpgroups: int
    x_stages: int
    pipeline_depth: int
    l2_prefetch: int

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups; one producer warpgroup more loads x."""
        return self.threads // 128 - 1

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return 64 * self.warpgroups // self.split_k_warpgroups

    @property
    def slot_bytes(self) -> int:
        """Bytes of one buffer of the ring."""
        return CHUNK * self.token_tile

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes: the ring; scales, steps, zeros, sums."""
        grids = 2 * 16 * (self.groups // 4 * 4 + 4) if self.group else 0
        of_group = 64 * 16 + 4 * grids + self.split_k_warpgroups * 32 * (64 * 4 + 16)
        ring = ring_bytes(self.x_stages, self.token_tile, self.warpgroups, 1)
        return ring + self.warpgroups * of_group
