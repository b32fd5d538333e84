"""A wrong head of the kernels shows in the text of the suite `serve`."""

import pytest
import torch

from benchmarks.serving import same_text, serve
from hf_vq import dispatch
from hf_vq.ops.reference.kv_attention import attention


def test_up_to_the_first_other_token():
    runs = iter([
        [([1, 2, 3], [-1.0, -2.0, -9.0]), ([4, 5, 6], [-1.0, -1.0, -1.0])],
        [([1, 7, 8], [-1.5, -2.25, -0.5]), ([4, 5, 6], [-1.0, -1.0, -1.0])],
    ])  # fmt: skip
    assert same_text.compare(lambda: next(runs)) == {
        "requests": 2, "same_text": 1, "tokens": 5, "largest_difference": 0.5,
    }  # fmt: skip


def test_what_is_no_number_is_no_difference():
    runs = iter([[([1], [float("nan")])], [([1], [-1.0])]])
    assert same_text.compare(lambda: next(runs))["largest_difference"] is None


@pytest.mark.slow
@pytest.mark.parametrize("head", ["right", "wrong", "no number"])
def test_a_wrong_head_is_seen(head, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(same_text, "NEW", 8)

    def attend(query, view, *options):
        out = attention(query, view, *options)
        if head != "right":
            out[:, 1] = out[:, 0] if head == "wrong" else torch.nan
        return out

    changed = dispatch.Entry("test.attention", "kv_attention", dispatch.Implementation(attend))
    with dispatch.preferred(changed):
        _, results = serve.run(pairs=("dense/u4",), requests=(3,), prompt=4, new=2)
    apart = results["rows"][0]["text"]["largest_difference"]
    assert apart == 0 if head == "right" else apart is None or apart > 0.01


def test_the_table_is_as_before():
    before = dispatch.entries("kv_attention")
    with same_text.plain_attention():
        assert dispatch.entries("kv_attention")[0].name == "plain.attention"
    assert dispatch.entries("kv_attention") == before
