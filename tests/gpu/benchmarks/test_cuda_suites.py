"""The suites that time CUDA kernels run on a GPU."""

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.ablation import parts as cuda_parts
from benchmarks.cuda import calibrate as cuda_calibrate
from benchmarks.cuda import generate as cuda_generate
from benchmarks.cuda import int8 as cuda_int8
from benchmarks.cuda import linear as cuda_linear
from benchmarks.cuda import peers as cuda_peers
from benchmarks.cuda import quantize as cuda_quantize
from benchmarks.cuda import tune as cuda_tune
from benchmarks.cuda import w4a8 as cuda_w4a8
from benchmarks.cuda import w4a8_block as cuda_w4a8_block
from benchmarks.paper_vq_llm import mechanisms as cuda_mechanisms
from benchmarks.peers import aqlm_cuda as aqlm_peer
from benchmarks.tables import cuda_linear as cuda_linear_tables
from benchmarks.tables import cuda_w4a8 as cuda_w4a8_tables
from hf_vq.codegen import tuned
from hf_vq.codegen.families.linear import LinearProblem, choose
from hf_vq.codegen.jit.device import device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.formats import weight_scheme
from tests.fixtures.models.small_llama import small_llama


@pytest.mark.gpu
def test_cuda_w4a8(monkeypatch):
    monkeypatch.setattr(cuda_w4a8, "cold_copies", lambda nbytes: 2)
    _, results = cuda_w4a8.run(shapes=((256, 512),), tokens=(1, 64), rounds=1)
    rows = results["rows"]
    ours = [row for row in rows if "speedup" in row]
    assert [row["tokens"] for row in ours] == [1, 1, 64, 64]
    assert all(("of_reading" in row) == (row["tokens"] == 1) for row in ours)
    assert set(ours[-1]["speedup"]) == {"bf16", "int8 x int8"}
    assert all(("rounding_us" in row) == (row["tokens"] > 1) for row in ours)
    hopper = device_arch(0).name == "sm_90a"
    assert all(("tensor_us" in row) == (hopper and row["tokens"] > 1) for row in ours)
    table = cuda_w4a8_tables.table(rows)
    assert "| tokens | us | x bf16 | x int8 x int8 |" in table and "\n| 64 |" in table


@pytest.mark.gpu
def test_cuda_int8(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    _, results = cuda_int8.run(schemes=("vq-4",), shapes=((256, 512),), tokens=(128,), rounds=1)
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"bf16", "qoq-w4a8-g128", "vq-4", "vq-4, int8"}
    hopper = device_arch(0).name == "sm_90a"
    assert (rows["vq-4, int8"]["kernel"] == "cuda.int8_linear") == hopper
    assert "| `vq-4, int8` |" in cuda_linear_tables.int8(results["rows"])


@pytest.mark.gpu
def test_cuda_w4a8_block(monkeypatch):
    monkeypatch.setattr(cuda_w4a8_block, "cold_copies", lambda nbytes: 2)
    _, results = cuda_w4a8_block.run(tokens=(1, 40, 300), rounds=1, hidden=1024, ffn=2048)
    rows = results["rows"]
    assert [row["tokens"] for row in rows] == [1, 1, 40, 40, 300, 300]
    assert all(set(row["speedup"]) == {"bf16", "apart"} and row["us"] > 0 for row in rows)
    table = cuda_w4a8_block.table(rows)
    assert "| tokens | us | x rounding apart | x bf16 |" in table and table.count("\n") == 6


