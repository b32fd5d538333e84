"""vLLM's attention over blocks of codes against float64 attention over what the codes say.

Blocks lie in any order, of requests with lengths of their own; what no request has is poison. The
way of a GPU, by tables and slots, runs on a CPU too, where the reference computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hf_vq import patches
from hf_vq.cache.codebooks import universal
from hf_vq.cache.key_means import Calibrated
from hf_vq.errors import VQConfigError
from hf_vq.ops import decode_kv, encode_kv
from hf_vq.ops.layout import BLOCK, ROWS
from hf_vq.ops.rotary_mean import rotated
from hf_vq.serving import pages
from hf_vq.vllm import attention, kv_cache
from hf_vq.vllm.attention import VQAttentionImpl
from hf_vq.vllm.step import VQMetadata, VQMetadataBuilder

LAYER = "model.layers.3.self_attn.attn"
SCALE = 0.11
INV_FREQ = torch.tensor([1.0, 0.1, 0.01])


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=[False, True], ids=["host", "tables"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tables and slots are used, as on a GPU, where codes lie in rows."""
    if request.param:
        monkeypatch.setattr(pages, "layouts_for", lambda *args: (ROWS, ROWS))
    return bool(request.param)


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calibrated | None]:
    """What is known of the keys' means: nothing, until a test says so."""
    known: dict[str, Calibrated | None] = {"now": None}
    model = SimpleNamespace(model="nowhere", revision=None, hf_config=None)
    config = SimpleNamespace(model_config=model)
    monkeypatch.setattr(attention, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(kv_cache, "means_of", lambda *args: known["now"])
    return known


@dataclass
class Server:
    """One layer, its blocks, and the requests in them.

    Args:
        scheme: of the cache.
        page: tokens of a block.
        heads: of the keys.
        groups: queries of each.
        dim: of a head.
        tables: whether tables and slots are used, as on a GPU.
        softcap: of the logits.
        sinks: [Hq] logits that attend to nothing.
    """

    scheme: str
    page: int = 16
    heads: int = 2
    groups: int = 3
    dim: int = 64
    tables: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    dtype: torch.dtype = torch.float32
    blocks: int = 40

    def __post_init__(self) -> None:
        self.impl = VQAttentionImpl(
            self.heads * self.groups, self.dim, SCALE, self.heads, None, None,
            "auto", self.softcap, sinks=self.sinks,
        )  # fmt: skip
        self.impl.tables = self.tables
        size = kv_cache.chosen_bytes(self.dim)
        shape = self.blocks, self.heads, self.page, size
        self.memory = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.memory[:] = 0xFF  # a scale of these bits is no number
        spec = SimpleNamespace(block_size=self.page, num_kv_heads=self.heads, head_size=self.dim)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8), speculative_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        )  # fmt: skip
        self.builder = VQMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))
        self.builder.tables = self.tables
        self.builder.reorder_batch_threshold = 1 if self.tables else None
        self.layer = SimpleNamespace(layer_name=LAYER, dtype=self.dtype)
        self.free = torch.randperm(self.blocks - 1).add(1).tolist()  # 0 is vLLM's own
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.pages: list[list[int]] = []

    def admit(self, prefix: tuple[int, int] | None = None) -> int:
        """A new request; `prefix`: the request whose first tokens it has, and how many blocks."""
        none = torch.empty(0, self.heads, self.dim)
        parent, blocks = prefix or (0, 0)
        tokens = blocks * self.page
        self.keys.append(self.keys[parent][:tokens] if blocks else none)
        self.values.append(self.values[parent][:tokens] if blocks else none)
        self.pages.append(self.pages[parent][:blocks] if blocks else [])
        return len(self.keys) - 1

    def step(self, new: dict[int, int], filled: int = 0) -> tuple[Tensor, Tensor, VQMetadata]:
        """Run requests with that many new tokens each, single ones first, as vLLM orders them.

        Args:
            filled: tokens that fill up the batch, of nobody.

        Returns:
            What attention gives and what it must give, [tokens, Hq, D], and the step.
        """
        order = sorted(new, key=lambda request: new[request] > 1)
        count = sum(new.values())
        shape = count + filled, self.heads, self.dim
        keys, values = torch.randn(shape).to(self.dtype) * 2 + 1, torch.randn(shape).to(self.dtype)
        query = torch.randn(count + filled, self.heads * self.groups, self.dim).to(self.dtype)
        slots, begins, lengths = [], [0], []
        for request in order:
            rows = slice(begins[-1], begins[-1] + new[request])
            past = len(self.keys[request])
            self.keys[request] = torch.cat([self.keys[request], keys[rows].float()])
            self.values[request] = torch.cat([self.values[request], values[rows].float()])
            length = len(self.keys[request])
            while len(self.pages[request]) * self.page < length:
                self.pages[request].append(self.free.pop())
            slots += [
                self.pages[request][at // self.page] * self.page + at % self.page
                for at in range(past, length)
            ]
            begins.append(rows.stop)
            lengths.append(length)
        width = max(len(self.pages[request]) for request in order) + 2
        table = torch.zeros(len(order), width, dtype=torch.int32)
        for row, request in enumerate(order):
            table[row, : len(self.pages[request])] = torch.tensor(self.pages[request])
        where = torch.tensor(begins, dtype=torch.int32)
        given = CommonAttentionMetadata(
            query_start_loc=where, query_start_loc_cpu=where,
            seq_lens=torch.tensor(lengths, dtype=torch.int32), num_reqs=len(order),
            num_actual_tokens=count, max_query_len=max(new.values()), max_seq_len=max(lengths),
            block_table_tensor=table, slot_mapping=torch.tensor(slots + [-1] * filled),
        )  # fmt: skip
        made = self.builder.build(0, given)
        output = torch.full_like(query, torch.nan)
        with pytest.MonkeyPatch.context() as patch:
            context = SimpleNamespace(attn_metadata={LAYER: made})
            patch.setattr(attention, "get_forward_context", lambda: context)
            self.impl.do_kv_cache_update(self.layer, keys, values, self.memory, given.slot_mapping)
            self.impl.forward(self.layer, query, keys, values, self.memory, made, output)
        right = [
            self._right(request, query[begins[i] : begins[i + 1]])
            for i, request in enumerate(order)
        ]
        return output[:count], torch.cat(right), made

    def _right(self, request: int, query: Tensor) -> Tensor:
        """Attention in float64 of the last tokens of a request over what its codes say."""
        scheme = self.impl.scheme
        assert self.impl._pages is not None
        layer = self.impl._pages[1]
        mean = torch.zeros(1, 1, 1) if layer.mean is None else layer.mean[0]
        length = len(self.keys[request])
        if layer.turns:
            turning = rotated(layer.rotary_mean, INV_FREQ, False, torch.arange(length))
            mean = mean + turning[0]
        sides = []
        for x, side, less in (
            (self.keys[request], scheme.key, mean),
            (self.values[request], scheme.value, torch.zeros(1, 1, 1)),
        ):
            book, rows = universal(side, torch.device("cpu")), x.transpose(0, 1) - less
            codes, scale = encode_kv(rows, book, side)
            sides.append(decode_kv(codes, scale, book, side, self.dim).double() + less.double())
        keys, values = (x.repeat_interleave(self.groups, 0) for x in sides)
        logits = SCALE * query.double().transpose(0, 1) @ keys.mT
        if self.softcap:
            logits = self.softcap * (logits / self.softcap).tanh()
        new = len(query)
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        logits = logits.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.double()[:, None, None].expand(-1, new, 1)], -1)
        weights = logits.softmax(-1)[..., :length]
        return (weights @ values).transpose(0, 1).to(query.dtype)


