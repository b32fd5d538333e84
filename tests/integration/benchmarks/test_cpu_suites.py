"""The suites that time CPU kernels: they run, and what they report is what was timed."""

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import random_llama, timing
from benchmarks.__main__ import main
from benchmarks.cpu import attention as cpu_attention
from benchmarks.cpu import generate as cpu_generate
from benchmarks.cpu import linear as cpu_linear
from benchmarks.cpu import load as cpu_load
from benchmarks.cpu import models as cpu_models
from benchmarks.cpu import w4a8 as cpu_w4a8
from benchmarks.peers import llama_cpp
from benchmarks.records import read_record
from benchmarks.roofline import cpu as roofline_cpu
from benchmarks.tables import cpu as cpu_tables
from hf_vq.backends.cpu import library as native
from hf_vq.errors import VQError
from hf_vq.evaluation.record import read


def test_candidates_run_interleaved_and_go_through_their_copies():
    seen = []
    candidates = {
        "a": timing.Candidate(lambda i: seen.append(("a", i)), copies=3),
        "b": timing.Candidate(lambda i: seen.append(("b", i)), copies=2, calls=2),
    }
    seconds = timing.interleave(candidates, rounds=2, warmup=1)
    assert seen == [
        ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert [len(times) for times in seconds.values()] == [2, 2]


class Clock:
    """Goes on by what is waited for, however busy the machine is."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_untimed_calls_go_through_the_copies_too(clock):
    late = timing.Candidate(lambda i: clock.sleep(1.0 if i else 8.0), copies=2)
    seconds = timing.interleave({"late": late}, rounds=2, warmup=0, untimed=1)
    assert seconds["late"] == [1.0, 1.0], "copy 0 is never timed"


def test_seconds_are_per_call(clock):
    sleeper = timing.Candidate(lambda i: clock.sleep(0.5), calls=3)
    assert timing.interleave({"sleeper": sleeper}, rounds=1, warmup=0)["sleeper"] == [0.5]


def test_a_speedup_is_the_median_ratio_of_a_round():
    assert timing.speedup([1.0, 2.0, 1.0], [3.0, 3.0, 5.0]) == 3.0


def test_llama_cpp_is_asked_for_what_it_has(tmp_path):
    with pytest.raises(VQError, match=r"no libraries of llama\.cpp.*libggml-base"):
        llama_cpp.candidate(tmp_path, 64, 256)
    with pytest.raises(VQError, match="no weight of 64 x 100"):
        llama_cpp.candidate(tmp_path, 64, 100)


def test_copies_outgrow_the_cache():
    size = timing.last_level_cache() // 4
    assert timing.cold_copies(size) * size > timing.last_level_cache()


def test_cpu_load(tmp_path):
    config = LlamaConfig(
        **dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=96),
        **dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False),
        **dict(dtype="float16", architectures=["LlamaForCausalLM"]),
    )
    cpu_load.write(tmp_path, config, books=2, bits=8, shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    read = cpu_load.read(tmp_path)
    assert read["model.layers.0.mlp.up_proj.codes"].shape == (128, 8, 2)
    seen = []
    _, results = cpu_load.run(threads=(1,), rounds=2, config=config, report=seen.append)
    assert seen == results["rows"] and [row["name"] for row in seen] == list(cpu_load.VARIANTS)
    for row in seen:
        assert row["disk_ratio"] > 0 and row["cache_ratio"] > 0 and row["mb"] > row["shard_mb"]
    assert cpu_load.table(seen).count("\n") == 1 + len(seen)


def test_a_folder_in_memory_is_no_disk(monkeypatch):
    if Path("/dev/shm").exists():
        assert cpu_load.is_in_memory(Path("/dev/shm/some/folder"))
    assert not cpu_load.is_in_memory(Path("/proc/self"))
    monkeypatch.setattr(cpu_load, "is_in_memory", lambda folder: True)
    with pytest.raises(VQError, match="TMPDIR"):
        cpu_load.run(threads=(1,))


def test_memory_that_is_taken_for_a_while():
    def load():
        held = torch.ones(1 << 26)
        time.sleep(0.3)
        del held
        return torch.ones(1 << 20)

    assert cpu_load.peak_above(load) > 1 << 27
    assert cpu_load.peak_above(lambda: torch.ones(1 << 26)) < 1 << 26


@pytest.fixture
def few_copies(monkeypatch):
    for module in (cpu_linear, cpu_attention, cpu_w4a8, roofline_cpu):
        monkeypatch.setattr(module, "cold_copies", lambda nbytes: 2)


@pytest.mark.usefixtures("few_copies")
def test_cpu_w4a8(monkeypatch):
    monkeypatch.setattr(cpu_w4a8, "SHAPES", ((64, 256),))
    monkeypatch.setattr(cpu_w4a8, "TOKENS", (1, 20))
    _, results = cpu_w4a8.run(rounds=1, threads=(1,))
    peers = {"int8", "int8 x int8", "int4", "bf16", "fp32"}
    ours = {"qoq-w4a8", "qoq-w4a8-g128"}
    assert len(results["rows"]) == 2 * len(peers | ours)
    for row in results["rows"]:
        assert row["us"] > 0 and ("speedup" in row) == (row["name"] in ours)
        assert set(row.get("speedup", peers)) == peers
    table = cpu_tables.w4a8(results["rows"])
    assert "\n| 1 |" in table and "\n| 20 |" in table
    assert "| tokens | us | x int8 x int8 | x bf16 |" in table


@pytest.mark.usefixtures("few_copies")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by the package aqlm
def test_cpu_linear():
    _, results = cpu_linear.run(
        schemes=("vq-4", "aqlm-2", "turboquant-3", "turboquant-2+1", "turboquant-1+2"),
        shapes=((256, 256),), rounds=1, threads=(1,),
    )  # fmt: skip
    for line in cpu_tables.scalars(results["rows"]).splitlines()[2:4]:
        measured = [cell.strip() != "-" for cell in line.split("|")[2:-1]]
        assert measured == [bits == 3 for bits in range(1, 9)], line
    results["rows"] = [row for row in results["rows"] if "turboquant" not in row["name"]]
    rows = {row["name"]: row for row in results["rows"]}
    peers = {"int4", "bf16", "fp32", "arithmetic"}
    assert set(rows) - {"read", "aqlm"} == {"vq-4", "aqlm-2"} | peers
    assert "arithmetic" not in cpu_tables.linear(results["rows"])
    assert set(rows["vq-4"]["speedup"]) == {"int4", "bf16", "fp32"} and rows["vq-4"]["us"] > 0
    assert all(isinstance(rows[name]["us_cached"], float) for name in ("vq-4", "aqlm-2"))
    if native.load() is not None:
        vq_4, aqlm_2 = (rows[name] for name in ("vq-4", "aqlm-2"))
        assert vq_4["of_bandwidth"] == pytest.approx(rows["read"]["us"] / vq_4["us"])
        assert aqlm_2["of_bandwidth"] < rows["read"]["us"] / aqlm_2["us"], "it reads less"


@pytest.mark.skipif(native.load() is None, reason=native.why_not())
@pytest.mark.usefixtures("few_copies")
def test_cpu_attention(monkeypatch):
    monkeypatch.setattr(cpu_attention, "_onnxruntime_step", lambda *sizes: None)
    monkeypatch.setattr(cpu_attention, "CHUNK_SCHEMES", ("nomad-4",))
    _, results = cpu_attention.run(
        schemes=("u4",), context=512, groups=(1, 2), chunks=(3,), threads=(1, 2), rounds=1
    )
    rows = {}
    both = [row for row in results["rows"] if row["threads"] == 2]
    assert {row["name"] for row in both} == {"u4", "u4 rotary", "read", "arithmetic"}
    assert all(row["scaling"] > 0 for row in both)
    for row in (row for row in results["rows"] if row["threads"] == 1):
        rows.setdefault(row["what"], {})[row["name"]] = row
        assert row["us"] > 0
    assert set(rows) == {"scores", "step", "prefill", "append", "append keys"}
    coded = {"u4", "nomad-4", "cq-4"}
    assert coded | {"PQ fp32 tables", "dense fp32"} <= set(rows["scores"])
    for name in coded:
        row = rows["scores"][name]
        assert row["of_bandwidth"] > 0 and {"torch K q", "PQ fp32 tables"} <= set(row["speedup"])
        assert isinstance(row["us_cached"], float) and not any(
            "cached" in x for x in row["speedup"]
        )
    assert "nomad-4" not in rows["step"] and rows["step"]["u4"]["queries"] == 1
    assert "torch SDPA fp32" in rows["prefill"]["nomad-4"]["speedup"]
    assert rows["prefill"]["nomad-4"]["queries"] == 3
    assert set(rows["append"]) == coded
    assert set(rows["append keys"]) == coded | {"dense fp32"}
    assert set(rows["append keys"]["nomad-4"]["speedup"]) == {"cq-4", "dense fp32"}


@pytest.mark.skipif(native.load() is None, reason=native.why_not())
@pytest.mark.usefixtures("few_copies")
def test_parts_of_cpu_attention():
    """As notebooks/20_nomad_attention.ipynb runs it."""
    _, results = cpu_attention.run(
        schemes=("nomad-u4",), context=256, groups=(), chunks=(), rounds=1
    )
    assert {row["what"] for row in results["rows"]} == {"scores", "append", "append keys"}


@pytest.mark.skipif(native.load() is None, reason=native.why_not())
@pytest.mark.parametrize("size", [1, 2, 4])
def test_table_scores_are_those_of_the_decoded_keys(size):
    tokens, dim = 7, 48
    vectors = dim // size
    codes = torch.randint(0, 256, (tokens, vectors), dtype=torch.uint8)
    codebook = torch.randn(vectors, 256, size).half()
    query, found = torch.randn(dim), torch.empty(tokens)
    library = native.load()
    arguments = codes.data_ptr(), codebook.data_ptr(), size, query.data_ptr()
    status = library.hf_vq_table_scores(*arguments, tokens, dim, found.data_ptr())
    assert status == native.OK
    keys = codebook[torch.arange(vectors), codes.long()].flatten(1).double()
    slack = dim * 2**-24 * (keys.abs() @ query.double().abs())  # a rounding per term and sum
    assert ((found - keys @ query.double()).abs() <= slack).all()
    arguments = codes.data_ptr(), codebook.data_ptr(), 3, query.data_ptr()
    assert library.hf_vq_table_scores(*arguments, tokens, dim, 0) == native.UNSUPPORTED


def test_cpu_generate(monkeypatch):
    monkeypatch.setattr(
        cpu_generate, "llama_config", lambda heads, length: tiny_llama(heads, length)
    )
    _, results = cpu_generate.run(contexts=(0, 80), kv_heads=(2,), rounds=1)
    names = [row["name"] for row in results["rows"]]
    assert names == [*cpu_generate.OURS, "bf16 sdpa", "bf16 eager"] * 2
    assert all(row["ms"] > 0 for row in results["rows"])
    without, cached = (row["bytes"] for row in results["rows"] if row["name"] == names[0])
    assert cached - without == 2 * 2 * 80 * (32 // 2 + 2), "two sides and heads, bytes and a scale"


def test_cpu_models(tmp_path, monkeypatch, capsys):
    """A model's tokens at two depths, llama.cpp's beside them, and the table of the record."""
    random_llama.random_llama(tiny_llama(2, 64), torch.float32, None).save_pretrained(
        tmp_path / "tiny"
    )
    program = tmp_path / "llama-bench"
    program.write_text(
        """#!/bin/sh
        echo '{"n_gen": 0, "avg_ts": 512}'
        echo '{"n_gen": 4, "avg_ts": 100}'
        """
    )
    program.chmod(0o755)
    for weights in ("Q4_0", "Q4_K_M"):
        (tmp_path / f"tiny-{weights}.gguf").touch()
    monkeypatch.setattr(cpu_models, "PROMPT", 8)
    out = tmp_path / "record.jsonl"
    arguments = ["cpu-models", str(tmp_path / "tiny"), "--gguf", str(tmp_path), "--llama-bench",
                 str(program), "--depths", "0", "20", "--rounds", "1", "--tokens", "4", "--out",
                 str(out), "--revision", "here"]  # fmt: skip
    assert main(arguments) == 0
    record = read(out)
    rows = record["results"]["rows"]
    assert [(row["name"], row["depth"]) for row in rows] == [
        (name, depth)
        for depth in (0, 20)
        for name in (*cpu_models.OURS, cpu_models.DENSE, *cpu_models.LLAMA)
    ]
    assert {row["ms"] for row in rows if row["name"] in cpu_models.LLAMA} == {10.0}
    sizes = {row["name"]: row["megabytes"] for row in rows if "megabytes" in row}
    names = list(cpu_models.OURS)
    assert sizes[names[1]] < sizes[names[0]] < sizes[cpu_models.DENSE]
    table = cpu_tables.models([record])
    isa = record["settings"]["isa"]
    assert f"| tiny {isa} 0 | tiny {isa} 20 | prompt |" in table
    assert "| llama.cpp Q4_0 | 10 |" in table
    assert "GGUF_DIR" in record["command"] and str(tmp_path) not in record["command"]


def test_extrapolated():
    seconds = {"few": [4.0, 3.0, 9.0], "more": [5.0, 8.0]}
    assert timing.extrapolated(seconds, ("few", 10), ("more", 20), 50) == 3.0 + 4 * 2.0


def tiny_llama(kv_heads, length):
    config = random_llama.llama_config(kv_heads, length, layers=1)
    config.hidden_size, config.num_attention_heads, config.head_dim = 128, 4, 32
    config.intermediate_size, config.vocab_size = 256, 1001
    return config


@pytest.mark.parametrize("suite", ["cpu-linear", "cpu-attention", "cpu-generate", "cuda-linear"])
def test_the_committed_records_say_what_made_them(suite):
    record = read_record(suite)
    assert record["revision"] and f" {suite}" in record["command"]


def test_the_record_of_avx2():
    record = read_record("cpu-attention-avx2")
    assert record["settings"]["isa"] == "avx2"
    assert record["command"].startswith("HF_VQ_CPU_ISA=avx2 python -m ")
