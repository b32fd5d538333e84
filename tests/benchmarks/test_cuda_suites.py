"""The suite that times CUDA kernels runs, and says what it needs."""

import re

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.ablation import parts as cuda_parts
from benchmarks.cpu import calibrate as cpu_calibrate
from benchmarks.cuda import calibrate as cuda_calibrate
from benchmarks.cuda import crossover as cuda_crossover
from benchmarks.cuda import generate as cuda_generate
from benchmarks.cuda import linear as cuda_linear
from benchmarks.cuda import peers as cuda_peers
from benchmarks.cuda import quantize as cuda_quantize
from benchmarks.cuda import tune as cuda_tune
from benchmarks.cuda import w4a8 as cuda_w4a8
from benchmarks.cuda import w4a8_block as cuda_w4a8_block
from benchmarks.paper_vq_llm import mechanisms as cuda_mechanisms
from benchmarks.peers import aqlm_cuda as aqlm_peer
from benchmarks.tables import cuda_limits
from benchmarks.tables import cuda_w4a8 as cuda_w4a8_tables
from hf_vq import ops
from hf_vq.codegen import tuned
from hf_vq.codegen.families.linear import LinearProblem, choose
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES, device_arch
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError
from hf_vq.formats import weight_scheme
from tests.random_weights import random_tensors


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so():
    for suite in (
        cuda_linear,
        cuda_mechanisms,
        cuda_parts,
        cuda_tune,
        cuda_peers,
        cuda_generate,
        cuda_quantize,
        cuda_calibrate,
        cuda_crossover,
        cuda_w4a8,
        cuda_w4a8_block,
    ):
        with pytest.raises(VQBackendError, match="needs a CUDA device"):
            suite.run()


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
    assert "256 x 512, us" in table and "\n| 64 |" in table


@pytest.mark.gpu
def test_cuda_w4a8_block(monkeypatch):
    monkeypatch.setattr(cuda_w4a8_block, "cold_copies", lambda nbytes: 2)
    _, results = cuda_w4a8_block.run(tokens=(1, 40, 300), rounds=1, hidden=1024, ffn=2048)
    rows = results["rows"]
    assert [row["tokens"] for row in rows] == [1, 1, 40, 40, 300, 300]
    assert all(set(row["speedup"]) == {"bf16", "apart"} and row["us"] > 0 for row in rows)
    table = cuda_w4a8_block.table(rows)
    assert "| `qoq-w4a8`, us | x rounding apart | x bf16 |" in table and table.count("\n") == 4


def test_limits_of_w4a8():
    """A made-up record: which rows are shown, and what limits them."""
    rows = []
    for shape in ((6144, 4096), (14336, 4096), (4096, 14336)):
        for tokens, faster in ((1, 2.5), (64, 1.2), (1024, 1.5)):
            given = {"out_features": shape[0], "in_features": shape[1], "tokens": tokens}
            rows.append({"name": "bf16", **given, "us": 100.0})
            for name, us in (("qoq-w4a8", 10.0), ("qoq-w4a8-g128", 11.0 + tokens / 1024)):
                speedup = {"bf16": faster} | ({"int8 x int8": 0.5} if tokens > 16 else {})
                rows.append({"name": name, **given, "us": us, "speedup": speedup})
                if tokens == 1:
                    rows[-1]["of_reading"] = 0.5
                else:
                    rows[-1] |= {"rounding_us": 3.0, "tensor_us": tokens / 64}
    lines = cuda_w4a8_tables.limits(rows).splitlines()
    found = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in lines[2:]}  # fmt: skip
    assert found["1 token, `qoq-w4a8`"] == ["2.5 x", "5 x"]
    # 12 us of bfloat16, and 3 of rounding besides 5 of reading; 18, and besides 16 of products.
    assert found["64 tokens, `qoq-w4a8`"] == ["1.2 x", "1.5 x"]
    assert found["1024 tokens, `qoq-w4a8-g128`"] == ["1.5 x", "0.947 x"]
    times = cuda_w4a8_tables.table(rows).splitlines()
    assert times[2].startswith("| 1 | 11.0 | 2.50 | - | 11.0 |") and len(times) == 7
    assert "`qoq-w4a8` takes 0.83 to 0.91 times as long. One token takes 2.00 to" in times[-1]


def test_the_limit_of_a_whole_model_has_the_python_between_two_steps():
    dense = {"name": "bf16", "cache": "bf16", "generate_ms": 7.0, "captured_ms": 6.0,
             "step_ms": 5.0}  # fmt: skip
    ours = {"name": "vq-4", "cache": "bf16", "ceiling": 2.5,
            "speedup": {"generate_ms": 1.5, "captured_ms": 1.7}}  # fmt: skip
    found = list(cuda_limits._whole([dense, ours]))
    assert [one.limit for one in found] == [(7 / (2 + 2),), (6 / (2 + 1),)]
    assert [one.measured for one in found] == [(1.5,), (1.7,)]


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


def included(file):
    """The text of a template and of all headers that it includes."""
    sources, found, left = compiler.sources(), {}, [file]
    while left:
        name = left.pop()
        if name in sources and name not in found:  # plan.cuh is rendered
            found[name] = sources[name]
            left += re.findall(r'#include "([^"]+)"', sources[name])
    return "\n".join(found.values())


