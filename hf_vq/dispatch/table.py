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
CUTILE = "backends.cutile.supports:available"

ENTRIES: tuple[Entry, ...] = (
    # y = W x + b, one or two passes of codes
    Entry("cpu.nested_linear", "linear", "backends.cpu.residual:LINEAR", CPU, NATIVE),
    Entry("cpu.linear", "linear", "backends.cpu.linear:LINEAR", CPU, NATIVE),
    Entry("cuda.tile_linear", "linear", "backends.cuda.linear.tile_codebook:LINEAR", CUDA, NVRTC),
    Entry("cuda.wide_linear", "linear", "backends.cuda.linear.wgmma:LINEAR", CUDA, NVRTC),
    Entry("cuda.fused_linear", "linear", "backends.cuda.linear.direct:LINEAR", CUDA, NVRTC),
    Entry("cuda.linear", "linear", "backends.cuda.linear.dequantize:LINEAR", CUDA, NVRTC),
    Entry("triton.linear", "linear", "backends.triton.linear:LINEAR", GPU, TRITON),
    # The kernels above are faster (docs/turboquant.md): cuTile runs only with HF_VQ_BACKEND.
    Entry(
        "cutile.linear", "linear", "backends.cutile.linear:LINEAR", CUDA, CUTILE, on_request=True
    ),
    Entry("two_passes.linear", "linear", "backends.torch.residual:LINEAR"),
    Entry("reference", "linear", "backends.reference:LINEAR"),
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
    Entry("reference", "encode_weight", "fit.rows:ENCODE"),
    Entry("reference", "encode", "backends.reference:ENCODE"),
    Entry("cuda.rotate", "rotate", "backends.cuda.linear.dequantize:ROTATE", CUDA, NVRTC),
    Entry("reference", "rotate", "backends.reference:ROTATE"),
    # a KV cache that grows
    Entry("cuda.vq_append", "append", "backends.cuda.kv.append:APPEND", CUDA, NVRTC),
    Entry("cpu.vq_append", "append", "backends.cpu.kv:APPEND", CPU, NATIVE),
    Entry("reference", "append", "backends.reference:APPEND"),
    Entry("cuda.vq_attention", "attention", "backends.cuda.kv.attention:ATTENTION", CUDA, NVRTC),
    Entry("cuda.attention_prefill", "attention", "backends.cuda.kv.prefill:ATTENTION", CUDA, NVRTC),
    Entry("cpu.vq_attention", "attention", "backends.cpu.kv:ATTENTION", CPU, NATIVE),
    Entry("torch.attention", "attention", "backends.torch.kv_attention:ATTENTION"),
    Entry("reference", "attention", "backends.reference:ATTENTION"),
    # a KV cache whose memory does not move
    Entry("cuda.vq_store", "store", "backends.cuda.kv.step:STORE", CUDA, NVRTC),
    Entry("cpu.vq_store", "store", "backends.cpu.kv_static:STORE", CPU, NATIVE),
    Entry("reference", "store", "backends.reference:STORE"),
    Entry(
        "cuda.vq_attention", "attention_static", "backends.cuda.kv.attention:STATIC", CUDA, NVRTC
    ),
    Entry(
        "cpu.vq_attention_static", "attention_static", "backends.cpu.kv_static:STATIC", CPU, NATIVE
    ),
    Entry("reference", "attention_static", "backends.reference:STATIC_ATTENTION"),
    # a KV cache in pages
    Entry("cuda.vq_append", "append_paged", "backends.cuda.kv.append:PAGED", CUDA, NVRTC),
    Entry("reference", "append_paged", "backends.reference:PAGED_APPEND"),
    Entry("cuda.vq_attention", "attention_paged", "backends.cuda.kv.attention:PAGED", CUDA, NVRTC),
    Entry("reference", "attention_paged", "backends.reference:PAGED_ATTENTION"),
)  # fmt: skip

ALLOCATORS = {"cpu": "backends.cpu.library:allocate"}
"""Allocators of the blocks of codes of a KV cache, zeros uint8 [shape], by device type; on other
devices torch allocates them. The CPU's uses huge pages, which PyTorch cannot request."""
