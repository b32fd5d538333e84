"""`hf-vq eval --compare`: rows, what fails, going on, tables and pictures; probes of a cache."""

import json
import shutil
import sys

import pytest
import torch

from benchmarks.records import read_record
from hf_vq import VQCache
from hf_vq.cli import main
from hf_vq.errors import VQError
from hf_vq.evaluation import compare, libraries, report
from hf_vq.evaluation.compare import Comparison, candidates
from hf_vq.evaluation.kv_stress import CopyProbe, attention_states, logit_correlation
from hf_vq.evaluation.load import fingerprint, load_model
from hf_vq.evaluation.text_tables import markdown_table, text_table
from tests.fixtures import ROOT

SMALL = {"tokens": 512, "context": 256, "dtype": torch.float32}


@pytest.fixture(scope="module")
def model(tinybooks):
    return load_model(str(tinybooks), dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(model, tinybooks, eval_text):
    from transformers import AutoTokenizer

    text = eval_text.read_text(encoding="utf-8")[:8000]
    found = AutoTokenizer.from_pretrained(tinybooks)(text).input_ids[:1024]
    return torch.tensor(found).reshape(4, 256)


def absent(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_contestants():
    found = candidates(["vq-4", "aqlm-2", "nf4", "vq-4"], ["u4", "cq-4", "quanto-2"], True)
    assert [(one.name, one.kind) for one in found] == [
        ("vq-4", "scheme"), ("vq-4", "calibrated"), ("aqlm-2", "scheme"),
        ("aqlm-2", "calibrated"), ("nf4", "peer"),
        ("u4", "scheme"), ("cq-4", "calibrated"), ("quanto-2", "peer"),
    ]  # fmt: skip
    assert "vq-4, calibrated" in [one.label for one in found]
    for weights, caches in ((["nf-4"], []), ([], ["quanto-5"])):
        with pytest.raises(VQError, match=r"peers: .*-4"):
            candidates(weights, caches, False)


def test_rows_and_what_fails(tiny_model, eval_text, monkeypatch):
    absent(monkeypatch, "bitsandbytes", "optimum.quanto")
    broken = libraries.Peer("Broken", "json", "json", lambda job: 1 / 0, lambda module: None)
    left = libraries.Peer("Left", "json", "json", lambda job: load_model(job.model), lambda m: None)
    for name, peer in (("broken", broken), ("left", left)):
        monkeypatch.setitem(libraries.WEIGHT_PEERS, name, peer)
    names = ["vq-3", "nf4", "broken", "left", "gptq-4"]
    monkeypatch.setattr(libraries, "installed", check_all_but_gptq)
    found = Comparison(
        str(tiny_model), eval_text, names, ["u2", "quanto-4", "nomad-4"], **SMALL
    )  # fmt: skip
    rows = {row["name"]: row for row in found.rows()}
    assert list(rows) == [*names, "u2", "quanto-4", "nomad-4"]
    assert rows["vq-3"]["kld"] > 0 and 3 < rows["vq-3"]["bits"] < 4
    assert rows["u2"]["bits"] == 2.5 and 0 < rows["u2"]["correlation"] < 1
    assert rows["nf4"]["failed"] == "not installed: pip install bitsandbytes"
    assert rows["quanto-4"]["failed"] == "not installed: pip install optimum-quanto"
    assert rows["broken"]["failed"] == "ZeroDivisionError: division by zero"
    assert rows["left"]["failed"] == "it quantized no layer"
    assert "--calibration" in rows["gptq-4"]["failed"]
    assert "codebooks" in rows["nomad-4"]["failed"]
    for draw in (text_table, markdown_table):
        shown = report.tables(list(rows.values()), draw)
        for row in rows.values():
            assert row["label"] in shown
        assert "ZeroDivisionError: division by zero" in shown


def test_a_reason_is_one_line_without_folders():
    error = OSError("no /home/me/.cache/x.so | or /a, see https://a.b/c/d\nsecond")
    assert compare.reason(error) == "OSError: no x.so / or /a, see https://a.b/c/d"
    assert compare.reason(VQError("as it is")) == "as it is"


_installed = libraries.installed


def check_all_but_gptq(peer):
    if getattr(peer, "package", "") != "gptqmodel":
        _installed(peer)


def test_a_peer_that_lacks_what_it_needs_says_what(monkeypatch, tmp_path):
    (tmp_path / "needy.py").write_text("import certainly_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VQError, match="needy-package lacks certainly_not_there: pip install"):
        libraries.installed(libraries.CachePeer("x", "needy", "needy-package", "x", 4, 0))


def test_a_peer_is_measured(tiny_model, eval_text, monkeypatch):
    """Round to nearest, in the place of a library: its bits are counted, its loss is its own."""
    from benchmarks.quality.baselines import round_to_nearest

    def quantize(job):
        model = load_model(job.model, dtype=job.dtype)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data = round_to_nearest(layer.mlp.up_proj.weight.data, 2, 64)
            layer.mlp.up_proj.rounded = True
        return model

    def stored(module):
        return module.weight.numel() // 4 if hasattr(module, "rounded") else None

    monkeypatch.setitem(
        libraries.WEIGHT_PEERS, "rtn", libraries.Peer("RTN", "json", "", quantize, stored)
    )
    row, exact = Comparison(str(tiny_model), eval_text, ["rtn", "turboquant-8"], **SMALL).rows()
    assert row["bits"] == 2 and row["kld"] > 10 * abs(exact["kld"])


BITS = {"nf4": 4.5, "hqq-4": 4.5, "hqq-2": 2.5, "torchao-4": 4.125, "torchao-2": 2.125,
        "quanto-4": 4.25, "gptq-4": 4.16}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", BITS)
def test_a_library_that_is_installed(name, tinybooks, eval_text, monkeypatch):
    pytest.importorskip(libraries.WEIGHT_PEERS[name].module)
    monkeypatch.setattr(libraries, "CALIBRATION_TOKENS", 1024)
    (row,) = Comparison(str(tinybooks), eval_text, [name], calibration=eval_text, **SMALL).rows()
    assert "failed" not in row, row
    assert row["bits"] == pytest.approx(BITS[name], abs=0.02)
    assert 0.001 < row["kld"] < (0.2 if row["bits"] > 3 else 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "bits"), [("quanto-4", 4.5), ("quanto-2", 2.5), ("hqq-4", 4.5), ("hqq-2", 2.5)]
)
def test_a_quantized_cache_that_is_installed(name, bits, tinybooks, eval_text):
    pytest.importorskip(libraries.CACHE_PEERS[name].module)
    (row,) = Comparison(str(tinybooks), eval_text, (), [name], **SMALL).rows()
    assert "failed" not in row, row
    assert row["bits"] == pytest.approx(bits) and 0 < row["kld"] < 0.5
    assert 0.5 < row["correlation"] < 1


def test_a_comparison_goes_on(tiny_model, eval_text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["eval", str(tiny_model), "--compare", "vq-4", "vq-2", "nf4"]
    command += ["--text", str(eval_text), "--tokens", "128", "--context", "64"]
    absent(monkeypatch, "bitsandbytes")
    measure, measured = Comparison._weights, []

    def interrupted(self, one):
        measured.append(one.name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(self, one)

    monkeypatch.setattr(Comparison, "_weights", interrupted)
    assert main([*command, "--json", str(out)]) == 1
    assert f"goes on from {out}.unfinished" in capsys.readouterr().err
    assert not out.exists() and measured == ["vq-4", "vq-2"]
    before = json.loads((tmp_path / "out.json.unfinished").read_text())["results"]["rows"]
    assert main([*command, "--json", str(out), "--plot", str(tmp_path / "out.svg")]) == 0
    assert measured == ["vq-4", "vq-2", "vq-2", "nf4"], "a row that was known is not measured again"
    record = json.loads(out.read_text())
    assert record["complete"] and record["results"]["rows"][:1] == before
    assert [row["name"] for row in record["results"]["rows"]] == ["vq-4", "vq-2", "nf4"]
    names = "--compare vq-4 vq-2 nf4 --text TEXT --tokens 128 --context 64"
    assert record["command"] == f"hf-vq eval MODEL {names}"
    assert str(tmp_path) not in out.read_text() and not list(tmp_path.glob("*.unfinished"))
    shown = capsys.readouterr().out
    assert "bitsandbytes NF4 g64 (not installed: pip install bitsandbytes)" in shown
    assert report.drawn_from(tmp_path / "out.svg") == report.digest(record["results"]["rows"])


def test_a_model_is_told_from_another_in_a_folder_of_its_name(tiny_model, tmp_path):
    def copied(name):
        folder = tmp_path / name / "model"
        shutil.copytree(tiny_model, folder)
        return folder

    same, other = copied("same"), copied("other")
    assert fingerprint(str(same)) == fingerprint(str(tiny_model)) and fingerprint("a/b") == "a/b"
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(str(other)) != fingerprint(str(same))


def test_rows_of_other_settings_are_not_taken(tiny_model, eval_text, tmp_path):
    out = tmp_path / "out.json"
    small = Comparison(str(tiny_model), eval_text, ["vq-4"], tokens=256, context=64)
    rows = compare.record(small, "c", out)["results"]["rows"]
    unfinished = compare.Recorder(out, "compare", "c", settings=small.settings)
    unfinished.add(rows[0])
    assert unfinished.kept() == rows
    other = Comparison(str(tiny_model), eval_text, ["vq-4"], tokens=128, context=64)
    assert not compare.Recorder(out, "compare", "c", settings=other.settings).kept()
    unfinished.unfinished.write_text("{", encoding="utf-8")
    assert not unfinished.kept()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "vq-5x"], "peers"),
        (["--compare", "vq-4", "--plot", "out.doc"], "suffixes"),
        (["--compare", "vq-4", "--reference", "x"], "--reference is not for eval --compare"),
        (["--compare", "--cache", "u4", "--context", "200"], "context of 256"),
        (["--cache", "u4", "u2"], "one --cache"),
        (["--plot", "out.png"], "--plot is for --compare"),
        (["--compare", "vq-4", "--tokens", "128", "--json", "/nowhere/out.json"], "cannot write"),
    ],
)
def test_wrong_arguments_are_named(options, message, tiny_model, eval_text, capsys):
    options = ["--text", str(eval_text), "--context", "64", *options]
    assert main(["eval", str(tiny_model), *options]) == 2
    assert message in capsys.readouterr().err