def test_every_part_can_be_left_out():
    """Each macro is asked for by its template, and no other one by any."""
    for template, parts in cuda_parts.PARTS.items():
        asked = set(re.findall(r"#if !?(WITHOUT_\w+)", included(f"linear/{template}.cu")))
        assert asked >= set(cuda_parts.macros(parts)), template
    known = {macro for parts in cuda_parts.PARTS.values() for macro in cuda_parts.macros(parts)}
    assert set(re.findall(r"WITHOUT_\w+", "".join(compiler.sources().values()))) == known


@pytest.mark.parametrize(("name", "tokens"), [("vq-4", 16), ("quip-sharp-2", 128), ("gptvq-2", 16)])
def test_each_part_that_is_left_out_is_other_machine_code(name, tokens):
    if compiler.why_not():
        pytest.skip(compiler.why_not())
    arch = ARCHES["sm_90a"]
    problem = LinearProblem(weight_scheme(name), tokens, 4096, 4096, Dtype.BFLOAT16, arch)
    plan = cuda_parts._chosen(problem)
    left_out = [(), *((part,) for part in cuda_parts.PARTS[plan.kernel])]
    images = {
        compiler.compile_plan(plan, "sm_90a", cuda_parts.macros(parts))[0] for parts in left_out
    }
    assert len(images) == len(left_out)


def test_only_a_part_is_without_the_others_of_the_loop():
    for template, only in cuda_parts.ONLY.items():
        for what, without in only.items():
            assert what[5:] in cuda_parts.PARTS[template] and what[5:] not in without
            assert {"codes", "x"} - {what[5:]} <= set(without) <= set(cuda_parts.PARTS[template])


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


@pytest.mark.parametrize("name", cuda_peers.AQLM)
def test_codes_as_aqlm_keeps_them(name):
    scheme = weight_scheme(name)
    tensors = random_tensors(scheme, 5, 64)
    layer = cuda_peers.aqlm_layer(tensors, 64)
    codes = layer.codes.long() & (len(tensors["codebook"][0]) - 1)
    books = tensors["codebook"].float()
    entries = sum(books[book][codes[..., book]] for book in range(len(books)))
    dense = entries.flatten(1) * tensors["scale"].float()
    assert torch.allclose(dense, ops.decode_weight(tensors, scheme, 64), atol=1e-6)


def test_a_step_is_split_without_counting_twice():
    kernels = [("rotate", 0, 1000), ("linear", 500, 3000), ("linear", 2000, 4000),
               ("triton_poi_fused_linear_mul", 5000, 6000), ("nvjet_sm90", 6000, 16000),
               ("triton_poi_fused__scaled_dot_product_attention_x", 16000, 17000)]  # fmt: skip
    found = {part: ms * 1e6 for part, ms in cuda_generate.split_step(kernels[::-1]).items() if ms}
    assert found == {
        "rotation": 1000, "quantized layers": 3000, cuda_generate.OTHERS: 1000,
        cuda_generate.IDLE: 1000, "output layer": 10000, "attention": 1000,
    }  # fmt: skip


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


def _small(layers):
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=256, vocab_size=64, max_position_embeddings=64,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def test_a_few_blocks_are_calibrated_and_the_model_extrapolated():
    found = cuda_calibrate.calibrated(_small(3), "vq-2", "cpu", sequences=4, context=64)
    assert len(found["block_seconds"]) == 2 and min(found["block_seconds"]) > 0
    # Random tokens still have inputs that matter more: their error is less than that of weights.
    assert 0 < found["output_error"] < found["relative_error"] < 0.3
    row = cuda_calibrate.summary("vq-2", [found, found])
    assert row["blocks_measured"] == 4
    found["block_seconds"], found["other_seconds"] = [1.0, 3.0], 4.0
    assert cuda_calibrate.summary("vq-2", [found])["extrapolated_minutes"] == (32 * 2 + 4) / 60


def test_cpu_calibrate(monkeypatch):
    monkeypatch.setattr(cpu_calibrate, "tinybooks_17m", lambda: _small(1))
    monkeypatch.setattr(cpu_calibrate, "SEQUENCES", 2)
    monkeypatch.setattr(cpu_calibrate, "CONTEXT", 64)
    before, rows = torch.get_num_threads(), []
    _, results = cpu_calibrate.run(threads=(1, 2), report=rows.append)
    assert results["rows"] == rows and torch.get_num_threads() == before
    assert [(row["name"], row["threads"]) for row in rows] == [("vq-2", 1), ("vq-2", 2)]
    assert all(row["seconds"] > 0 for row in rows)


def test_codebooks_of_a_small_matrix_cost_more_than_they_give():
    """256 entries of 4 bytes are an eighth of a bit for each of 256 x 256 weights, and two bits
    for each of 64 x 64, which the other scheme would have had for its codes."""
    rows = [
        cuda_crossover.crossing(*cuda_crossover.problem(size, "cpu"), "gptvq-2-int7")
        for size in (64, 256)
    ]
    for row in rows:
        size = row["size"]
        assert row["bits"] == pytest.approx(2 + 16 / size + 8 * 256 * 4 / size**2)
        # A row of fewer than 128 weights has one scale; of signs there is one for a column.
        assert row["bits_universal"] == pytest.approx(2 + max(16 / size, 1 / 8) + 1 / size)
    assert rows[0]["at_equal_bits"] > rows[1]["at_equal_bits"] > 0
    assert rows[0]["error"] < rows[0]["error_universal"], "hardly more vectors than entries"


@pytest.mark.gpu
def test_cuda_calibrate(monkeypatch):
    monkeypatch.setattr(cuda_calibrate, "llama_3_8b", _small)
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