def close(found: Tensor, right: Tensor, bytes_: bool = False) -> None:
    """Check what attention gives, up to the rounding of its dtype.

    Args:
        bytes_: kernels round queries and codebooks to bytes (`fixtures.kv.cpu_attention_float64`).
    """
    assert found.isfinite().all()
    wrong = (found.double() - right.double()).norm() / right.double().norm()
    assert wrong < (0.05 if bytes_ else 1e-4 if found.dtype == torch.float32 else 1e-2)


def run(server: Server) -> list[VQMetadata]:
    """Prompts, chunks of them, single tokens, and requests with a common prefix."""
    a, b, c = server.admit(), server.admit(), server.admit()
    page, steps = server.page, []
    kernels = page % BLOCK == 0 and not server.tables and server.scheme != "qserve-kv4"
    for new, filled in (
        ({a: page + 5, b: 1}, 0),
        ({a: 1, b: 3, c: 2 * page}, 2),
        ({a: 1, b: 1, c: 1}, 5),
        ({a: page - 7, c: 2, b: 1}, 0),
    ):
        found, right, made = server.step(new, filled)
        close(found, right, kernels)
        steps.append(made)
    d = server.admit(prefix=(c, 2))
    before = {p: server.memory[p].clone() for p in server.pages[d]}
    for new in ({d: 4, a: 1}, {d: 1, c: 1, b: 1}, {c: page, d: page}):
        close(*server.step(new)[:2], kernels)
    assert all(torch.equal(server.memory[p], was) for p, was in before.items())
    return steps


