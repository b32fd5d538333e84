"""`model.generate` with a static `VQCache` on a GPU: inductor, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from hf_vq import dispatch
from hf_vq.cache import VQCache
from tests.fixtures.generation import build, greedy
from tests.fixtures.static_generation import CAPACITY, padded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("reference_kernels", "counters"),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "implementation"), [("gqa", "sdpa"), ("gpt_oss", "vq"), ("gemma3", "sdpa")]
)
def test_cuda_graphs(name: str, implementation: str, counters: dict[str, int]) -> None:
    """generate() on a GPU with nothing said: CUDA graphs, no recompiles for a new cache."""
    model = build(name, implementation).cuda()
    lengths = [30, 19]
    ids, mask = (x.cuda() for x in padded(lengths))
    wanted = greedy(model, ids, VQCache(model.config, window=8), 40, attention_mask=mask)
    caches = [VQCache(model.config, max_cache_len=CAPACITY, window=8) for _ in range(3)]
    out = greedy(model, ids, caches[0], 40, attention_mask=mask, disable_compile=True)
    assert torch.equal(out, wanted) and not counters["unique_graphs"]
    caches[0].reset()
    for cache in caches:
        before = counters["unique_graphs"]
        out = greedy(model, ids, cache, 40, attention_mask=mask)
        assert cache.is_compileable and torch.equal(out, wanted)
        assert set(cache.fallbacks.values()) == {0}
        if cache is not caches[0]:
            assert counters["unique_graphs"] == before
    assert not torch._dynamo.utils.counters["graph_break"]
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    torch._dynamo.utils.counters["inductor"].clear()
    torch._dynamo.reset()
    plain = StaticCache(config=model.config, max_cache_len=CAPACITY)
    greedy(model, ids, plain, 40, attention_mask=mask)
    # No more reasons against CUDA graphs than Transformers' own static cache has.
    assert skipped <= torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fused_kernels_in_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels alone, no reference: the growing cache with them is as near to float32 as this."""
    model = build("gqa", head_dim=64).cuda()
    ids, mask = (x.cuda() for x in padded([60, 37]))

    def logits(cache: VQCache) -> Tensor:
        out = greedy(
            model, ids, cache, 1, attention_mask=mask, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        steps, seen = [out.logits[0]], mask
        run = model.get_compiled_call(None) if cache.is_compileable else model
        for token in torch.arange(3, 43).cuda():  # the same tokens for all
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
            inputs = model.prepare_inputs_for_generation(
                token.expand(2, 1), past_key_values=cache, attention_mask=seen,
                position_ids=seen.sum(1, keepdim=True) - 1,
            )  # fmt: skip
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                steps.append(run(**inputs).logits[:, -1].float().clone())
        return torch.stack(steps)

    exact = logits(VQCache(model.config, window=8))
    model.to(torch.bfloat16)
    monkeypatch.delenv("HF_VQ_BACKEND")
    of_cache = ("append", "attention", "store", "attention_static")
    kernels = [
        entry
        for entry in dispatch.ENTRIES
        if not (entry.op in of_cache and entry.name == "reference")
    ]
    with dispatch.using(kernels):
        grown = logits(VQCache(model.config, window=8))
        static = [logits(VQCache(model.config, max_cache_len=128, window=8)) for _ in range(3)]
    assert torch.equal(static[0], static[1]) and torch.equal(static[0], static[2])
    assert (static[0] - exact).abs().mean() <= 2 * (grown - exact).abs().mean()