ROW = {"what": "weights", "name": "vq-4", "kind": "scheme", "label": "vq-4", "bits": 4.1}
ROW |= {"kld": 0.02, "kld_se": 0.001, "kld_p99": 0.1, "top1": 90.0, "perplexity": 20.0}
ROW |= {"change": 1.0, "seconds": 3.0}


def test_a_picture_shows_every_row_that_was_measured(tmp_path):
    rows = [
        ROW,
        {**ROW, "name": "vq-2", "label": "vq-2", "bits": 2.1, "kld": 0.4},
        {**ROW, "kind": "calibrated", "label": "vq-4, calibrated", "kld": 0.01},
        {**ROW, "kind": "peer", "name": "hqq-4", "label": "HQQ", "bits": 4.5},
        {"what": "weights", "name": "nf4", "kind": "peer", "label": "NF4", "failed": "no"},
    ]
    path = tmp_path / "a.svg"
    report.plot(rows, path, "a title")
    drawn = path.read_text()
    for text in ("a title", ">vq-2 … vq-4<", ">vq-4, calibrated<", ">hqq-4<"):
        assert text in drawn
    assert "nf4" not in drawn and "KV cache" not in drawn
    assert drawn.count("<use ") >= 2 * 4, "a marker for each row in both panels"
    report.plot(rows, tmp_path / "b.svg", "a title")
    assert (tmp_path / "b.svg").read_text() == drawn
    assert report.drawn_from(path) == report.digest(rows) != report.digest([ROW])
    report.plot(rows, tmp_path / "a.png")
    assert report.drawn_from(tmp_path / "a.png") == report.digest(rows)
    with pytest.raises(VQError, match="nothing was measured"):
        report.plot(rows[-1:], path)


