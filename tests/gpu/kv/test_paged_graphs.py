"""A decoding step of one layer over pages of codes, in a CUDA graph that other requests replay.

As vLLM runs it (`hf_vq.vllm.attention`): keys, values, queries, slots, lengths and tables lie at
addresses that a graph knows, rows without a request have length 0 and slot -1, and what is chosen
on the host is chosen for the longest requests that there may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_vq.cache.codebooks import universal
from hf_vq.cache.key_means import Calibrated, Rotary
from hf_vq.formats import KV_SCHEMES
from hf_vq.ops import decode_kv, kv_attention
from hf_vq.ops.rotary_mean import rotated
from hf_vq.serving.batch import Table
from hf_vq.serving.pages import LayerPages, PageFormat
from tests.fixtures.cuda_layers import poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCALE, HEADS, GROUPS, DIM, WIDTH = 0.1, 2, 4, 128, 24
PAIRS = 32  # of channels that turn
NOWHERE = 1 << 30  # the number of a page far beyond all memory
SCHEMES = ["u4", "u3", "u2", "qserve-kv4"]


@dataclass
class Step:
    """Memory of a layer's pages and the buffers of a step, and what a step does with them.

    Args:
        scheme: of keys and values.
        page: tokens of a page.
        rows: tokens of a step, a request each.
        dtype: of keys, values and queries.
        mean: whether keys have one.
        turning: whether they have one that turns with the position.
    """

    scheme: str
    page: int
    rows: int
    dtype: torch.dtype = torch.bfloat16
    mean: bool = True
    turning: bool = False

    def __post_init__(self) -> None:
        device, kind = torch.device("cuda"), KV_SCHEMES[self.scheme]
        like = torch.empty(1, 1, 1, DIM, dtype=self.dtype, device=device)
        shape = PageFormat.of(kind, HEADS, DIM, self.page, like, self.turning)
        assert shape.tables
        self.pages = self.rows * 6 + WIDTH
        self.memory = torch.full((self.pages, shape.nbytes), 0xFF, dtype=torch.uint8, device=device)
        mean, turns = torch.randn(2, HEADS, DIM, device=device)
        turns[:, 2 * PAIRS :] = 0  # what does not turn is in the other mean
        rotary = Rotary(torch.logspace(0, -3, PAIRS, device=device)) if self.turning else None
        books = universal(kind.key, device), universal(kind.value, device)
        factors = torch.exp(torch.randn(HEADS, DIM, device=device) / 2)
        known = Calibrated(mean, turns if self.turning else None, smoothing=factors)
        self.layer = LayerPages(self.memory, shape, books, known if self.mean else None, rotary)
        # Queries, keys and values are parts of one product.
        self.qkv = torch.zeros(
            self.rows, (GROUPS + 2) * HEADS * DIM, dtype=self.dtype, device="cuda"
        )
        self.slots = torch.full((self.rows,), -1, device=device)
        self.lengths = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(self.rows, WIDTH, dtype=torch.int32, device=device)
        self.out = torch.empty(self.rows, HEADS * GROUPS, DIM, dtype=self.dtype, device=device)

    def prepare(self, lengths: list[int]) -> None:
        """Requests of so many tokens, in pages of any order, all but the newest token written; 0 is
        a row without one."""
        free, page = torch.randperm(self.pages).tolist(), self.page
        table = torch.full((self.rows, WIDTH), NOWHERE, dtype=torch.int32)
        slots = torch.full((self.rows,), -1)
        self.memory.fill_(0xFF)  # scales that are no numbers
        for row, length in enumerate(lengths):
            for at in range(-(-length // page)):
                table[row, at] = free.pop()
            every = torch.arange(length)
            places = table[row][every // page].long() * page + every % page
            if length:
                slots[row] = places[-1]
            if length > 1:
                past = torch.randn(2, 1, HEADS, length - 1, DIM, device="cuda").to(self.dtype)
                positions = every[:-1].cuda() if self.turning else None
                self.layer.put(past[0] * 2 + 1, past[1], places[:-1].cuda(), positions)
        self.qkv.copy_(torch.randn(self.qkv.shape))
        self.slots.copy_(slots)
        self.lengths.copy_(torch.tensor(lengths))
        self.table.copy_(table)
        self.out.fill_(torch.nan)

    def run(self) -> None:
        """Encode the newest tokens and attend, as the plugin does."""
        sizes = [part * HEADS * DIM for part in (GROUPS, 1, 1)]
        query, key, value = (x.unflatten(1, (-1, DIM)) for x in self.qkv.split(sizes, 1))
        table = Table(self.table, self.lengths, WIDTH * self.page)
        keys, values = (x.transpose(0, 1)[None] for x in (key, value))
        self.layer.put(keys, values, self.slots, table.newest if self.turning else None)
        view = self.layer.through(table, query)
        self.out[:] = kv_attention(query[:, :, None], view, softmax_scale=SCALE)[:, :, 0]

    def _mean(self, positions: Tensor) -> Tensor | None:
        """Mean of the keys at positions: float64 [H, n or 1, D]."""
        mean = None if self.layer.mean is None else self.layer.mean[0].double()
        if not self.turning:
            return mean
        rotary = self.layer.rotary
        turned = rotated(self.layer.rotary_mean, rotary.inv_freq, False, positions)[0].double()
        return turned if mean is None else mean + turned

    def right(self) -> Tensor:
        """Attention in float64 over what the codes in the pages say: [rows, Hq, D]."""
        found = torch.zeros(self.out.shape, dtype=torch.float64, device="cuda")
        for row, length in enumerate(self.lengths.tolist()):
            if not length:
                continue
            every = torch.arange(length, device="cuda")
            page, place = self.table[row].long()[every // self.page], every % self.page
            sides = []
            for side, mean in ((self.layer.k, self._mean(every)), (self.layer.v, None)):
                codes, scale = (
                    x[page, :, place].transpose(0, 1)[None].contiguous()
                    for x in (side.codes, side.scale)
                )
                x = decode_kv(codes, scale, side.codebook, side.side.scheme, DIM)[0].double()
                if side is self.layer.k and self.layer.smoothing is not None:
                    x = x / self.layer.smoothing[0].double()
                x = x if mean is None else x + mean
                sides.append(x.repeat_interleave(GROUPS, 0))
            query = self.qkv[row, : GROUPS * HEADS * DIM].view(-1, 1, DIM).double()
            weights = (SCALE * query @ sides[0].mT).softmax(-1)
            found[row] = (weights @ sides[1])[:, 0]
        return found


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """The graph of a step without requests, as vLLM captures it; everything is compiled before."""
    step.prepare([0] * step.rows)
    step.table.zero_()
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return graph


def check(step: Step, graph: torch.cuda.CUDAGraph, lengths: list[int]) -> None:
    """A replay gives the bits of a call, which are right, and writes the same codes."""
    step.prepare(lengths)
    before = step.memory.clone()
    poison()
    graph.replay()
    out, memory = step.out.clone(), step.memory.clone()
    step.memory.copy_(before)
    step.out.fill_(torch.nan)
    step.run()
    assert torch.equal(out, step.out)
    assert torch.equal(memory, step.memory)
    written = (memory != before).any(1).sum().item()
    assert written == sum(length > 0 for length in lengths)  # a page for each new token
    right = step.right()
    bound = (
        torch.finfo(step.dtype).eps + 2**-10
    )  # weights are rounded to fp16, and so is the result
    wrong = (out.double() - right).flatten(1).norm(dim=1)
    assert (wrong <= bound * right.flatten(1).norm(dim=1)).all()
    assert not out[step.lengths == 0].any()


@pytest.mark.parametrize("rows", [1, 3, 40, 300])  # few are split among blocks
@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_is_replayed_for_other_requests(scheme: str, page: int, rows: int) -> None:
    torch.manual_seed(0)
    step = Step(scheme, page, rows)
    graph = captured(step)
    long = min(WIDTH * page, 4 * page)
    for lengths in (
        torch.randint(1, long, (rows,)).tolist(),
        torch.randint(0, 2 * page, (rows,)).tolist(),
        [1] * rows,
        [WIDTH * page, *[0] * (rows - 1)],
        [page] * (rows // 2) + [page + 1] * (rows - rows // 2),
    ):
        check(step, graph, lengths)


@pytest.mark.parametrize(("mean", "turning"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_and_means(scheme: str, mean: bool, turning: bool) -> None:
    step = Step(scheme, 64, 5, torch.float16, mean, turning)
    graph = captured(step)
    for lengths in ([700, 0, 1, 64, 65], [1, 129, 0, 0, 1500]):
        check(step, graph, lengths)


def test_a_graph_grows_with_its_requests() -> None:
    """Replays one after another, without a call between them: each token is read by the next."""
    step = Step("u4", 64, 3)
    graph = captured(step)
    step.prepare([63, 1, 0])
    used = step.table[:, 0].tolist()
    step.table[0, 1] = next(page for page in range(step.pages) if page not in used)
    for _ in range(4):
        step.qkv.copy_(torch.randn(step.qkv.shape))
        graph.replay()
        right = step.right()
        wrong = (step.out.double() - right).flatten(1).norm(dim=1)
        assert (wrong <= 2**-6 * right.flatten(1).norm(dim=1)).all()
        step.lengths += step.lengths > 0
        newest = (step.lengths - 1).clamp_min(0)
        page = step.table.gather(1, (newest // 64)[:, None])[:, 0].long()
        step.slots.copy_(torch.where(step.lengths > 0, page * 64 + newest % 64, -1))
