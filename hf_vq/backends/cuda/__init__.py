"""Ops on NVIDIA GPUs, by kernels that `codegen` generates."""
