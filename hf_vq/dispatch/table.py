"""THE dispatch table: every implementation of every op, in order of preference.

The first entry of an op that supports a problem runs it; the last one, the reference, supports
every problem. An entry stands before those that are slower wherever it runs. This file imports no
backend: an entry's module is imported on first use.
"""

from __future__ import annotations

from .entry import Entry

CPU, CUDA, GPU = ("cpu",), ("cuda",), ("cuda", "xpu")  # PyTorch calls ROCm cuda

NATIVE = "backends.cpu.library:available"  # libhf_vq_cpu was built and loads
NVRTC = "backends.cuda.devices:available"  # NVIDIA GPUs, and a compiler for them
TRITON = "backends.triton.supports:available"

ENTRIES: tuple[Entry, ...] = (
    # y = W x + b, one or two passes of codes
    Entry("cpu.linear", "linear", "backends.cpu.linear:LINEAR", CPU, NATIVE),
    Entry("cuda.tile_linear", "linear", "backends.cuda.linear.tile_codebook:LINEAR", CUDA, NVRTC),
    Entry("cuda.int8_linear", "linear", "backends.cuda.linear.wgmma:INT8_LINEAR", CUDA, NVRTC),
    Entry("cuda.wide_linear", "linear", "backends.cuda.linear.wgmma:LINEAR", CUDA, NVRTC),
    Entry("cuda.fused_linear", "linear", "backends.cuda.linear.bound:LINEAR", CUDA, NVRTC),
    Entry("cuda.linear", "linear", "backends.cuda.linear.dequantize:LINEAR", CUDA, NVRTC),
    Entry("triton.linear", "linear", "backends.triton.linear:LINEAR", GPU, TRITON),
    Entry("two_passes.linear", "linear", "backends.torch.residual:LINEAR"),
    Entry("reference", "linear", "backends.reference:LINEAR"),
    # dL/dx = dL/dy W
    Entry("cpu.input_gradient", "input_gradient", "backends.cpu.decoded:GRADIENT", CPU, NATIVE),
    Entry(
        "cuda.input_gradient", "input_gradient", "backends.cuda.linear.dequantize:GRADIENT",
        CUDA, NVRTC,
    ),
    Entry("reference", "input_gradient", "backends.reference:INPUT_GRADIENT"),
    # y = W round(x) + b in integers
    Entry("cpu.w4a8_linear", "w4a8_linear", "backends.cpu.w4a8:LINEAR", CPU, NATIVE),
    Entry("cuda.w4a8_wide", "w4a8_linear", "backends.cuda.w4a8:WIDE_LINEAR", CUDA, NVRTC),
    Entry("cuda.w4a8_linear", "w4a8_linear", "backends.cuda.w4a8:LINEAR", CUDA, NVRTC),
    Entry("reference", "w4a8_linear", "backends.reference:W4A8_LINEAR"),
    # y = W x + b, W as another project published it
    Entry("cpu.vptq_linear", "published_linear", "backends.cpu.vptq:LINEAR", CPU, NATIVE),
    Entry("cuda.vptq_linear", "published_linear", "backends.cuda.vptq:LINEAR", CUDA, NVRTC),
    Entry("cuda.vptq_decoded", "published_linear", "backends.cuda.vptq:DECODED", CUDA, NVRTC),
    Entry("reference", "published_linear", "backends.reference:PUBLISHED_LINEAR"),
    # codes to rows
    Entry("cpu.decode", "decode", "backends.cpu.linear:DECODE", CPU, NATIVE),
    Entry("cuda.decode_integers", "decode", "backends.cuda.kv.prefill:DECODE", CUDA, NVRTC),
    Entry("cuda.decode", "decode", "backends.cuda.linear.dequantize:DECODE", CUDA, NVRTC),
    Entry("two_passes.decode", "decode", "backends.torch.residual:DECODE"),
    Entry("reference", "decode", "backends.reference:DECODE"),
    # rows to codes, rotation
    Entry("cuda.encode_weight", "encode_weight", "backends.cuda.encode:ENCODE", CUDA, NVRTC),
    Entry("cpu.encode_weight", "encode_weight", "backends.cpu.encode:ENCODE", CPU, NATIVE),
    Entry("reference", "encode_weight", "backends.reference:ENCODE_WEIGHT"),
    Entry("cuda.round_weight", "round_weight", "backends.cuda.encode:ROUND", CUDA, NVRTC),
    Entry("cpu.round_weight", "round_weight", "backends.cpu.encode:ROUND", CPU, NATIVE),
    Entry("reference", "round_weight", "backends.reference:ROUND_WEIGHT"),
    Entry("reference", "encode", "backends.reference:ENCODE"),
    Entry("cuda.rotate", "rotate", "backends.cuda.linear.dequantize:ROTATE", CUDA, NVRTC),
    Entry("reference", "rotate", "backends.reference:ROTATE"),
    # new tokens of a KV cache to codes
    Entry("cuda.vq_store", "kv_append", "backends.cuda.kv.step:APPEND", CUDA, NVRTC),
    Entry("cuda.vq_append", "kv_append", "backends.cuda.kv.append:APPEND", CUDA, NVRTC),
    Entry("cpu.vq_append", "kv_append", "backends.cpu.kv:APPEND", CPU, NATIVE),
    Entry("reference", "kv_append", "backends.reference:KV_APPEND"),
    # what a prompt decides of its keys: means, factors
    Entry("cuda.key_means", "key_means", "backends.cuda.kv.key_means:MEANS", CUDA, NVRTC),
    Entry("cpu.key_means", "key_means", "backends.reference:KEY_MEANS", CPU),
    Entry("reference", "key_means", "backends.reference:KEY_MEANS"),
    Entry(
        "cuda.key_smoothing", "key_smoothing", "backends.cuda.kv.key_means:SMOOTHING", CUDA, NVRTC
    ),
    Entry("cpu.key_smoothing", "key_smoothing", "backends.reference:KEY_SMOOTHING", CPU),
    Entry("reference", "key_smoothing", "backends.reference:KEY_SMOOTHING"),
    # softmax(q K^T) V of codes
    Entry("cuda.vq_attention", "kv_attention", "backends.cuda.kv.attention:ATTENTION", CUDA, NVRTC),
    Entry(
        "cuda.attention_prefill", "kv_attention", "backends.cuda.kv.prefill:ATTENTION", CUDA, NVRTC
    ),
    Entry("cpu.vq_attention", "kv_attention", "backends.cpu.kv:ATTENTION", CPU, NATIVE),
    Entry("torch.attention", "kv_attention", "backends.torch.kv_attention:ATTENTION"),
    Entry("reference", "kv_attention", "backends.reference:KV_ATTENTION"),
)  # fmt: skip

ALLOCATORS = {"cpu": "backends.cpu.library:allocate"}
"""Allocators of the blocks of codes of a KV cache, zeros uint8 [shape], by device type; on other
devices torch allocates them. The CPU's uses huge pages, which PyTorch cannot request."""

STEPS = {"cpu": "backends.cpu.step:CompiledStep"}
"""What runs an `ops.program.Program`, by device type; it may refuse with a VQBackendError."""

HEADS = {"cpu": "backends.cpu.step:head"}
"""What multiplies an `ops.program.Dense` with one row x, by device type: it returns None where it
does not run."""
