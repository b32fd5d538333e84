"""onnxruntime's GroupQueryAttention with an int8 KV cache, one token per call.

Needs the packages `onnx` and `onnxruntime`; importing this module without them is an ImportError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from ..timing import Candidate, cold_copies

VERSION: str = onnxruntime.__version__


def _model(kv_heads: int, group: int, head_dim: int) -> onnx.ModelProto:
    """One node; past and present keys and values are the same buffers, quantized per tensor."""
    floats, codes = TensorProto.FLOAT, TensorProto.INT8
    cache = [1, kv_heads, "capacity", head_dim]
    heads = kv_heads * group
    inputs = [
        helper.make_tensor_value_info(name, dtype, shape)
        for name, dtype, shape in (
            ("query", floats, [1, 1, heads * head_dim]),
            ("key", floats, [1, 1, kv_heads * head_dim]),
            ("value", floats, [1, 1, kv_heads * head_dim]),
            ("past_key", codes, cache),
            ("past_value", codes, cache),
            ("seqlens_k", TensorProto.INT32, [1]),
            ("total_sequence_length", TensorProto.INT32, []),
            ("k_scale", floats, [1]),
            ("v_scale", floats, [1]),
        )
    ]
    names = [value.name for value in inputs]
    # Five optional inputs lie in front of the scales.
    names[7:7] = [""] * 5
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        do_rotary=0,
        k_quant_type="PER_TENSOR",
        v_quant_type="PER_TENSOR",
        kv_cache_bit_width=8,
    )
    outputs = [
        helper.make_tensor_value_info("output", floats, [1, 1, heads * head_dim]),
        helper.make_tensor_value_info("present_key", codes, cache),
        helper.make_tensor_value_info("present_value", codes, cache),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def step(context: int, kv_heads: int, group: int, head_dim: int) -> Candidate:
    """One token's attention over `context` cached tokens, in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    model = _model(kv_heads, group, head_dim).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    shape = (1, kv_heads, context + 64, head_dim)
    codes = random.integers(-127, 128, shape, dtype=np.int8)
    scale = np.array([0.03], np.float32)
    tokens = {
        name: random.standard_normal((1, 1, heads * head_dim), np.float32)
        for name, heads in (("query", kv_heads * group), ("key", kv_heads), ("value", kv_heads))
    }
    bound: list[tuple[Any, ...]] = []
    for _ in range(cold_copies(2 * codes.nbytes)):
        binding = session.io_binding()
        caches = codes.copy(), codes.copy()
        for name, array in (
            *tokens.items(),
            ("k_scale", scale),
            ("v_scale", scale),
            ("seqlens_k", np.array([context], np.int32)),
            ("total_sequence_length", np.array(context + 1, np.int32)),
        ):
            binding.bind_cpu_input(name, array)
        for name, cache in zip(("key", "value"), caches, strict=True):
            address = cache.ctypes.data
            binding.bind_input(f"past_{name}", "cpu", 0, np.int8, shape, address)
            binding.bind_output(f"present_{name}", "cpu", 0, np.int8, shape, address)
        out = np.zeros((1, 1, kv_heads * group * head_dim), np.float32)
        binding.bind_output("output", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        bound.append((binding, caches, out))
    return Candidate(lambda i: session.run_with_iobinding(bound[i][0]), len(bound))