def test_the_picture_in_the_docs_is_drawn_from_the_record():
    picture = ROOT / "docs" / "compare.svg"
    record = read_record("compare")
    if record is None:
        pytest.skip("not measured yet")
    rows, drawn = record["results"]["rows"], picture.read_text(encoding="utf-8")
    message = "run `python -m benchmarks tables`"
    assert report.drawn_from(picture) == report.digest(rows), message
    assert report.title(record["settings"]) in drawn
    measured = [row for row in rows if "failed" not in row]
    assert drawn.count("<use ") >= 2 * len(measured)


def test_the_record_is_of_the_whole_comparison():
    record = read_record("compare")
    if record is None:
        pytest.skip("not measured yet")
    found = {(row["what"], row["name"], row["kind"]) for row in record["results"]["rows"]}
    asked = candidates(compare.WEIGHTS, compare.CACHES, True)
    assert {(one.what, one.name, one.kind) for one in asked} <= found


def test_correlation_of_logits(model, ids):
    states = attention_states(model, ids)
    assert model.config._attn_implementation != "hf_vq_bench_recorded"
    q, k, _ = states[1]
    assert q.shape[1] > k.shape[1] and q.shape[2] == k.shape[2] == 256

    def caches(scheme):
        return lambda: VQCache(model.config, scheme)

    found = {scheme: logit_correlation(states, caches(scheme))[0] for scheme in ("u4", "u3", "u2")}
    assert 1 > found["u4"] > found["u3"] > found["u2"] > 0.5
    from transformers import DynamicCache

    exact, _ = logit_correlation(states, lambda: DynamicCache(config=model.config))
    assert exact == pytest.approx(1, abs=1e-5)


def test_copying_from_afar(model, ids):
    from transformers import DynamicCache

    probe = CopyProbe(model, ids[:3, :224], depths=(0.5,))
    exact = probe.run(lambda: DynamicCache(config=model.config))
    assert all(at["recall"] == pytest.approx(1, abs=1e-3) for at in exact)
    assert all(at["gain_exact"] > 1 for at in exact), "the embedded model copies"

    class Forgets(DynamicCache):
        """Attention to nothing but the newest tokens."""

        def update(self, k, v, layer, *args, **kwargs):
            keys, values = super().update(k, v, layer, *args, **kwargs)
            if k.shape[2] < 50:
                values = values.clone()
                values[:, :, : -k.shape[2]] = 0
            return keys, values

    forgotten = probe.run(lambda: Forgets(config=model.config))
    assert all(at["recall"] < 0.5 for at in forgotten)


def test_nothing_is_said_of_a_model_that_does_not_copy(tiny_model, ids):
    random = load_model(str(tiny_model), dtype=torch.float32)
    probe = CopyProbe(random, ids[:3, :224], depths=(0.5,))
    assert probe.run(lambda: VQCache(random.config))[0]["recall"] is None
