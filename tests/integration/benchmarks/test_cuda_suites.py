"""The suite that times CUDA kernels runs, and says what it needs."""

import re

import pytest
import torch

from benchmarks.ablation import parts as cuda_parts
from benchmarks.cpu import calibrate as cpu_calibrate
from benchmarks.cuda import calibrate as cuda_calibrate
from benchmarks.cuda import crossover as cuda_crossover
from benchmarks.cuda import generate as cuda_generate
from benchmarks.cuda import int8 as cuda_int8
from benchmarks.cuda import linear as cuda_linear
from benchmarks.cuda import peers as cuda_peers
from benchmarks.cuda import quantize as cuda_quantize
from benchmarks.cuda import tune as cuda_tune
from benchmarks.cuda import w4a8 as cuda_w4a8
from benchmarks.cuda import w4a8_block as cuda_w4a8_block
from benchmarks.paper_vq_llm import mechanisms as cuda_mechanisms
from benchmarks.tables import cuda_w4a8 as cuda_w4a8_tables
from hf_vq import ops
from hf_vq.codegen.families.linear import LinearProblem
from hf_vq.codegen.jit import compiler
from hf_vq.codegen.jit.device import ARCHES
from hf_vq.codegen.plan import Dtype
from hf_vq.errors import VQBackendError
from hf_vq.formats import weight_scheme
from tests.fixtures.models.small_llama import small_llama
from tests.fixtures.random_weights import random_tensors


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
        cuda_int8,
        cuda_w4a8,
        cuda_w4a8_block,
    ):
        with pytest.raises(VQBackendError, match="needs a CUDA device"):
            suite.run()


def test_times_of_w4a8():
    """A made-up record: which rows are shown."""
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
    times = cuda_w4a8_tables.table(rows).splitlines()
    assert times[2:4] == ["| 1 | 11.0 | 2.50 | - |", "| 64 | 11.1 | 1.20 | 0.50 |"]
    assert len(times) == 7
    assert "`qoq-w4a8` takes 0.83 to 0.91 times as long. One token takes 2.00 to" in times[-1]


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


def test_a_few_blocks_are_calibrated_and_the_model_extrapolated():
    found = cuda_calibrate.calibrated(small_llama(3), "vq-2", "cpu", sequences=4, context=64)
    assert len(found["block_seconds"]) == 2 and min(found["block_seconds"]) > 0
    # Random tokens still have inputs that matter more: their error is less than that of weights.
    assert 0 < found["output_error"] < found["relative_error"] < 0.3
    row = cuda_calibrate.summary("vq-2", [found, found])
    assert row["blocks_measured"] == 4
    found["block_seconds"], found["other_seconds"] = [1.0, 3.0], 4.0
    assert cuda_calibrate.summary("vq-2", [found])["extrapolated_minutes"] == (32 * 2 + 4) / 60


def test_cpu_calibrate(monkeypatch):
    monkeypatch.setattr(cpu_calibrate, "tinybooks_17m", lambda: small_llama(1))
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
