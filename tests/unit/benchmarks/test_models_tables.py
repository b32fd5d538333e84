"""Tables of `quality-models`: a column for each record, a line for each row of any of them."""

import pytest

from benchmarks.quality.models import table as models
from benchmarks.records import read_records
from benchmarks.tables import pages
from hf_vq.errors import VQError
from hf_vq.evaluation.record import make_record, write_record


def row(what, name, kld, bits, **more):
    key = "bits_per_weight" if what == "weights" else "bits_per_element"
    return {"what": what, "name": name, "revision": "abcdef0123", "kld": kld, "kld_se": kld / 50,
            key: bits, "change": 100 * kld, **more}  # fmt: skip


def record(model, rows):
    settings = {
        "model": model, "text": "a.txt", "text_tokens": 4096, "text_context": 512,
        "kv_passages": 8, "kv_prompt": 256, "kv_scored": 128, "sinks": 4, "window": 64,
    }  # fmt: skip
    learn = "--calibration TEXT --ggml GGML_DIR " * (len(rows) > 4)
    rows_of = f"{learn}--rows weights:* kv:u{len(rows)} --tokens 4096"  # each has other ones
    command = f"python -m benchmarks quality-models MODEL_DIR --text TEXT {rows_of}"
    return make_record("quality-models", command, settings, {"rows": rows}, "abcdef0123")


@pytest.fixture
def both():
    one = [row("kv", "u4", 0.0031, 4.25), row("weights", "vq-4", 0.25, 4.22, on="text"),
           row("weights", "vq-4-activations", 0.09, 4.22, on="text"),
           row("weights", "vq-4-activations", 0.9, 4.22, on="chat"),
           row("weights", "nf4-g64", 0.3, 4.5, on="text")]  # fmt: skip
    other = [row("kv", "u4", 0.0007, 4.125), row("weights", "vq-4", 0.05, 4.128, on="text"),
             row("weights", "vq-4-activations", 0.04, 4.128, on="text"),
             {"what": "weights", "name": "nf4-g64", "revision": "abcdef0123",
              "failed": "no package"}]  # fmt: skip
    return [record("one", one), record("other", other)]


def test_weights_have_a_column_for_each_model(both):
    lines = models.weights(both).splitlines()
    assert lines[0] == "| weights | bits | one | other |"
    assert lines[2] == "| `vq-4`, `activations=None` | 4.13-4.22 | 0.250, +25 % | 0.0500, +5.0 % |"
    assert lines[3] == "| `vq-4` | 4.13-4.22 | 0.0900, +9.0 % | 0.0400, +4.0 % |"
    assert lines[4] == "", "a row that one of several models has is in its record"
    alone = models.weights(both[:1]).splitlines()
    assert alone[4] == "| NF4 g64 | 4.50 | 0.300, +30 % |"
    assert lines[-1].startswith(
        "On a.txt: 4,096 tokens in contexts of 512. Standard errors of KLD: 2.0"
    )
    assert lines[-1].count("Measured by") == 1, "one command made both"
    assert "quality-models MODEL_DIR --text TEXT --rows .. --tokens 4096`" in lines[-1]


def test_revisions_are_of_rows_that_are_shown(both):
    for rows in (one["results"]["rows"] for one in both):
        rows[0]["revision"] = "1111111000"
        rows.append(row("weights", "vq-4-activations-int8", 0.1, 4.2, int8_share=1.0))
        rows[-1]["revision"] = "2222222000"
    both[0]["results"]["rows"][4]["revision"] = "3333333000"  # of a row that one model has
    shown = models.weights(both)
    assert "abcdef0" in shown and not any(other in shown for other in ("1111", "2222", "3333"))
    assert "at 1111111" in models.caches(both) and "abcdef0" not in models.caches(both)
    assert "2222222" in models.int8(both) and "3333" not in models.int8(both)


def test_the_readme_has_weights_and_caches(both):
    lines = models.front(both).splitlines()
    assert lines[0] == "|  | bits | one | other |"
    assert "| weights `vq-4` | 4.13-4.22 | 0.0900, +9.0 % | 0.0400, +4.0 % |" in lines
    assert "| weights NF4 g64 | 4.50 | 0.300, +30 % | - |" in lines
    assert "| KV cache `u4` | 4.12-4.25 | 0.00310 | 0.000700 |" in lines
    assert not any("`u3`" in line for line in lines), "nobody measured it"
    assert lines[-1].startswith("On a.txt: 4,096 tokens in contexts of 512; caches: 8 passages, ")
    assert lines[-1].endswith("at abcdef0.")


