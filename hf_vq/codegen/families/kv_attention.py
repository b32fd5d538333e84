"""Plans of attention over a quantized KV cache: candidates, feasible, cost, choose. No GPU."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from ...formats.packing import packed_size
from ...formats.scheme import VQScheme
from ..attention_plan import COLUMNS, TOKENS, AttentionPlan, Mask, parts
from ..jit.device import RESERVED_BYTES, Arch
from ..plan import Dtype
from .dequantize import NOT_HIDDEN, WARP_INSTRUCTIONS, Cost
from .table_layout import fused

MOST_QUERIES = 8  # of a row; for more, keys and values are dequantized once
LARGEST_DIM = 256
BUCKETS = SHORT, MIDDLE, LONG = 64, 4096, 1 << 16  # tokens for which a kernel is made
FEW, MANY = 32, 1024  # rows of the batch times kv heads, for which it is made
_INDEX_BITS, _INTEGER_BITS = 8, 4


def attendable(scheme: VQScheme, dim: int, what: str) -> str | None:
    """None if there is a kernel for keys or values (`what`) of `dim` numbers, else why not."""
    if scheme.lattice or scheme.residuals > 1 or scheme.codebook == "tile":
        return f"{what} have neither a codebook that all share nor one per channel group"
    if scheme.mode != "unbiased":
        return f"{what} have mode {scheme.mode!r}, which is not computed by kernels"
    width, bits = scheme.vector_size * fused(scheme), scheme.entry_bits * fused(scheme)
    if width not in (2, 4) or bits > _INDEX_BITS:
        return f"{what} are {scheme.notation()}: {bits} bits stand for {width} numbers"
    if not scheme.has_scale and bits != _INDEX_BITS:
        return f"{what} have learned codebooks of {1 << bits} entries, not {1 << _INDEX_BITS}"
    if scheme.has_zero and scheme.entry_bits != _INTEGER_BITS:
        return f"{what} are integers of {scheme.entry_bits} bits, not {_INTEGER_BITS}"
    if scheme.rotation not in ("none", "hadamard"):
        return f"{what} have a rotation {scheme.rotation!r}"
    if scheme.scale_group:
        return f"{what} have several scales per token"
    if dim % 16 or dim > LARGEST_DIM or len(parts(dim)) > 2:
        return f"{what} have {dim} channels, not 16, 32 .. 256 or a sum of two of them"
    return None


def token_bucket(tokens: int) -> int:
    """Bucket of a number of tokens; a growing cache changes its kernel twice."""
    return next((bucket for bucket in BUCKETS if tokens <= 2 * bucket), LONG)


def group_bucket(groups: int) -> int:
    """Bucket of the number of groups: rows of the batch times KV heads."""
    return FEW if groups < 8 * FEW else MANY


@dataclass(frozen=True)
class AttentionProblem:
    """A few queries of each row over its coded keys and values.

    Args:
        key: scheme of the keys.
        value: scheme of the values.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        columns: queries that share a kv head: its query heads times the new tokens.
        dtype: of queries, floats and the result.
        mask: kind of the mask.
        softcapped: whether logits are capped.
        tokens: that have codes: `SHORT`, `MIDDLE` or `LONG` (`token_bucket`).
        arch: of the GPU.
        page: tokens of a page, a multiple of `PAGE`; 0 = tapes.
        groups: rows of the batch times kv heads: `FEW` or `MANY` (`group_bucket`).
        rotary: whether keys have a rotary mean.
    """

    key: VQScheme
    value: VQScheme
    key_dim: int
    value_dim: int
    columns: int
    dtype: Dtype
    mask: Mask
    softcapped: bool
    tokens: int
    arch: Arch
    page: int = 0
    groups: int = FEW
    rotary: bool = False


_BLOCKS = ((512, 1), (384, 1), (256, 2), (256, 1), (128, 1))
_FEW_THREADS = 128  # only if shared memory holds no more codes in flight
_STEPS, _DEPTHS = (1, 2), (2, 3, 4, 6)
_REGISTERS = 60  # besides sums and queries
_LATENCY = 900  # cycles from asking for codes until they are there, with memory busy
_STEP = (0, 1000, 1200)  # cycles of a warp for a step of one or two tiles
_PROLOGUE = 8000  # cycles before the first tile and after the last one
_ENDS = 6400  # cycles between consecutive blocks, in which a single resident block reads nothing
_PER_BLOCK = 1500  # of a multiprocessor, of them: tables, floats
_PER_WARP = 250  # of a multiprocessor: its first copies, its sums
_WARPS = 8  # of a multiprocessor, that keep it busy
_ON_THEIR_WAY = 48 << 10  # bytes of codes for one multiprocessor, at best
_FIND = 113  # instructions that find logits of a rotary mean,
_FIND_TILE = 33  # and more of them for each tile of its table
_TABLE = 300  # cycles for each such tile, before the first step
_MEMORY = 0.93  # of its peak that can be had
_L1 = 32 << 10  # bytes of L1 cache: on an H200, launches that leave it fewer begin later
_LATER = 1300  # cycles by which they do


def plan_of(
    problem: AttentionProblem,
    threads: int,
    resident: int,
    steps: int,
    depth: int,
    centres: int = 1,
) -> AttentionPlan:
    """Plan of a problem and values of its tunable fields; `centres` is `rotary` of the plan, if the
    problem has any."""
    key, value, orders = problem.key, problem.value, swizzle_orders_of(problem)
    tiles = -(-problem.columns * orders // COLUMNS)
    learned = not (key.has_scale and value.has_scale)
    most = max(1, (256 if learned else 512) // max(problem.key_dim, problem.value_dim))
    tiles = min(1 << (tiles - 1).bit_length(), most, 4)
    return AttentionPlan(
        threads=threads, blocks_per_sm=resident, dtype=problem.dtype,
        key_dim=problem.key_dim, key_vector_size=key.vector_size, key_entry_bits=key.entry_bits,
        key_fused=fused(key), key_learned=not key.has_scale, key_integers=key.has_zero,
        key_block=key.block(problem.key_dim),
        value_dim=problem.value_dim, value_vector_size=value.vector_size,
        value_entry_bits=value.entry_bits, value_fused=fused(value),
        value_learned=not value.has_scale, value_integers=value.has_zero,
        value_block=value.block(problem.value_dim), one_codebook=_one_codebook(key, value),
        query_tiles=tiles, swizzle_orders=orders, paired=_pairs(problem), step_tiles=steps,
        pipeline_depth=depth,
        bulk=problem.arch.overlaps_launches, queries_in_registers=tiles == 1,
        mask=problem.mask, softcapped=problem.softcapped, page=problem.page,
        rotary=centres * problem.rotary,
    )  # fmt: skip


def _one_codebook(key: VQScheme, value: VQScheme) -> bool:
    """True if keys and values share a codebook. Learned codebooks belong to keys or to values, even
    if both have the same scheme."""
    sizes = [(side.vector_size, side.entry_bits) for side in (key, value)]
    return key.codebook == value.codebook == "universal" and sizes[0] == sizes[1]


def _pairs(problem: AttentionProblem) -> bool:
    """True if a query gets two MMA columns, and the words of a lane come in pairs
    (kernels/cuda/kv/attention/attention_gqa_small.cuh)."""
    dims = parts(problem.key_dim) + parts(problem.value_dim)
    universal = problem.key.has_scale and problem.value.has_scale
    return universal and 2 * problem.columns <= COLUMNS and not any(part % 32 for part in dims)


def swizzle_orders_of(problem: AttentionProblem) -> int:
    """Columns of a query (attention_swizzle.cuh): as many as leave all queries in one
    tile, if codebooks are learned. Eight need an even number of words of a value in each lane."""
    orders, most = 1, 8 if problem.value_dim % 32 == 0 else 4
    if problem.key.has_scale and problem.value.has_scale:
        return orders
    while 2 * orders * problem.columns <= COLUMNS and orders < most:
        orders *= 2
    return orders


def misfit(
    key: VQScheme, value: VQScheme, key_dim: int, value_dim: int, arch: Arch, rotary: bool = False
) -> str | None:
    """None if there is a kernel for keys and values together, else why not.

    Args:
        rotary: whether keys have a rotary mean.
    """
    if key.has_zero != value.has_zero and not (key.has_scale and value.has_scale):
        return "keys or values are integers, the others have a codebook per channel group"
    smallest = AttentionProblem(
        key, value, key_dim, value_dim, 1, Dtype.FLOAT16, Mask.NONE, False, SHORT, arch,
        rotary=rotary,
    )  # fmt: skip
    least = plan_of(smallest, 128, 1, 1, 2)
    if least.shared_bytes <= arch.shared_per_block:
        return None
    tables = least.table_bytes + least.rotary_bytes
    return (
        f"codebooks of keys and values{' and a rotary mean' * rotary} are {tables >> 10} KiB of "
        f"shared memory, a block has {arch.shared_per_block >> 10}"
    )


def candidates(problem: AttentionProblem) -> list[AttentionPlan]:
    """Every plan that could be meant for a problem, also those that cannot run."""
    pairs = (2, 1) if problem.rotary and _pairs(problem) else (1,)
    # What no thread copies is there a step later; with more steps ahead it never was faster.
    return [
        plan_of(problem, *block, steps, depth, centres)
        for block, steps, depth, centres in itertools.product(_BLOCKS, _STEPS, _DEPTHS, pairs)
        if depth == _DEPTHS[0] or not problem.arch.overlaps_launches
    ]


def registers(plan: AttentionPlan) -> int:
    """About how many registers a thread needs."""
    sums = 4 * plan.value_words * plan.query_tiles
    if plan.key_learned or plan.value_learned:
        mixed = plan.key_learned != plan.value_learned
        sums += 16 + 8 * (plan.swizzle_orders > 1 or mixed)  # the orders of a lane's groups
    if any(len(parts(dim)) > 1 for dim in (plan.key_dim, plan.value_dim)):
        sums += 16 + 4 * (plan.step_tiles - 1)  # addresses of both parts
    if plan.numbers > 1:
        sums += 12 + 4 * plan.paired  # zeros, their sums, and more words in flight
    queries = 12 * plan.query_tiles + 16 * (plan.query_tiles == 2)
    if plan.queries_in_registers:
        queries = plan.key_dim // 16 + 8 if plan.paired else plan.key_dim // 8
    if not plan.paired and 4 in (
        plan.key_vector_size * plan.key_fused,
        plan.value_vector_size * plan.value_fused,
    ):
        queries += 8  # entries of two registers are taken apart
    if plan.key_dim > 128 and not (plan.key_learned or plan.key_integers):
        queries += 16  # means and factors, while queries are rotated
    # Where queries are paired, the logits of a rotary mean are found in registers of other things.
    roomy = plan.paired and plan.key_dim <= 128 and plan.one_codebook
    return (
        _REGISTERS + sums + queries + 20 * (plan.step_tiles - 1) * plan.query_tiles
        + 8 * (plan.mask is not Mask.NONE) + 4 * plan.softcapped + 24 * (not plan.bulk)
        + 24 * (plan.rotary > 0 and not roomy)
        + 4 * (plan.rotary * plan.step_tiles > 2 and plan.page > 0)
    )  # fmt: skip


def feasible(plan: AttentionPlan, problem: AttentionProblem) -> str | None:
    """None if the plan solves the problem on its GPU, else the reason why not."""
    arch = problem.arch
    if plan.shared_bytes > arch.shared_per_block:
        return "tables and codes in flight do not fit into shared memory"
    if plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES) > arch.shared_per_sm:
        return "shared memory does not hold so many blocks"
    if plan.blocks_per_sm * plan.threads > arch.threads_per_sm:
        return "a multiprocessor does not hold so many threads"
    if registers(plan) > min(
        255, arch.registers_per_sm // (plan.blocks_per_sm * plan.threads) // 8 * 8
    ):
        return "the threads need too many registers"
    return None


def cost(plan: AttentionPlan, problem: AttentionProblem) -> Cost:
    """The modelled cost of a feasible plan."""
    arch, warps = problem.arch, plan.threads // 32
    across = -(-problem.columns // plan.columns)
    groups, tiles = problem.groups * across, -(-problem.tokens // TOKENS)
    sides = (problem.key, problem.key_dim), (problem.value, problem.value_dim)
    token = sum(
        packed_size(dim // scheme.vector_size, scheme.entry_bits) + 2 * scheme.row_numbers
        for scheme, dim in sides
    )
    count = splits(plan, groups, tiles, arch)
    blocks = groups * count
    rounds = -(-blocks // (arch.sms * plan.blocks_per_sm))  # waves of blocks
    steps = -(-tiles // (plan.step_tiles * count))  # of a block
    busiest = (
        min(-(-blocks // arch.sms), rounds * plan.blocks_per_sm) * steps * plan.step_tiles
    )  # tiles
    lookups = sum(dim // (scheme.vector_size * fused(scheme)) for scheme, dim in sides) // 2
    instructions = 120 + 2.6 * lookups + problem.value_dim / 4 * (1 + plan.query_tiles / 2)
    if plan.rotary:
        found = 2 * plan.step_tiles * plan.rotary  # tiles, at once
        instructions += (_FIND + _FIND_TILE * plan.rotary_tiles) / found
    nbytes = busiest * TOKENS * token
    on_their_way = min(
        plan.blocks_per_sm * warps * (plan.pipeline_depth - 1) * plan.step_tiles, max(busiest, 1)
    ) * TOKENS * token  # fmt: skip
    # Few warps wait for their own results; lookups wait behind too many codes that are asked for.
    stalls = max(1.0, _WARPS / (plan.blocks_per_sm * warps * (1 + 0.35 * (plan.step_tiles - 1))))
    queue = 1 + 0.15 * max(0.0, on_their_way / _ON_THEIR_WAY - 1)
    parts = {
        "DRAM": nbytes / (arch.dram_bytes_per_clock * _MEMORY),
        "instructions": 1.25 * stalls * busiest * instructions / WARP_INSTRUCTIONS,
        "latency": nbytes / max(on_their_way, 1) * _LATENCY,
        "step_tiles": rounds * -(-steps // warps) * _STEP[plan.step_tiles],
    }
    bound, longest = max(parts.items(), key=lambda part: part[1])
    busy = queue * (longest + NOT_HIDDEN * (sum(parts.values()) - longest))
    idle = (rounds - 1) * _ENDS / plan.blocks_per_sm**2
    shared = plan.blocks_per_sm * (plan.shared_bytes + RESERVED_BYTES)
    late = _LATER * (arch.overlaps_launches and shared > arch.shared_per_sm - _L1)
    ends = _PROLOGUE + (_PER_BLOCK + _PER_WARP * warps) * plan.blocks_per_sm
    cycles = busy + idle + late + ends + rounds * _TABLE * plan.rotary_tiles
    return Cost(problem.groups * problem.tokens * token, cycles, bound)


@functools.lru_cache(maxsize=1024)
def choose(problem: AttentionProblem) -> AttentionPlan | None:
    """The feasible plan of the lowest cost; None: there is none."""
    return next(iter(best(problem)), None)


def best(problem: AttentionProblem) -> list[AttentionPlan]:
    """The feasible plans, the one of the lowest cost first.

    Where none has room for all queries of a kv head, those for half as many: more blocks run them.
    """
    plans = [plan for plan in candidates(problem) if feasible(plan, problem) is None]
    if not plans and problem.columns > 1:
        return best(replace(problem, columns=-(-problem.columns // 2)))
    plans = [plan for plan in plans if plan.threads > _FEW_THREADS] or plans
    return sorted(plans, key=lambda plan: cost(plan, problem).cycles)


@functools.lru_cache(maxsize=4096)
def splits(plan: AttentionPlan, groups: int, tiles: int, arch: Arch) -> int:
    """Blocks among which the tokens of each group are split: they fill the GPU once, and every
    warp of them has a step. The kernel uses fewer where there are fewer tokens."""
    warps = plan.threads // 32
    return max(
        1, min(arch.sms * plan.blocks_per_sm // groups, -(-tiles // (plan.step_tiles * warps)))
    )
