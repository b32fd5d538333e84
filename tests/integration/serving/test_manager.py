"""Managers of continuous batching over pages of codes: how they are asked for, start and stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import ContinuousBatchingManager

from hf_vq.errors import VQCacheError
from hf_vq.serving import continuous_batching as paged
from tests.fixtures.continuous_batching import (
    MARKS,
    NEW,
    batching,
    config_of,
    prompts_of,
    serve,
)
from tests.fixtures.generation import build, greedy

pytestmark = MARKS

if paged.objection() is None:
    from hf_vq.serving.manager import PagedManager


def test_generate_batch_reads_the_generation_config_of_the_model() -> None:
    model = build("gqa")
    prompts = prompts_of(5, 20)
    wanted, _ = serve(model, prompts)
    dense = model.generate_batch(prompts, config_of(None), batching())
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = {"backend": "vq", "scheme": "u2"}
    explicit = model.generate_batch(prompts, config_of("u4"), batching())
    coded = model.generate_batch(prompts, config_of(None), batching())
    tokens = [[r.generated_tokens for r in found.values()] for found in (dense, explicit, coded)]
    assert tokens[1] == wanted
    assert tokens[2] == serve(model, prompts, "u2")[0]
    ids = [torch.tensor([prompt]) for prompt in prompts]
    assert tokens[0] == [greedy(model, x, new=NEW)[0, x.shape[1] :].tolist() for x in ids]


def test_transformers_serve_takes_it_from_the_generation_config() -> None:
    serving = pytest.importorskip("transformers.cli.serving.utils")
    model = build("gqa")
    manager = serving.CBGenerateManager(batching())
    manager.init_cb(model, config_of("u4"))
    try:
        assert type(manager._cb).__name__ == "PagedManager"
    finally:
        manager._cb.stop()


def answer(manager: Any, prompt: list[int]) -> list[int]:
    manager.add_request(prompt)
    result = manager.get_result(timeout=120)
    assert result is not None, manager.background_thread_status.fatal_error
    assert result.error is None
    return result.generated_tokens


def test_managers_of_one_model_run_side_by_side() -> None:
    """The second measures the mean with the model's own attention, while the first waits."""
    model, prompt = build("gqa"), prompts_of(12)[0]
    wanted = serve(model, [prompt])[0][0]
    first = model.init_continuous_batching(config_of("u4"), batching())
    first.start()
    assert answer(first, prompt) == wanted
    second = model.init_continuous_batching(config_of("u4"), batching())
    second.start()
    assert [answer(each, prompt) for each in (first, second, first)] == [wanted] * 3
    first.stop()
    assert model.config._attn_implementation == "vq_paged"
    assert answer(second, prompt) == wanted
    second.stop()
    assert model.config._attn_implementation == "sdpa"


def test_a_manager_starts_again() -> None:
    model, prompt = build("gqa"), prompts_of(12)[0]
    manager = model.init_continuous_batching(config_of("u4"), batching())
    found = []
    for _ in range(2):
        manager.start()
        found.append(answer(manager, prompt))
        manager.stop()
        assert model.config._attn_implementation == "sdpa"
    assert found[0] == found[1]


def test_a_manager_that_never_started_gives_the_attention_back() -> None:
    model = build("gqa")
    for end in ("stop", "destroy"):
        manager = model.init_continuous_batching(config_of("u4"), batching())
        assert model.config._attn_implementation == "vq_paged"
        getattr(manager, end)()
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("kept", "asked"), [(None, "u4"), ("u4", None), ("u4", "u2")])
def test_a_kept_manager_with_other_pages_is_refused(kept: Any, asked: Any) -> None:
    model, prompts = build("gqa"), prompts_of(7)
    first = model.generate_batch(prompts, config_of(kept), batching(), persistent_manager=True)
    again = model.generate_batch(prompts, config_of(kept), batching(), persistent_manager=True)
    assert [r.generated_tokens for r in (*first.values(), *again.values())][1:] == [
        r.generated_tokens for r in first.values()
    ]
    with pytest.raises(VQCacheError, match="destroy_cached_continuous_batching_manager"):
        model.generate_batch(prompts, config_of(asked), batching())
    model.destroy_cached_continuous_batching_manager()
    assert len(model.generate_batch(prompts, config_of(asked), batching())) == 1
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("scheme", [None, "u4"])
def test_the_call_is_that_of_transformers(scheme: Any, caplog: Any) -> None:
    """Arguments by their place, and the configs as Transformers completes them."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model = build("gqa")
    hints = WorkloadHints(max_prompt_length=33)
    of = config_of(scheme)
    of.eos_token_id, of.continuous_batching_config = None, batching(page_size=16)
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level("WARNING", "ContinuousBatchingLogger"),
    ):
        seen = []
        init = ContinuousBatchingManager.__init__

        def recorded(self: Any, *args: Any, **named: Any) -> None:
            seen.append([*args, *named.values()])
            init(self, *args, **named)

        patch.setattr(ContinuousBatchingManager, "__init__", recorded)
        manager = model.init_continuous_batching(of, None, hints)
    manager.stop()
    assert seen[0][3] is hints
    assert manager.continuous_batching_config.page_size == 16
    assert manager.generation_config.eos_token_id == -1
    assert "`eos_token_id` not set" in caplog.text
    assert "deprecated" in caplog.text


def test_cache_config_alone_asks_for_nothing() -> None:
    """As in `generate`: it is the options of cache_implementation="quantized"."""
    of = config_of("u4")
    of.cache_implementation = None
    manager = build("gqa").init_continuous_batching(of, batching())
    assert not isinstance(manager, PagedManager)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"default_compile_level": 1}, "compiled"),
        ({"scheduler_type": "none"}, "scheduler_type"),
        ({"num_blocks": None, "max_memory_percent": 1e-9}, "max_batch_tokens smaller"),
        ({"page_size": 2}, "page_size"),
        ({"default_compile_level": 7}, "compile"),
    ],
)
def test_a_refusal_leaves_the_model_as_it_was(fields: Any, wrong: str) -> None:
    model = build("gqa")
    with pytest.raises((VQCacheError, ValueError), match=wrong):
        model.generate_batch([[3, 4]], config_of("u4"), batching(**fields))
    assert model.config._attn_implementation == "sdpa"
