"""Ops on the CPU: libhf_vq_cpu, and what it is called with."""