SHAPES = [(16, 64, 2, 3), (64, 128, 1, 4), (256, 64, 4, 1), (32, 128, 2, 1), (48, 64, 1, 2)]
"""Tokens of a block, numbers of a head, heads of the keys, queries of each."""


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [("u4", shape) for shape in SHAPES]
    + [(name, shape) for name in kv_cache.SCHEMES[1:] for shape in SHAPES[1:3]],
    ids=str,
)
def test_every_scheme(
    scheme: str, shape: tuple[int, ...], tables: bool, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", scheme)
    page, dim, heads, groups = shape
    steps = run(Server(scheme, page, heads, groups, dim, tables))
    assert all((made.batch is None) == tables for made in steps)
    assert not tables or all(made.direct for made in steps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(
    tables: bool, dtype: torch.dtype, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    run(Server("u4", 64, tables=tables, dtype=dtype))


@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("turning", [False, True])
def test_means_of_keys(
    tables: bool, page: int, turning: bool, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u2")
    rotary = SimpleNamespace(inv_freq=INV_FREQ, interleaved=False)
    monkeypatch.setattr(attention.Rotary, "of", lambda *args: rotary)
    turns = torch.randn(2, 64)
    turns[:, 2 * len(INV_FREQ) :] = 0  # what does not turn is in the other mean
    means["now"] = Calibrated(torch.randn(2, 64), turns if turning else None)
    run(Server("u2", page, tables=tables))


@pytest.mark.parametrize("turning", [False, True])
def test_a_step_without_requests(
    tables: bool, turning: bool, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM warms up, or captures what lies between two layers: nobody knows positions then, and
    all slots are nobody's."""
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    rotary = SimpleNamespace(inv_freq=INV_FREQ, interleaved=False)
    monkeypatch.setattr(attention.Rotary, "of", lambda *args: rotary)
    means["now"] = Calibrated(torch.randn(2, 64), torch.randn(2, 64) if turning else None)
    server = Server("u4", 64, tables=tables)
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    before = server.memory.clone()
    keys, query = torch.randn(2, 5, 2, 64), torch.randn(5, 6, 64)
    output = torch.full_like(query, torch.nan)
    nowhere = torch.full((5,), -1)
    server.impl.do_kv_cache_update(server.layer, *keys, server.memory, nowhere)
    server.impl.forward(server.layer, query, *keys, server.memory, None, output)
    assert torch.equal(server.memory, before) and not output.any()
    run(server)  # steps with requests follow


@pytest.mark.parametrize("page", [64, 256])
def test_softcap_and_sinks(
    tables: bool, page: int, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    run(Server("u4", page, tables=tables, softcap=2.0, sinks=torch.randn(6)))


def test_several_new_tokens_are_rows_of_their_own(
    means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As speculative decoding has them: up to the threshold no prompt is decoded."""
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u3")
    server = Server("u3", 64, tables=True)
    server.builder.reorder_batch_threshold = 4
    a, b = server.admit(), server.admit()
    for new in ({a: 70, b: 90}, {a: 3, b: 4}, {b: 1, a: 2}):
        found, right, made = server.step(new)
        close(found, right)
    assert made.chunks == [] and made.table is not None and len(made.table.length) == 3


def test_chunks_are_decoded_a_bounded_number_at_a_time(
    means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    server = Server("u4", 16, tables=True)
    server.builder.most = 50
    requests = [server.admit() for _ in range(5)]
    found, right, made = server.step(dict(zip(requests, (20, 25, 60, 10, 1), strict=True)))
    close(found, right)
    assert [[each.new for each in chunks.requests] for chunks in made.chunks] == [
        [20, 25], [60], [10]
    ]  # fmt: skip


def test_a_graph_is_captured_for_requests_of_any_length(
    means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths stay where they are, and the longest is what a table holds."""
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    server = Server("u4", 64, tables=True)
    where = torch.arange(3, dtype=torch.int32)
    given = CommonAttentionMetadata(
        query_start_loc=where, query_start_loc_cpu=where,
        seq_lens=torch.tensor([5, 0], dtype=torch.int32), num_reqs=2, num_actual_tokens=2,
        max_query_len=1, max_seq_len=5, block_table_tensor=torch.zeros(2, 9, dtype=torch.int32),
        slot_mapping=torch.tensor([3, -1]),
    )  # fmt: skip
    captured, later = (
        server.builder.build_for_cudagraph_capture(given),
        server.builder.build(0, given),
    )
    assert captured.table is not None and later.table is not None
    assert captured.table.longest == 9 * 64 and later.table.longest == 5
    assert captured.table.length.data_ptr() == later.table.length.data_ptr()
    assert captured.table.length.tolist() == [5, 0]
    assert captured.table.pages.data_ptr() == given.block_table_tensor.data_ptr()
    assert captured.direct and not captured.chunks
    support = server.builder.get_cudagraph_support(SimpleNamespace(), SimpleNamespace())
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize("wrong", ["window", "ALiBi", "encoder", "unknown", "none", "values"])
def test_what_codes_do_not_have(wrong: str, means: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", {"unknown": "u5", "none": ""}.get(wrong, "u4"))
    alibi = [1.0, 2.0] if wrong == "ALiBi" else None
    window = 512 if wrong == "window" else None
    kind = "encoder_only" if wrong == "encoder" else "decoder"
    expected = {
        "window": "a sliding window of 512 tokens", "ALiBi": "ALiBi", "encoder": "encoder_only",
        "unknown": "HF_VQ_VLLM_KV='u5'", "none": "Set HF_VQ_VLLM_KV to u4", "values": "one size",
    }[wrong]  # fmt: skip
    with pytest.raises(VQConfigError, match=expected):
        VQAttentionImpl(2, 64, SCALE, 2, alibi, window, "auto", None, kind)
        kv_cache.coded(SimpleNamespace(head_size=64, head_size_v=32, state_content_bytes=None))


def test_blocks_that_kernels_do_not_read(means: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    server = Server("u4", 17)
    with pytest.raises(VQConfigError, match=r"layers\.3.*--block-size"):
        server.impl._pages_of(server.layer, server.memory)


def test_before_backends_say_what_a_block_holds(
    means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch for vLLM 0.26: layers with codes say it in the terms of TurboQuant."""

    @dataclass(frozen=True, kw_only=True)
    class Slots(FullAttentionSpec):
        tq_slot_size: int = 0

    monkeypatch.setenv("HF_VQ_VLLM_KV", "u4")
    monkeypatch.setattr(kv_cache_interface, "TQFullAttentionSpec", Slots, raising=False)
    Server("u4")
    plain = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    (patch,) = [each for each in patches.TABLE if patches.VLLM_KV in each.events]
    assert callable(patches._get(patch.target))
    asked = patches._get(patch.replacement)(lambda self, config: plain)
    layer = SimpleNamespace(attn_backend=attention.VQAttentionBackend)
    found = asked(layer, None)
    size = found.tq_slot_size
    assert (found.dtype, found.block_size, found.num_kv_heads) == (torch.uint8, 64, 2)
    assert (3, 2, 64, size) == layer.attn_backend.get_kv_cache_shape(3, 64, 2, 128)
    assert kv_cache.coded(plain).page_size_bytes == 64 * 2 * size < plain.page_size_bytes / 3.8
    assert asked(SimpleNamespace(attn_backend=AttentionBackend), None) is plain
