"""Words that a model writes after beginnings of many kinds."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_vq.calibration import text
from hf_vq.calibration.text import beginnings, first_token, own_words, sample_text
from tests.fixtures import ROOT

FOLDER = ROOT / "tests" / "models" / "tinybooks-5m"
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def tokens(tokenizer, words):
    return tokenizer(words, add_special_tokens=False).input_ids


def starts_with(row, ids):
    return row[: len(ids)].tolist() == ids


def test_beginnings_are_of_many_kinds():
    found = beginnings()
    assert len(found) == len(set(found)) >= 32
    assert all(one.strip() for one in found)
    first = {one.split()[0] for one in found}
    assert len(first) > 0.7 * len(found)
    assert any("\n" in one for one in found) and not any("\\n" in one for one in found)


def test_given_tokens_stand_in_the_text(model):
    given = torch.full((3, 6), -1)
    given[:, 0] = torch.tensor([5, 6, 7])
    given[0, :4] = torch.tensor([5, 9, 8, 7])
    given[2, 5] = 11
    found = sample_text(model, 3, 6, seed=1, given=given)
    assert torch.equal(found[given >= 0], given[given >= 0])
    assert found.min() >= 0
    other = sample_text(model, 3, 6, seed=2, given=given)
    assert not torch.equal(found, other)


def test_without_given_tokens_the_first_begins_a_text(model):
    assert sample_text(model, 4, 3)[:, 0].tolist() == 4 * [first_token(model)]


def test_sequences_begin_as_texts_do(model, tokenizer):
    """Half with the words, a quarter with a line end, a quarter with a random token before them."""
    found = own_words(model, 32, 24, seed=3)
    assert found.shape == (32, 24) and found.min() >= 0
    texts = [tokens(tokenizer, one) for one in beginnings()]
    ends = [tokens(tokenizer, one) for one in text._LINE_ENDS]
    counts = {"words": 0, "line ends": 0, "random": 0}
    seen = set()
    for row in found:
        for index, ids in enumerate(texts):
            for kind, first in [("words", []), *(("line ends", end) for end in ends)]:
                if starts_with(row, [*first, *ids][:24]):
                    counts[kind] += 1
                    seen.add(index)
            if starts_with(row[1:], ids[:23]) and not any(starts_with(row, e) for e in ends):
                counts["random"] += 1
                seen.add(index)
    assert counts["words"] >= 16 and counts["line ends"] >= 8 and counts["random"] >= 8
    assert len(seen) == 32, "every beginning is used"


def test_one_seed_gives_one_text(model):
    one, same, other = (own_words(model, 4, 12, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("why", ["no name", "no tokenizer", "more tokens", "nothing for a word"])
def test_without_a_tokenizer_that_fits(why, model, tokenizer, monkeypatch):
    """Half of the sequences begin with the first token, half with a random one."""

    class Odd:
        bos_token_id = None

        def __call__(self, texts, **_):
            odd = [10**6] if why == "more tokens" else []
            return type("Found", (), {"input_ids": [odd for _ in texts]})

    if why == "no name":
        monkeypatch.setattr(model.config, "_name_or_path", "", raising=False)
        assert not model.config.name_or_path
    elif why == "no tokenizer":
        monkeypatch.setattr(model.config, "_name_or_path", str(ROOT / "docs"), raising=False)
    else:
        monkeypatch.setattr(text, "tokenizer_of", lambda *_, **__: Odd())
    found = own_words(model, 8, 4, seed=1)
    assert found[:4, 0].tolist() == 4 * [first_token(model)]
    assert len(set(found[4:, 0].tolist())) > 1


def test_code_of_a_tokenizer_is_not_run(model, monkeypatch):
    asked = {}

    def load(model, files, **options):
        asked.update(options)
        raise OSError("no tokenizer")

    monkeypatch.setattr(text, "tokenizer_of", load)
    own_words(model, 2, 3)
    assert asked == {"trust_remote_code": False}
