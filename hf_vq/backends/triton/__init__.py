"""`linear` in Triton, for GPUs without NVRTC."""
