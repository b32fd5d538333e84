import math

import pytest
import torch

from hf_vq import VQCache, VQError
from hf_vq.evaluation.load import load_model, load_tokenizer
from hf_vq.evaluation.score import Reference, model_forward, score
from hf_vq.evaluation.text import read_sequences


def table(logits):
    """A model whose prediction depends on the token alone: logits [vocabulary, vocabulary]."""
    return lambda ids: logits[ids[:, :-1]]


def test_the_reference_against_itself_is_zero():
    ids = torch.randint(0, 16, (4, 32))
    reference = Reference(table(torch.randn(16, 16)), ids)
    found = score(reference.forward, reference)
    assert abs(found.kld) < 1e-6 and found.top1 == 100 and found.change == 0
    assert found.perplexity == pytest.approx(reference.perplexity)


def test_numbers_are_those_of_the_definitions():
    ids = torch.randint(0, 8, (3, 20))
    p, q = torch.randn(8, 8), torch.randn(8, 8)
    found = score(table(q), Reference(table(p), ids), batch=2)
    log_p, log_q = p.log_softmax(-1).double(), q.log_softmax(-1).double()
    each = (log_p.exp() * (log_p - log_q)).sum(-1)[ids[:, :-1]]
    assert found.kld == pytest.approx(each.mean().item(), rel=1e-5)
    assert found.kld_se == pytest.approx(each.mean(1).std().item() / math.sqrt(3), rel=1e-4)
    assert found.kld_p99 == pytest.approx(each.max().item(), rel=1e-5)  # 57 tokens: the largest
    nll = -log_q[ids[:, :-1]].gather(2, ids[:, 1:, None]).mean().item()
    assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    same = (p.argmax(-1) == q.argmax(-1))[ids[:, :-1]].double().mean().item()
    assert found.top1 == pytest.approx(100 * same)


def test_predictions_that_are_not_scored():
    ids = torch.randint(0, 8, (3, 20))
    p, q = torch.randn(8, 8), torch.randn(8, 8)
    found = score(table(q), Reference(table(p), ids, skip=5), batch=2)
    rest = score(table(q), Reference(table(p), ids[:, 5:]))
    for name in ("perplexity", "change", "kld", "kld_p99", "top1"):
        assert getattr(found, name) == pytest.approx(getattr(rest, name))


def test_a_reference_that_does_not_fit_is_computed_again():
    ids = torch.randint(0, 8, (3, 20))
    p, q = table(torch.randn(8, 8)), table(torch.randn(8, 8))
    kept, again = Reference(p, ids), Reference(p, ids, keep_bytes=0)
    assert score(q, again).kld == score(q, kept).kld
    assert not again._kept and len(kept._kept) == 3


def test_errors_say_what_is_wrong():
    ids = torch.randint(0, 8, (2, 20))
    reference = Reference(table(torch.randn(8, 8)), ids)
    with pytest.raises(VQError, match="vocabulary"):
        score(table(torch.randn(8, 9)), reference)
    with pytest.raises(VQError, match="NaN"):
        score(table(torch.full((8, 8), torch.nan)), reference)


@pytest.mark.slow
def test_a_cache_that_codes_nothing_changes_nothing(tiny_model, eval_text):
    model = load_model(str(tiny_model), dtype=torch.float32)
    tokenizer = load_tokenizer(str(tiny_model))
    ids = read_sequences(tokenizer, eval_text, context=96, tokens=192)
    reference = Reference(model_forward(model), ids)
    exact = model_forward(model, lambda: VQCache(model.config, window=96), prompt=24)
    assert score(exact, reference, batch=2).kld < 1e-6
    coded = model_forward(model, lambda: VQCache(model.config, "u2", window=4), prompt=24)
    whole = score(coded, reference, batch=2).kld
    assert whole > 1e-6
    # The prompt reads no code: without it the mean is over fewer predictions with the same sum.
    late = score(coded, Reference(model_forward(model), ids, skip=24), batch=2).kld
    assert late == pytest.approx(whole * 95 / (95 - 24), rel=0.02)


def test_text_that_cannot_be_used(tmp_path, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    path = tmp_path / "text.txt"
    with pytest.raises(VQError, match="cannot read"):
        read_sequences(tokenizer, path, context=16)
    path.write_text(" \n")
    with pytest.raises(VQError, match="empty"):
        read_sequences(tokenizer, path, context=16)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VQError, match="UTF-8"):
        read_sequences(tokenizer, path, context=16)
    path.write_text("a short text")
    with pytest.raises(VQError, match="tokens with this tokenizer"):
        read_sequences(tokenizer, path, context=16)
    with pytest.raises(VQError, match="too short"):
        read_sequences(tokenizer, path, context=4)
    with pytest.raises(VQError, match="fewer than two"):
        read_sequences(tokenizer, path, context=64, tokens=100)
    path.write_text("word " * 200)
    assert read_sequences(tokenizer, path, context=16).shape[1] == 16
    assert read_sequences(tokenizer, path, context=16, most=64).numel() <= 64
