"""The KV cache on NVIDIA GPUs: append, attention, prefill."""
