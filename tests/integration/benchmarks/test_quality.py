"""The suites run, and what they simulate is what it should be."""

import json

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.__main__ import main
from benchmarks.quality import banded, baselines
from benchmarks.quality import finetune as quality_finetune
from benchmarks.quality import kv as quality_kv
from benchmarks.quality import kv_calibrated as quality_kv_calibrated
from benchmarks.quality import qoq as quality_qoq
from benchmarks.quality import weights as quality_weights
from benchmarks.quality.banded import Simulation, banded_attention, exact_attention
from benchmarks.tables import kv as kv_tables
from hf_vq import VQCache, VQError, ops
from hf_vq.calibration import finetune
from hf_vq.formats.catalog import KV_SCHEMES
from hf_vq.formats.shared import universal_tensor
from hf_vq.ops.reference.codes import mean_of
from hf_vq.ops.reference.nomad import look_up, quantized_tables, score_tables
from hf_vq.ops.rotary_mean import rotated


def as_it_is(x, layer):
    return x


def qkv(tokens=150, heads=2, group=2, dim=32):
    shape = (heads, tokens, dim)
    return torch.randn(heads, group, tokens, dim), torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("window", [0, 1, 16, 200])
def test_banded_attention_by_brute_force(window):
    """Each query alone, with its own exact and stored tokens."""
    q, k, v = qkv()
    simulation = Simulation(lambda x, _: x.round(), lambda x, _: 2 * x, window, sinks=4)
    out = banded_attention(q, k, v, simulation)
    for t in (0, 3, 4, 5, 40, 127, 128, 149):
        at = torch.arange(t + 1)
        exact = ((at < 4) | (at > t - window))[:, None]
        keys = torch.where(exact, k[:, : t + 1], k[:, : t + 1].round())
        values = torch.where(exact, v[:, : t + 1], 2 * v[:, : t + 1])
        p = torch.einsum("hgd,hsd->hgs", q[:, :, t], keys).softmax(-1)
        expected = torch.einsum("hgs,hsd->hgd", p, values)
        torch.testing.assert_close(out[:, :, t], expected, atol=1e-4, rtol=1e-4)


def test_without_quantization_it_is_attention():
    q, k, v = qkv()
    plain = Simulation(as_it_is, as_it_is, 64)
    expected = exact_attention(q, k, v)
    torch.testing.assert_close(banded_attention(q, k, v, plain), expected, atol=1e-5, rtol=1e-4)


def test_keys_are_stored_as_the_cache_stores_them():
    k = torch.randn(2, 40, 64) + 3
    scheme = KV_SCHEMES["u4"].key
    codebook = universal_tensor(scheme)
    mean = mean_of(k[None, :, 4:])[0]
    codes, scale = ops.encode_kv(k - mean, codebook, scheme)
    expected = ops.decode_kv(codes, scale, codebook, scheme, 64) + mean
    assert torch.equal(quality_kv.round_trip(scheme, centre=True)(k, 0), expected)


@pytest.mark.parametrize("turning", [False, True])
@pytest.mark.parametrize("prompt", ["whole text", "short"])
def test_keys_are_centred_as_the_cache_centres_them(prompt, turning):
    """The two cases stand for a prompt that is the whole sequence, and for one in the window."""
    window, sinks = quality_kv.WINDOW, quality_kv.SINKS
    k, v = torch.randn(2, 1, 2, 150, 32) + 2
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, head_dim=32, hidden_size=64)
    if turning:
        inv_freq = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
        k = k + rotated(30 * torch.randn(1, 2, 1, 32), inv_freq, False, torch.arange(150))
    cache = VQCache(config, "u4", window=window, sinks=sinks)
    first = 150 if prompt == "whole text" else 20
    for at in [slice(0, first), *(slice(i, i + 1) for i in range(first, 150))]:
        cache.update(k[:, :, at], v[:, :, at], 0)
    known = sinks + window // 2 if prompt == "short" else None
    round_trip = quality_kv.round_trip(
        KV_SCHEMES["u4"].key, centre=True, known=known, config=config
    )
    stored = round_trip(k[0], 0)
    assert (cache.layers[0].k.rotary_mean is not None) == turning
    coded = slice(sinks, 150 - window)
    held = cache.layers[0].keys.clone()[0]
    torch.testing.assert_close(held[:, coded], stored[:, coded], atol=1e-3, rtol=1e-3)
    assert (held - k[0])[:, coded].abs().mean() < 0.15


