"""Plans of kernels that multiply weights of 4 bits with inputs of 8 (formats/qoq.py)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from .plan import Dtype, Plan, shared_of_ring

CHUNK = 128  # columns of four lanes, that their kernels take together


class Source(enum.Enum):
    """What is rounded: tokens in memory, or what is made of them (w4a8_inputs.cu)."""

    TOKENS = "tokens"
    NORM = "norm"
    GATED = "gated"


@dataclass(frozen=True)
class RoundingPlan(Plan):
    """Where tokens are rounded to 8 bits (kernels/cuda/w4a8/w4a8_round.cuh).

    Args:
        dtype: of x, FLOAT16 or BFLOAT16.
        group: weights that share a step; 0 = the whole row.
        bias: dtype of the bias.
        columns: of a row, a multiple of 32.
    """

    dtype: Dtype
    group: int
    bias: Dtype
    columns: int

    @property
    def padded(self) -> int:
        """Columns in whole chunks."""
        return -(-self.columns // CHUNK) * CHUNK


@dataclass(frozen=True)
class W4A8InputsPlan(RoundingPlan):
    """Tokens as integers, in the order of a product (kernels/cuda/w4a8/w4a8_inputs.cu).

    Args:
        swizzled: whether that is one of `W4A8WidePlan`; else it is one of `W4A8Plan`.
        source: what is rounded.
    """

    template: ClassVar[str] = "w4a8/w4a8_inputs"
    swizzled: bool
    source: Source


@dataclass(frozen=True)
class W4A8Plan(RoundingPlan):
    """Weights of 4 bits times tokens of 8 (kernels/cuda/w4a8/w4a8.cu).

    Args:
        split: warps that share the columns of the same rows.
        row_tiles: tiles of 16 rows that a warp multiplies with the same input.
        token_tiles: tiles of 8 tokens.
        steps: chunks of codes that a warp has on their way at a time.
        alone: whether there is one token, in the order of one.
        rounds: whether a block rounds it for itself.
    """

    template: ClassVar[str] = "w4a8/w4a8"
    split: int
    row_tiles: int
    token_tiles: int
    steps: int
    alone: bool
    rounds: bool

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return 16 * self.row_tiles * self.threads // 32 // self.split

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: factors of rows and tokens, steps and zeros, a token, sums."""
        groups = self.columns // self.group if self.group else 0
        inputs = self.padded * self.alone + 256 * self.rounds
        meeting = self.tile_rows // 16 * self.token_tiles * self.split * 512
        factors = self.tile_rows * 16 + 8 * 8 * self.token_tiles
        return factors + 2 * self.tile_rows * groups + inputs + meeting * (self.split > 1)


@dataclass(frozen=True)
class W4A8WidePlan(Plan):
    """Weights of 4 bits times many tokens of 8, on Hopper (kernels/cuda/w4a8/w4a8_wgmma.cu).

    Args:
        dtype: of y, FLOAT16 or BFLOAT16.
        group: weights that share a step; 0 = the whole row.
        groups: of a row; 0 = the whole row is one.
        bias: dtype of the bias.
        token_tile: tokens of a block.
        teams: warpgroups that have the same rows, and take chunks in turn.
        depth: slots of the ring for x, of 128 columns each.
        steps: chunks whose codes a lane has on their way at a time, an even number.
        ahead: chunks by which codes are brought to L2 before they are loaded; 0 = they are not.
    """

    template: ClassVar[str] = "w4a8/w4a8_wgmma"
    dtype: Dtype
    group: int
    groups: int
    bias: Dtype
    token_tile: int
    teams: int
    depth: int
    steps: int
    ahead: int

    @property
    def warpgroups(self) -> int:
        """Those that multiply; one more reads x."""
        return self.threads // 128 - 1

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return 64 * self.warpgroups // self.teams

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return CHUNK * self.token_tile

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring; of each warpgroup factors, steps and zeros, sums."""
        grids = 2 * 16 * (self.groups // 4 * 4 + 4) if self.group else 0
        of_group = 64 * 16 + 4 * grids + self.teams * 32 * (64 * 4 + 16)
        ring = shared_of_ring(self.depth, self.token_tile, self.warpgroups, 1)
        return ring + self.warpgroups * of_group