def test_chat_text_has_a_table_of_its_own(both):
    for one in both:
        one["settings"] |= {"prompts_text": "b.jsonl", "chat_tokens": 2048, "chat_context": 256}
        one["results"]["rows"].append(row("weights", "nf4-g64", 0.7, 4.5, on="chat"))
    shown = models.chat(both)
    assert "| NF4 g64 | 4.50 | 0.700, +70 % | 0.700, +70 % |" in shown
    assert "vq-4" not in shown, "one model alone has it"
    assert "own answers to b.jsonl: 2,048 tokens in contexts of 256" in shown
    assert "| `vq-4` | 4.22 | 0.900, +90 % |" in models.chat(both[:1])
    assert "0.7" not in models.weights(both)


def test_passkeys_have_a_part_of_a_cell_for_each_length(both):
    for one, longest in zip(both, (1024, 4096), strict=True):
        one["results"]["rows"] = [
            {"what": "passkey", "name": name, "length": length, "revision": "abcdef0123",
             "found": 100.0 - 20 * (length > 1024), "log_p": -0.1}
            for name in ("exact", "u4") for length in (1024, longest)
        ]  # fmt: skip
    both[0]["results"]["rows"] += [
        {"what": "passkey", "name": "u2", "length": 1024, "found": 40.0, "revision": "abcdef0123"},
        {"what": "passkey", "name": "u3", "length": 1024, "failed": "short"},
    ]
    lines = models.passkeys(both).splitlines()
    assert lines[0] == "| KV cache | one | other |"
    assert lines[2:4] == ["| uncoded | 100 / - | 100 / 80 |", "| `u4` | 100 / - | 100 / 80 |"]
    assert lines[4] == "", "what one model alone has is in its record"
    assert "Passkeys found, percent of 5, in prompts of 1,024 / 4,096 tokens." in lines[5]
    assert "| `u2` | 40 |" in models.passkeys(both[:1])


def test_embeddings_name_their_model_where_there_are_several(both):
    assert models.embeddings(both).startswith("Not measured")
    for one in both:
        rows = one["results"]["rows"]
        rows[1]["megabytes"] = 169.4
        rows += [
            row("embeddings", "int8", 0.26, 4.2, on="text", megabytes=84.6),
            row("embeddings", "int8", 0.5, 4.2, on="chat", megabytes=84.6),
            {"what": "embeddings", "name": "int4", "failed": "no"},
        ]
    assert models.embeddings(both[:1]).splitlines()[2:] == [
        "| dense, float32 | 169.4 | 0.250 |",
        "| `int8` | 84.6 | 0.260 |",
        "",
        "one, `vq-4`, `activations=None`; see [above](#quality).",
    ]
    lines = models.embeddings(both).splitlines()
    assert [line.split(":")[0] for line in lines[2:6]] == ["| one", "| one", "| other", "| other"]


def test_caches_say_what_was_scored(both):
    shown = models.caches(both)
    assert "| `u4` | 4.12-4.25 | 0.00310 | 0.000700 |" in shown
    assert "8 passages of 128 tokens behind prompts of 256, 4 sinks, window 64" in shown
    assert "longer prompts" not in shown
    for one in both:
        one["settings"]["kv_long_passages"] = 3
        rows = one["results"]["rows"]
        rows += [{**rows[0], "length": 4096, "kld": 0.5}, row("kv", "u4-window-0", 0.02, 4.25)]
    shown = models.caches(both)
    assert "| `u4` behind 4,096 | 4.12-4.25 | 0.500 | 0.500 |" in shown
    assert "| `u4` | 4.12-4.25 | 0.00310 | 0.000700 |" in shown
    assert "| `u4`, window 0 | 4.25 | 0.0200 | 0.0200 |" in shown
    assert "Behind longer prompts: 3 passages." in shown
    both[0]["settings"]["kv_long_passages"] = 4
    with pytest.raises(VQError, match="differ in kv_long_passages"):
        models.caches(both)


def test_columns_of_unlike_texts_are_refused(both):
    both[1]["settings"]["text_tokens"] = 8192
    assert models.caches(both)
    with pytest.raises(VQError, match="differ in text_tokens"):
        models.weights(both)


def test_records_are_read_by_suite(both, tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    for one in both:
        name = one["settings"]["model"]
        write_record(one, tmp_path / "models" / f"quality-models-{name}.jsonl")
    found = read_records(models.SUITE, tmp_path)
    assert [each["settings"]["model"] for each in found] == ["one", "other"]
    monkeypatch.setattr(pages, "read_records", lambda suite: [])
    assert "Not measured" in pages.TABLES["results:quality-models-kv"]()


def test_rows_of_another_revision_are_named(both):
    """Rows that were kept: without a date, which is that of the last run."""
    assert models.caches(both).endswith("at abcdef0.")
    for one in both:
        for each in one["results"]["rows"]:
            if each["what"] == "weights":
                each["revision"] = "1234567890"
    assert models.caches(both).endswith("at abcdef0.")
    assert models.weights(both).endswith("cores; at 1234567.")
