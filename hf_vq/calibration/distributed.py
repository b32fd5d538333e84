"""Several processes that calibrate one model together (`torchrun`, `accelerate launch`).

    rank 0   its sequences -> sum of x x^T --+                    +-- fits some layers --+
    rank 1   its sequences -> sum of x x^T --+-- all-reduce (H) --+-- fits some layers --+-- codes

Every process has the whole model and a shard of the text. One process fits a layer and sends the
codes to the others, so all processes have the same codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import VQCalibrationError
from .hessians import Site

Found = TypeVar("Found")


@contextmanager
def launched() -> Iterator[int]:
    """Join the processes of a launcher, if there is one; yields the rank of this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield ProcessGroup().rank
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The others wait while one writes text from the model, or fits its largest layer.
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(hours=6))
    try:
        yield dist.get_rank()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def launched_processes() -> int:
    """Processes that run this program together, whether torch.distributed has started or not."""
    return max(int(os.environ.get("WORLD_SIZE", "1")), ProcessGroup().size)


class ProcessGroup:
    """The default process group of torch.distributed; a single process if there is none.

    Attributes:
        size: number of processes.
        rank: of this one.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0

    def shard(self, items: Tensor) -> Tensor:
        """Sequences of this process: every `size`-th, from number `rank` on.

        Raises:
            VQCalibrationError: there are fewer sequences than processes.
        """
        if len(items) < self.size:
            raise VQCalibrationError(
                f"{len(items)} sequences cannot be shared by {self.size} processes. Give "
                "calibration more tokens or a shorter context, or start fewer processes."
            )
        return items[self.rank :: self.size]

    def broadcast(self, make: Callable[[], Found]) -> Found:
        """Call `make` in the first process and return its result in all."""
        if self.size == 1:
            return make()
        found = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[return-value]

    def all_gather(self, mine: Found) -> list[Found]:
        """Gather one object of every process, in the order of ranks."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def barrier(self) -> None:
        """Wait until every process calls it."""
        if self.size > 1:
            dist.barrier()

    def all_reduce(self, sites: Sequence[Site], device: torch.device) -> list[Site]:
        """Sum the sites of all processes; includes sites that this process has no tokens for."""
        if self.size == 1:
            return list(sites)
        own = {site.layers[0]: site for site in sites}
        found: dict[str, Site] = {}
        about = [(site.layers, site.total.shape, site.tokens, site.unseen_tokens) for site in sites]
        for layers, shape, tokens, unseen_tokens in (
            entry for one in self.all_gather(about) for entry in one
        ):
            site = found.get(layers[0])
            if site is None:
                empty = Site([], torch.zeros(0), [0] * len(tokens))
                site = found[layers[0]] = empty
                mine = own.get(layers[0])
                empty.total = torch.zeros(shape, device=device) if mine is None else mine.total
                if len(tokens) == 1:
                    empty.unseen = None if mine is None else mine.unseen
                    if empty.unseen is None:
                        empty.unseen = torch.zeros(shape[1:], device=device)
            site.layers = list(dict.fromkeys([*site.layers, *layers]))
            site.tokens = [a + b for a, b in zip(site.tokens, tokens, strict=True)]
            site.unseen_tokens += unseen_tokens
        for site in found.values():
            site.total = self._sum(site.total)
            if site.unseen is not None:
                site.unseen = self._sum(site.unseen)
        return list(found.values())

    @staticmethod
    def _sum(tensor: Tensor) -> Tensor:
        # NCCL sums on GPUs only, gloo everywhere.
        place = torch.device("cuda") if dist.get_backend() == "nccl" else tensor.device
        there = tensor.to(place)
        dist.all_reduce(there)
        return there.to(tensor.device)