@pytest.mark.parametrize(
    "unknown", [{"softcap": 30.0}, {"sliding_window": 8}, {"s_aux": torch.zeros(4)}, {"mask": 1}]
)
def test_attention_that_is_not_simulated_is_an_error(unknown):
    q, k, v = qkv(tokens=8)
    mask = torch.ones(1, 1, 8, 8) if unknown.pop("mask", None) else None
    with pytest.raises(VQError, match="cannot be used"):
        banded._attention(None, q.flatten(0, 1)[None], k[None], v[None], mask, **unknown)


def test_the_shifted_twin_computes_the_same_function():
    k = torch.randn(2, 40, 64)
    torch.testing.assert_close(quality_kv.shifted(as_it_is)(k, 0), k, atol=1e-4, rtol=1e-4)
    seen = []
    quality_kv.shifted(lambda x, _: seen.append(x) or x)(k, 0)
    constant = seen[0] - k
    assert torch.allclose(constant, constant[:, :1], atol=1e-4)
    assert constant[:, 0].norm(dim=-1).tolist() == pytest.approx(
        (5 * k.norm(dim=-1).mean(1)).tolist(), rel=1e-3
    )
    slow = [*range(16, 32), *range(48, 64)]
    assert constant[:, 0].abs().gt(1e-3).sum(1).tolist() == [len(slow)] * 2
    # Centring takes it off again, whatever its size.
    stored = quality_kv.round_trip(KV_SCHEMES["u4"].key, centre=True)
    error = (stored(k, 0) - k).square().mean()
    assert (quality_kv.shifted(stored)(k, 0) - k).square().mean() < 1.05 * error


def test_baselines_round_to_their_grids():
    w = torch.randn(8, 256)
    for bits, limit in ((4, 0.02), (8, 1e-4)):
        error = (baselines.round_to_nearest(w, bits, 128) - w).square().mean() / w.square().mean()
        assert error < limit
    assert len(baselines.nf4(w, 64)[0, :64].unique()) <= 16
    x = torch.randn(2, 70, 32)
    assert torch.allclose(baselines.per_channel(x, 16), x, atol=1e-2)
    assert torch.allclose(baselines.asymmetric(x, 16, 32), x, atol=1e-2)
    assert torch.equal(
        baselines.round_to_nearest(torch.full((2, 128), 0.7)), torch.full((2, 128), 0.7)
    )
    inputs = torch.randn(512, 32) @ torch.randn(32, 256) + torch.randn(512, 256)
    moments = inputs.T @ inputs / 512
    nearest, found = baselines.round_to_nearest(w, 3), baselines.gptq(w, moments, 3)
    costs = [float((((q - w) @ moments) * (q - w)).sum()) for q in (found, nearest)]
    assert costs[0] < 0.7 * costs[1] and len(found[0, :128].unique()) <= 8
    group = baselines.per_channel(x, 2)[0, :32, 0]
    assert len(group.unique()) <= 4


