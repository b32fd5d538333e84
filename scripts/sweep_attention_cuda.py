#!/usr/bin/env python3
"""Sweep attention over coded caches on a GPU: wrong heads, heads that are no numbers, other bits.

    python scripts/sweep_attention_cuda.py [--seconds 240] [--processes 2] [--cases N] [--seed S]
                                           [--out OUT.jsonl]

The grid is schemes x rows of the batch x kv heads x query heads of each x contexts, as tapes and as
pages, shuffled. Each problem is called many times on the same inputs. Every head of the first call
is compared with float64 of the decoded codes, all other calls with the first one, bit by bit; both
on the GPU. A few requests are made, and copied to all rows and heads of the batch: so a context of
32,768 tokens in 4,096 heads has a reference, and the kernel reads as much memory as in a server.

Kernels are compiled first, by all cores, into the store (HF_VQ_STORE keeps them for the next run).
Processes share the GPUs of the machine, which must be equal. Exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.buckets`

from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.jit.compiler import cubin
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.jit.kernel_store import default_store
from hf_vq.evaluation.record import command_line, make_record, write_record
from hf_vq.ops import kv_attention
from tests.buckets import caches
from tests.buckets.attention import SCHEMES, AttentionCase, schemes

ROWS = (1, 3, 8, 31, 32, 64, 128)
HEADS = (1, 2, 5, 8, 16, 32)
SHARES = (1, 2, 3, 4, 8, 16)
CONTEXTS = (1, 65, 200, 1024, 4096, 9000, 32768)
DIM, PAGE = 128, 64
SINKS, WINDOW = 4, 64
POOL_ROWS, POOL_HEADS = 3, 2  # requests and heads that differ
DTYPE = torch.bfloat16
USUAL_BYTES = 1 << 29  # of a cache that every point of the grid may have; of larger ones, some
SOME = 16  # one of so many


@dataclass(frozen=True)
class Point:
    """A point of the grid."""

    scheme: str
    rows: int
    heads: int
    share: int
    tokens: int
    paged: bool

    @property
    def nbytes(self) -> float:
        """Approximate bytes of codes: at most 66 per token and head, for keys and for values each.

        A paged cache holds the pages of POOL_ROWS requests; further requests read the same pages.
        """
        return 132.0 * self.heads * self.tokens * (POOL_ROWS if self.paged else self.rows)

    def case(self) -> AttentionCase:
        """The same as a problem of the choosers."""
        return AttentionCase(
            self.scheme, (DIM, DIM), self.rows, self.heads, self.share, 1, self.tokens, False,
            PAGE if self.paged else 0, str(DTYPE)[6:], Mask.NONE, False,
        )  # fmt: skip


def grid(names: list[str]) -> Iterator[Point]:
    """All points; of those with a large cache, one in SOME."""
    number = 0
    shapes = itertools.product(ROWS, HEADS, SHARES, CONTEXTS, (False, True))
    for shape, name in itertools.product(shapes, names):
        point = Point(name, *shape)
        scheme = SCHEMES[name]
        if point.paged and not (scheme.key.has_scale and scheme.value.has_scale):
            continue
        number += 1
        if point.nbytes <= USUAL_BYTES or number % SOME == 0:
            yield point


def problem(point: Point, device: torch.device) -> tuple[Any, Any, Tensor]:
    """A query and its cache, and what is right in float64."""
    scheme, rows = SCHEMES[point.scheme], min(point.rows, POOL_ROWS)
    heads = min(point.heads, POOL_HEADS)
    of_row = torch.arange(point.rows, device=device) % rows
    of_head = torch.arange(point.heads, device=device) % heads
    query = torch.randn(rows, heads, point.share, DIM, device=device).to(DTYPE)
    few: caches.Cached
    if point.paged:
        paged = caches.pages(scheme, DTYPE, device, rows, point.heads, DIM, point.tokens, PAGE)
        for part in (paged.key.codes, paged.key.scale, paged.value.codes, paged.value.scale):
            part.copy_(part[:, of_head])
        mean = None if paged.key.mean is None else paged.key.mean[:, :heads]
        few = paged.replace(
            key_codes=paged.key.codes[:, :heads], key_scale=paged.key.scale[:, :heads],
            key_mean=mean,
            value_codes=paged.value.codes[:, :heads], value_scale=paged.value.scale[:, :heads],
        )  # fmt: skip
        assert paged.page_table is not None and paged.cache_seqlens is not None
        cached = paged.replace(
            key_mean=None if mean is None else mean[:, of_head].contiguous(),
            page_table=paged.page_table[of_row], cache_seqlens=paged.cache_seqlens[of_row],
        )  # fmt: skip
    else:
        window = min(WINDOW, point.tokens)
        few = caches.tape(
            scheme, DTYPE, device, rows, heads, (DIM, DIM), point.tokens - window, 1,
            min(SINKS, point.tokens), window,
        )  # fmt: skip
        books = {
            f"{which}_codebook": book if book.dim() == 3 else book[of_head]
            for which in ("key", "value")
            for book in (getattr(few, which).codebook,)
        }
        # `map` reaches codebooks of heads too, of four dimensions as codes, but without rows.
        without = few.replace(**dict.fromkeys(books, torch.empty(0, device=device)))
        cached = without.map(lambda x: x[of_row][:, of_head] if x.dim() == 4 else x)
        cached = cached.replace(**books)
    exact = caches.exact(
        query.flatten(1, 2)[:, :, None], few, None, softmax_scale=DIM**-0.5, softcap=0.0
    )
    exact = exact.squeeze(2).unflatten(1, (heads, point.share))[of_row][:, of_head]
    return query[of_row][:, of_head].flatten(1, 2)[:, :, None].contiguous(), cached, exact


def take_gpu(numbers: Any) -> None:
    """Give a process its GPU: the next of the queue."""
    torch.cuda.set_device(numbers.get())


def judge(
    calls: int, seed: int, until: float, numbered: tuple[int, Point]
) -> dict[str, int] | str | None:
    """Heads of the first call that are wrong or no numbers; calls, and heads, with other bits.

    Args:
        calls: of the kernel.
        seed: of all numbers; that of a point is larger by its number.
        until: as time.time() counts: later points are not begun.
        numbered: a point and its number.

    Returns:
        None if there was no time, "too large" where the cache does not fit.
    """
    number, point = numbered
    if time.time() > until:
        return None
    free, _ = torch.cuda.mem_get_info()
    if 3 * point.nbytes > free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        return "too large"
    torch.manual_seed(seed + number)
    device = torch.device("cuda", torch.cuda.current_device())
    query, cached, exact = problem(point, device)
    torch.full((calls * query.numel(),), float("nan"), dtype=DTYPE, device=device)  # is given next
    found = [kv_attention(query, cached, softmax_scale=DIM**-0.5) for _ in range(calls)]
    first = found[0].view(point.rows, point.heads, point.share, DIM)
    broken = (~first.isfinite()).any(-1)
    bound = torch.finfo(DTYPE).eps + 2.0**-10
    # As in tests.buckets.attention: of a head twice what all of them together have.
    error = (first.double() - exact).norm(dim=-1)
    wrong = ~broken & ~(error <= 2 * bound * exact.norm(dim=-1))
    bits = found[0].view(torch.int16)
    others = torch.stack([(one.view(torch.int16) != bits).any(-1).sum() for one in found[1:]])
    counts = torch.stack([broken.sum(), wrong.sum(), (others > 0).sum(), others.sum()])
    heads = point.rows * point.heads * point.share
    names = ("not_finite", "wrong", "calls_that_differ", "heads_that_differ")
    return {"heads": heads, **dict(zip(names, counts.tolist(), strict=True))}


def compile_all(points: list[Point]) -> int:
    """Kernels of all points, into the store; how many there are."""
    arch = device_arch(0)
    plans = {point.case().plan(arch) for point in points}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda plan: cubin(plan, arch.name, default_store()), plans))
    return len(plans)


def main() -> int:
    """0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="of the GPU (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--cases", type=int, help="at most so many points")
    parser.add_argument("--calls", type=int, default=30, help="of each point (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of numbers (0)")
    parser.add_argument("--schemes", nargs="+", help="only these")
    parser.add_argument("--revision", help="of the source (default: git is asked)")
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()
    names = args.schemes or schemes(device_arch(0))  # of those that have the same kernels, one
    points = list(grid(names))
    total = len(points)
    random.Random(args.seed).shuffle(points)
    points = points[: args.cases]
    start = time.monotonic()
    kernels = compile_all(points)
    compiled = time.monotonic() - start
    print(
        f"{total} points, {len(points)} asked for; {kernels} kernels in {compiled:.0f} s",
        flush=True,
    )
    sums: dict[str, dict[str, int]] = {name: {"points": 0} for name in names}
    bad, skipped, start = [], 0, time.monotonic()
    spawn = get_context("spawn")
    numbers = spawn.Queue()
    for process in range(args.processes):
        numbers.put(process % torch.cuda.device_count())
    run = partial(judge, args.calls, args.seed, time.time() + args.seconds)
    with ProcessPoolExecutor(args.processes, spawn, take_gpu, (numbers,)) as pool:
        for point, found in zip(points, pool.map(run, enumerate(points)), strict=True):
            if not isinstance(found, dict):
                skipped += found is not None
                continue
            of = sums[point.scheme]
            of["points"] += 1
            for name, count in found.items():
                of[name] = of.get(name, 0) + count
            if sum(found.values()) > found["heads"]:
                bad.append({**vars(point), **found})
                print("WRONG", bad[-1], flush=True)
    took, done = time.monotonic() - start, sum(of["points"] for of in sums.values())
    for name, of in sums.items():
        print(f"{name:14}", *(f"{key} {count:,}" for key, count in of.items()))
    print(f"{done} of {total} points, {args.calls} calls each, {took:.0f} s; {skipped} too large; "
          f"{len(bad)} points are wrong")  # fmt: skip
    if args.out:
        options = dict.fromkeys(("seconds", "processes", "cases", "calls", "seed", "schemes"), "")
        command = command_line("python scripts/sweep_attention_cuda.py", parser, args, options)
        settings = {
            "rows": ROWS, "kv_heads": HEADS, "query_heads_of_each": SHARES, "contexts": CONTEXTS,
            "head_dim": DIM, "page": PAGE, "dtype": str(DTYPE)[6:], "calls": args.calls,
            "seed": args.seed, "points_of_the_grid": total,
        }  # fmt: skip
        results = {"points": done, "too_large": skipped, "kernels": kernels, "seconds": took,
                   "schemes": sums, "wrong_points": bad}  # fmt: skip
        record = make_record(
            "cuda-attention-sweep", command, settings, results, args.revision, device="cuda"
        )
        write_record(json.loads(json.dumps(record)), args.out)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
