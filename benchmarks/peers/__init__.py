"""Kernels of other projects, timed in the same runs as ours."""