@pytest.mark.parametrize(("suite", "scheme"), [("quality-weights", "vq-3"), ("quality-kv", "u2")])
def test_a_suite_runs_and_writes_its_record(suite, scheme, tiny_model, eval_text, tmp_path, capsys):
    out = tmp_path / "record.json"
    arguments = [suite, str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", scheme, "--revision", "abc"]
    assert main([*arguments, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["suite"] == suite and record["settings"]["model"] == "tiny"
    assert record["revision"] == "abc"
    options = f"--tokens 256 --context 128 --schemes {scheme}"
    assert record["command"] == f"python -m benchmarks {suite} MODEL_DIR --text TEXT {options}"
    cases = [row["case"] for row in record["results"]["rows"] if row["name"] == "u2"]
    assert cases == (list(quality_kv.CASES) if suite == "quality-kv" else [])
    names = {row["name"] for row in record["results"]["rows"]}
    assert scheme in names and len(names) == 3
    assert str(tmp_path) not in out.read_text() and "tests/" not in out.read_text()
    assert scheme in capsys.readouterr().out


def test_two_passes_and_the_first_alone(tiny_model, eval_text, tmp_path):
    """Two passes, and the first of them alone: half the bits, and much worse."""
    out = tmp_path / "record.json"
    arguments = ["quality-passes", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "turboquant-4+4", "turboquant-8"]
    assert main([*arguments, "--revision", "abc", "--out", str(out)]) == 0
    both, first, one = json.loads(out.read_text())["results"]["rows"]
    names = ("turboquant-4+4", "first pass of turboquant-4+4", "turboquant-8")
    assert (both["name"], first["name"], one["name"]) == names
    assert both["bits_per_weight"] == pytest.approx(one["bits_per_weight"], abs=0.1)
    assert first["bits_per_weight"] == pytest.approx(both["bits_per_weight"] - 4, abs=0.1)
    assert both["kld"] < first["kld"] / 5


def test_weights_are_calibrated_on_another_text(tiny_model, eval_text, tmp_path, monkeypatch):
    monkeypatch.setattr(quality_weights, "CALIBRATION_TOKENS", 256)
    out = tmp_path / "record.json"
    arguments = ["quality-weights", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "vq-3", "turboquant-3", "--no-baselines"]
    arguments += ["--calibration", str(eval_text), "--revision", "abc", "--out", str(out)]
    assert main(arguments) == 0
    record = json.loads(out.read_text())
    kinds = [(row["name"], row["kind"]) for row in record["results"]["rows"]]
    assert kinds == [("vq-3", "scheme"), ("turboquant-3", "scheme"), ("vq-3", "calibrated")]


def test_calibrated_weights_with_a_cache(tiny_model, eval_text, monkeypatch):
    """The row is that of the weights, but for what codes of keys and values change."""
    monkeypatch.setattr(quality_weights, "CALIBRATION_TOKENS", 128)
    monkeypatch.setattr(quality_weights, "WINDOW", 1)
    options = {"tokens": 128, "context": 64, "schemes": ["vq-4"], "with_baselines": False}
    _, results = quality_weights.run(str(tiny_model), eval_text, calibration=eval_text, **options)
    _, alone, both = results["rows"]
    assert (alone["name"], both["name"]) == ("vq-4", "vq-4 + KV u4")
    assert both["kind"] == "calibrated" and both["bits_per_weight"] == alone["bits_per_weight"]
    assert both["perplexity"] != alone["perplexity"]
    assert both["perplexity"] == pytest.approx(alone["perplexity"], rel=0.01)


def test_calibrated_caches_are_measured(tiny_model, eval_text, tmp_path, monkeypatch):
    monkeypatch.setattr(quality_kv_calibrated, "CALIBRATION_TOKENS", 2048)
    monkeypatch.setattr(quality_kv_calibrated, "ALLOCATION_TOKENS", 128)
    out = tmp_path / "record.json"
    names = ["u4", "learned-4", "mean 3 bits", "cq-2, Fisher weights"]
    names += ["QServe KV4", "QServe KV4, SmoothAttention"]
    arguments = ["quality-kv-calibrated", str(tiny_model), "--text", str(eval_text)]
    arguments += ["--tokens", "256", "--context", "128", "--schemes", *names, "--revision", "abc"]
    assert main([*arguments, "--out", str(out)]) == 2, "there is nothing to calibrate on"
    assert main([*arguments, "--calibration", str(eval_text), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = {row["name"]: row for row in record["results"]["rows"]}
    assert list(rows) == names
    bits = {name: row["bits_per_element"] for name, row in rows.items()}
    head_dim = 16 / (bits["u4"] - 4)
    assert bits["u4"] == bits["learned-4"] == bits["mean 3 bits"] + 1
    assert bits["cq-2, Fisher weights"] == 2 and bits["QServe KV4"] == 4 + 32 / head_dim
    chosen = record["settings"]["allocation"]
    assert len(chosen) == len(record["settings"]["sensitivity"]) == 2
    assert len({row["perplexity"] for row in rows.values()}) == len(names)
    table = kv_tables.calibrated(record["results"]["rows"])
    assert "`learned-4`" in table and "| mean 3 bits |" in table
    assert record["settings"]["calibration_tokens"] == 2048
    assert record["settings"]["calibration_text"] == eval_text.name
    assert "--calibration TEXT --tokens 256" in record["command"]


def test_fine_tuning_and_gptq_learn_from_the_same_text(
    tiny_model, eval_text, tmp_path, monkeypatch
):
    monkeypatch.setattr(quality_weights, "CALIBRATION_TOKENS", 256)
    out = tmp_path / "record.json"
    arguments = ["quality-weights", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "vq-2", "--kinds", "baseline", "block", "model"]
    arguments += ["--calibration", str(eval_text), "--revision", "abc", "--out", str(out)]
    assert main(arguments) == 0
    record = json.loads(out.read_text())
    rows = {(row["name"], row["kind"]): row for row in record["results"]["rows"]}
    gptq = [(f"GPTQ int{bits} g128", "baseline") for bits in (4, 3, 2)]
    assert list(rows)[2:] == [*gptq, ("vq-2", "block"), ("vq-2", "model")]
    assert rows[gptq[0]]["kld"] < rows[gptq[1]]["kld"] < rows[gptq[2]]["kld"]
    assert rows[gptq[0]]["bits_per_weight"] == 4.15625
    assert record["command"].endswith("--kinds baseline block model")


def test_fine_tuned_weights_have_a_record_of_their_own(
    tiny_model, eval_text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(quality_finetune, "CALIBRATION_TOKENS", 256)
    out = tmp_path / "record.json"
    arguments = ["quality-finetune", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--revision", "abc", "--out", str(out)]
    assert main(arguments) == 2 and "nothing to calibrate" in capsys.readouterr().err
    place = ["--device-map", "cpu"]
    assert main([*arguments, "--calibration", str(eval_text), *place]) == 0
    record = json.loads(out.read_text())
    assert record["command"].endswith("--context 128 --device-map cpu")
    rows = [(row["name"], row["kind"]) for row in record["results"]["rows"]]
    assert rows == [("vq-2", kind) for kind in ("calibrated", "block", "model")]
    assert record["settings"]["calibration_tokens"] == 256
    assert record["settings"]["epochs"] == finetune.EPOCHS


def test_every_transform_of_qoq_has_its_rows():
    steps = {step.name: step for step in quality_qoq.steps(quality_qoq.SCHEMES)}
    for name in quality_qoq.CHANGING:
        assert steps[f"qoq-w4a8-g128, {name} alone"].transforms == (name,)
    for name in quality_qoq.LEFT_OUT:
        left = steps[f"qoq-w4a8-g128, all but {name}"].transforms
        assert {name, *left} == set(quality_qoq.TRANSFORMS) and name not in left
    assert {*quality_qoq.CHANGING, "smooth_attention"} == set(quality_qoq.TRANSFORMS)
    assert "reorder" not in steps["qoq-w4a8, all"].transforms


def test_qoq_is_measured_with_its_cache_and_taken_up(tiny_model, eval_text, tmp_path, monkeypatch):
    monkeypatch.setattr(quality_qoq, "CALIBRATION_TOKENS", 256)
    monkeypatch.setattr(quality_qoq, "DETAILED", "qoq-w4a8")
    monkeypatch.setattr(quality_qoq, "CHANGING", ("clip",))
    monkeypatch.setattr(quality_qoq, "LEFT_OUT", ("rotate",))
    out = tmp_path / "record.json"
    arguments = ["quality-qoq", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "qoq-w4a8", "--calibration", str(eval_text)]
    arguments += ["--revision", "abc", "--out", str(out)]
    rows, stop = quality_qoq._rows, [3]

    def stopping(*given):
        if not stop[0]:
            raise KeyboardInterrupt
        stop[0] -= 1
        return rows(*given)

    with monkeypatch.context() as patch:
        patch.setattr(quality_qoq, "_rows", stopping)
        assert main(arguments) == 130
    begun = []
    monkeypatch.setattr(quality_qoq, "_rows", lambda *given: begun.append(given) or rows(*given))
    assert main(arguments) == 0
    record = json.loads(out.read_text())
    cached = "all, KV qserve-kv4"
    names = ["round to nearest", "clip alone", "all", cached, "all but rotate"]
    names = [f"qoq-w4a8, {name}" for name in names]
    names += ["original, KV qserve-kv4", "original, smooth_attention, KV qserve-kv4"]
    found = {row["name"]: row for row in record["results"]["rows"]}
    assert list(found) == names and len(begun) == 3, "three models of the first run are kept"
    assert found[names[3]]["kld"] > found[names[2]]["kld"], "the cache costs something"
    assert 4 < found[names[2]]["bits_per_weight"] < 5


def test_learned_schemes_are_calibrated_on_another_text(tiny_model, eval_text, tmp_path):
    out = tmp_path / "record.json"
    arguments = ["quality-kv", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "nomad-2", "--no-baselines", "--revision", "abc"]
    assert main([*arguments, "--calibration", str(eval_text), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["command"].startswith(
        "python -m benchmarks quality-kv MODEL_DIR --text TEXT --calibration TEXT --tokens 256"
    )
    assert record["settings"]["calibration_tokens"] == 256
    assert record["settings"]["calibration_text"] == eval_text.name
    rows = record["results"]["rows"]
    paper = "NoMAD d_sub 2, keys only"
    assert [row["name"] for row in rows[::2]] == ["nomad-2", paper, f"{paper}, 8-bit tables"]
    assert [row["case"] for row in rows] == list(quality_kv.LEARNED_CASES) * 3
    # 2 bits for keys; values 4 bits and a scale for 32 numbers
    assert [row["bits_per_element"] for row in rows[::2]] == [(2 + 4.5) / 2, 2, 2]
    klds = [row["kld"] for row in rows[1::2]]
    assert klds[0] > klds[1], "coded values cost something"
    # Those of a random model are as small as the rounding of its float32 logits.
    assert klds[2] == pytest.approx(klds[1], rel=0.1, abs=1e-6), "8-bit tables cost little"
    assert klds[2] != klds[1], "tables of 8 bits are not those of floats"


def test_scores_from_tables_are_those_of_the_reference():
    """Matrix products with ones at the codes, against lookups; sinks and window stay exact."""
    q, _, _ = qkv(tokens=40)
    codebook = torch.randn(2, 16, 16, 2).half()
    codes = torch.randint(0, 16, (2, 40, 16))
    k = codebook.float().gather(2, codes.transpose(1, 2)[..., None].expand(-1, -1, -1, 2))
    k = k.transpose(1, 2).flatten(-2)
    scores = quality_kv.table_scores(k, codebook)(q, 30)
    for group in range(2):
        tables, step, low = quantized_tables(score_tables(q[:, group], codebook))
        expected = look_up(tables, codes[:, :30]) * step[..., 0] + low[..., 0]
        torch.testing.assert_close(scores[:, group], expected, atol=1e-4, rtol=1e-5)
    exact = torch.einsum("hgqd,hkd->hgqk", q, k[:, :30])
    assert (scores - exact).abs().max() < 0.5 < exact.abs().max()


def test_a_suite_says_what_is_wrong_in_one_line(tiny_model, tmp_path, capsys):
    whole = ["quality-kv", str(tiny_model), "--text", str(tmp_path / "none.txt")]
    assert main([*whole, "--calibration", "t"]) == 2
    assert "cannot read the text" in capsys.readouterr().err
    assert main([*whole, "--no-baselines"]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(whole) == 2
    assert "--calibration" in capsys.readouterr().err
    assert main([*whole, "--out", str(tmp_path / "record.json")]) == 2
    assert "nomad-4" in (error := capsys.readouterr().err) and "--calibration" in error


def test_a_suite_that_was_stopped_goes_on(tiny_model, eval_text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "record.json"
    arguments = ["quality-weights", str(tiny_model), "--text", str(eval_text), "--tokens", "256"]
    arguments += ["--context", "128", "--schemes", "vq-3", "vq-4", "--no-baselines"]
    arguments += ["--revision", "abc", "--out", str(out)]
    real, loaded = quality_weights.load_model, []

    def load(*args, config=None, **options):
        loaded.append(config and config.scheme_name)
        if loaded == [None, "vq-3", "vq-4"]:
            raise KeyboardInterrupt
        return real(*args, config=config, **options)

    monkeypatch.setattr(quality_weights, "load_model", load)
    assert main(arguments) == 130 and not out.exists()
    assert main(arguments) == 0
    assert loaded == [None, "vq-3", "vq-4", None, "vq-4"]
    names = [row["name"] for row in json.loads(out.read_text())["results"]["rows"]]
    assert names == ["vq-3", "vq-4"]
