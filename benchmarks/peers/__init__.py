"""Kernels of other projects, timed beside ours."""