@pytest.mark.gpu
def test_cuda_linear(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    _, results = cuda_linear.run(
        schemes=("vq-4", "aqlm-2"), shapes=((256, 256),), tokens=(1, 64), rounds=1
    )
    decode = {row["name"]: row for row in results["rows"] if row["what"] == "decode"}
    assert set(decode) == {"write", "read and write", "vq-4", "aqlm-2"}
    assert set(decode["vq-4"]["of_ceiling"]) == {"write", "read and write"}
    linear = [row for row in results["rows"] if row["what"] == "linear"]
    assert [row["tokens"] for row in linear if row["name"] == "bf16"] == [1, 64]
    ours = [row for row in linear if row["name"] == "vq-4"]
    many = "cuda.wide_linear" if device_arch(0).name == "sm_90a" else "cuda.fused_linear"
    assert [row["kernel"] for row in ours] == ["cuda.fused_linear", many]
    assert all(row["us"] > 0 for row in ours)
    assert set(ours[0]["speedup"]) == {"bf16", "int4 tinygemm"}
    assert ours[0]["of_reading"] > 0 and "of_reading" not in ours[1]
    mechanisms = [row for row in results["rows"] if row["what"] == "mechanism"]
    assert {"chosen", "no overlapping launches"} <= {row["plan"] for row in mechanisms}
    assert {row["name"] for row in results["rows"] if row["what"] == "host"} == {
        "bf16", "neg", "vq-4", "aqlm-2"
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the first one of inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of inductor
def test_cuda_generate():
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=256, num_attention_heads=2, num_key_value_heads=1,
        head_dim=128, intermediate_size=512, vocab_size=32000, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    _, results = cuda_generate.run(schemes=("vq-4",), config=config, rounds=1)
    dense, ours, coded = results["rows"]
    assert [row["name"] for row in results["rows"]] == ["bf16", "vq-4", "vq-4"]
    assert [row["cache"] for row in results["rows"]] == ["bf16", "bf16", "u4"]
    how = {"generate_ms", "captured_ms", "step_ms", "eager_graph_ms", "bytes"}
    assert set(ours["speedup"]) == how and set(coded["speedup"]) == how - {"eager_graph_ms"}
    assert ours["speedup"]["bytes"] > 1
    assert sum(ours["parts_ms"].values()) == pytest.approx(ours["step_ms"], rel=0.2)
    assert 0 < ours["step_ms"] < ours["generate_ms"]
    assert dense["parts_ms"]["quantized layers"] == 0 < ours["parts_ms"]["quantized layers"]
    assert all(row["parts_ms"]["attention"] > 0 < row["alone_ms"] for row in results["rows"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:aqlm-2 loses much quality")
def test_cuda_mechanisms(monkeypatch):
    monkeypatch.setattr(cuda_mechanisms, "cold_copies", lambda nbytes: 2)
    names = ("aqlm-2", "gptvq-2")
    _, results = cuda_mechanisms.run(schemes=names, shapes=((256, 512),), tokens=(1,), rounds=1)
    for name in names:
        rows = {row["plan"]: row for row in results["rows"] if row["name"] == name}
        assert {"GC", "SC", "O1", "O2", "O3", "O4", "O1, renumbered", "ops.linear"} <= set(rows)
        assert all(row["us"] > 0 and row["speedup"]["fp16"] > 0 for row in rows.values())
        assert rows["O3"]["split"] == 2 and rows["O4"]["fusion"] == "shuffle"
        ladder = [row for row in rows.values() if "exchanges" in row["plan"]]
        assert [row["exchanges"] for row in ladder] == [
            rows["O4"]["exchanges"] + i for i in (0, 2, 4, 6, 8)
        ]


@pytest.mark.gpu
def test_cuda_parts(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    _, results = cuda_parts.run(schemes=("vq-4", "gptvq-2"), shapes=((256, 512),), rounds=1)
    found = {
        (name, tokens): {row["what"] for row in results["rows"]
                         if (row["name"], row["tokens"]) == (name, tokens)}
        for name, tokens in (("vq-4", 1), ("vq-4", 16), ("vq-4", 128), ("gptvq-2", 64))
    }  # fmt: skip
    every = {"bf16", "whole", *cuda_parts.WITHOUT, *cuda_parts.ONLY["linear"]}
    assert found["vq-4", 1] == every
    assert found["vq-4", 16] == {*every, "without the kernel before"}
    wide = {"bf16", "whole", "without the kernel before", *cuda_parts.ONLY["linear_wgmma"]}
    assert torch.cuda.get_device_capability()[0] != 9 or found["vq-4", 128] == wide
    assert found["gptvq-2", 64] == {"bf16", "whole", *cuda_parts.ONLY["linear_tile_codebook"]}
    assert all(row["us"] > 0 for row in results["rows"])


@pytest.mark.gpu
@pytest.mark.skipif(aqlm_peer.version() is None, reason="needs the package aqlm")
def test_cuda_peers(monkeypatch):
    monkeypatch.setattr(cuda_linear, "cold_copies", lambda nbytes: 2)
    _, results = cuda_peers.run(shapes=((256, 512),), tokens=(1, 3), rounds=1)  # compares results
    peers = {(row["name"], row["peer"]) for row in results["rows"]}
    assert {("aqlm-2", "aqlm 2x8, token by token"), ("aqlm-2", "aqlm 2x8, dequantized"),
            ("quip-sharp-2", "dequantized, as QuIP# does")} <= peers  # fmt: skip
    assert all(
        row["speedup"] == pytest.approx(row["us"] / row["ours_us"]) for row in results["rows"]
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:aqlm-2 loses much quality")
def test_cuda_quantize(monkeypatch):
    monkeypatch.setattr(cuda_quantize, "LAYER", ((256, 512), (128, 512)))
    monkeypatch.setattr(cuda_quantize, "_LOADED_LAYERS", 1)
    monkeypatch.setattr(cuda_quantize, "_COMPARED", (64, 512))
    names = ("vq-4", "aqlm-2")
    settings, results = cuda_quantize.run(schemes=names, layers=2, rounds=1)
    assert settings["layers"] == 2 and settings["matrices"] == [[256, 512], [128, 512]]
    rows = {(row["what"], row["name"]): row for row in results["rows"]}
    whats = ("quantize", "quantize while loading", "load")
    assert set(rows) == {(what, name) for what in whats for name in names}
    for name in names:
        made = rows["quantize", name]
        assert made["weights"] == 2 * 384 * 512 and made["seconds"] > 0 < made["relative_error"]
        assert made["speedup"]["PyTorch"] > 0 and made["above_mb"] > 0
        assert rows["load", name]["above_mb"] <= rows["load", name]["layer_mb"]
        assert rows["load", name]["layer_mb"] < rows["quantize while loading", name]["layer_mb"]


@pytest.mark.gpu
def test_cuda_calibrate(monkeypatch):
    monkeypatch.setattr(cuda_calibrate, "llama_3_8b", small_llama)
    monkeypatch.setattr(cuda_calibrate, "SEQUENCES", 4)
    monkeypatch.setattr(cuda_calibrate, "CONTEXT", 64)
    settings, results = cuda_calibrate.run(schemes=("vq-4",), layers=1)
    assert settings["sequences"] == 4 and settings["blocks"] == 32
    assert results["rows"][0]["blocks_measured"] == 1 and results["rows"][0]["above_mb"] > 0


@pytest.mark.gpu
def test_what_was_measured_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_VQ_STORE", str(tmp_path))
    tuned._on_disk.cache_clear()
    monkeypatch.setattr(cuda_tune, "PLANS", 3)
    rows = []
    path = cuda_tune.run(
        schemes=("vq-2",), shapes=((272, 512),), tokens=(1, 16), rounds=1, report=rows.append
    )
    assert path.parent == tmp_path and len(rows) == 2
    choose.cache_clear()
    for row, tokens in zip(rows, (1, 16), strict=True):
        problem = LinearProblem(
            weight_scheme("vq-2"), tokens, 272, 512, Dtype.FLOAT16, device_arch(0)
        )
        assert tuned.knobs(choose(problem)) == row["knobs"] == tuned.find(problem)
    tuned._on_disk.cache_clear()
    choose.cache_clear()
