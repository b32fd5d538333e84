"""THE dispatch table: every way to run every op, in the order in which they are asked.

The first entry of an op that runs a problem is the one that does; the last one, the reference, runs
any. An entry stands before those that it beats wherever it runs. This file imports no backend:
what an entry names is imported when it is asked.
"""

from __future__ import annotations

from .entry import Entry

CPU, CUDA, GPU = ("cpu",), ("cuda",), ("cuda", "xpu")  # PyTorch calls ROCm cuda

NATIVE = "backends.native:available"  # libhf_vq_cpu was built and loads
NVRTC = "backends.cuda:available"  # NVIDIA GPUs, and a compiler for them
TRITON = "backends.triton:available"
CUTILE = "backends.cutile:available"

ENTRIES: tuple[Entry, ...] = (
    # y = W x + b, one or two passes of codes
    Entry("cpu.nested_linear", "linear", "backends.cpu_nested:LINEAR", CPU, NATIVE),
    Entry("cpu.linear", "linear", "backends.cpu_linear:LINEAR", CPU, NATIVE),
    Entry("cuda.tile_linear", "linear", "backends.cuda_tiles:LINEAR", CUDA, NVRTC),
    Entry("cuda.wide_linear", "linear", "backends.cuda_wide:LINEAR", CUDA, NVRTC),
    Entry("cuda.fused_linear", "linear", "backends.cuda_direct:LINEAR", CUDA, NVRTC),
    Entry("cuda.linear", "linear", "backends.cuda_linear:LINEAR", CUDA, NVRTC),
    Entry("triton.linear", "linear", "backends.triton_linear:LINEAR", GPU, TRITON),
    # The kernels above are faster (docs/turboquant.md): cuTile runs only where it is asked for.
    Entry(
        "cutile.linear", "linear", "backends.cutile_linear:LINEAR", CUDA, CUTILE, on_request=True
    ),
    Entry("two_passes.linear", "linear", "backends.two_passes:LINEAR"),
    Entry("reference", "linear", "backends.reference:LINEAR"),
    # y = W round(x) + b in integers
    Entry("cpu.w4a8_linear", "w4a8_linear", "backends.cpu_w4a8:LINEAR", CPU, NATIVE),
    Entry("cuda.w4a8_wide", "w4a8_linear", "backends.cuda_w4a8:WIDE_LINEAR", CUDA, NVRTC),
    Entry("cuda.w4a8_linear", "w4a8_linear", "backends.cuda_w4a8:LINEAR", CUDA, NVRTC),
    Entry("reference", "w4a8_linear", "backends.reference:W4A8_LINEAR"),
    # y = W x + b, W as another project published it
    Entry("cpu.vptq_linear", "published_linear", "backends.cpu_vptq:LINEAR", CPU, NATIVE),
    Entry("cuda.vptq_linear", "published_linear", "backends.cuda_vptq:LINEAR", CUDA, NVRTC),
    Entry("cuda.vptq_decoded", "published_linear", "backends.cuda_vptq:DECODED", CUDA, NVRTC),
    Entry("reference", "published_linear", "backends.reference:PUBLISHED_LINEAR"),
    # codes to rows
    Entry("cpu.decode", "decode", "backends.cpu_linear:DECODE", CPU, NATIVE),
    Entry("cuda.decode_integers", "decode", "backends.cuda_prefill:DECODE", CUDA, NVRTC),
    Entry("cuda.decode", "decode", "backends.cuda_linear:DECODE", CUDA, NVRTC),
    Entry("two_passes.decode", "decode", "backends.two_passes:DECODE"),
    Entry("reference", "decode", "backends.reference:DECODE"),
    # rows to codes, rotation
    Entry("cuda.encode_weight", "encode_weight", "backends.cuda_encode:ENCODE", CUDA, NVRTC),
    Entry("reference", "encode_weight", "fit.rows:ENCODE"),
    Entry("reference", "encode", "backends.reference:ENCODE"),
    Entry("cuda.rotate", "rotate", "backends.cuda_linear:ROTATE", CUDA, NVRTC),
    Entry("reference", "rotate", "backends.reference:ROTATE"),
    # a KV cache that grows
    Entry("cuda.vq_append", "append", "backends.cuda_append:APPEND", CUDA, NVRTC),
    Entry("cpu.vq_append", "append", "backends.cpu_attention:APPEND", CPU, NATIVE),
    Entry("reference", "append", "backends.reference:APPEND"),
    Entry("cuda.vq_attention", "attention", "backends.cuda_attention:ATTENTION", CUDA, NVRTC),
    Entry("cuda.attention_prefill", "attention", "backends.cuda_prefill:ATTENTION", CUDA, NVRTC),
    Entry("cpu.vq_attention", "attention", "backends.cpu_attention:ATTENTION", CPU, NATIVE),
    Entry("torch.attention", "attention", "backends.torch_attention:ATTENTION"),
    Entry("reference", "attention", "backends.reference:ATTENTION"),
    # a KV cache whose memory does not move
    Entry("cuda.vq_store", "store", "backends.cuda_store:STORE", CUDA, NVRTC),
    Entry("cpu.vq_store", "store", "backends.cpu_static:STORE", CPU, NATIVE),
    Entry("reference", "store", "backends.reference:STORE"),
    Entry("cuda.vq_attention", "attention_static", "backends.cuda_attention:STATIC", CUDA, NVRTC),
    Entry("cpu.vq_attention_static", "attention_static", "backends.cpu_static:STATIC", CPU, NATIVE),
    Entry("reference", "attention_static", "backends.reference:STATIC_ATTENTION"),
    # a KV cache in pages
    Entry("cuda.vq_append", "append_paged", "backends.cuda_append:PAGED", CUDA, NVRTC),
    Entry("reference", "append_paged", "backends.reference:PAGED_APPEND"),
    Entry("cuda.vq_attention", "attention_paged", "backends.cuda_attention:PAGED", CUDA, NVRTC),
    Entry("reference", "attention_paged", "backends.reference:PAGED_ATTENTION"),
)  # fmt: skip

ALLOCATORS = {"cpu": "backends.native:allocate"}
"""What allocates the blocks of codes of a KV cache, zeros uint8 [shape], by device type; elsewhere
torch does. On huge pages, which PyTorch has no way to ask for."""
