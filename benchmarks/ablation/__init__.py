"""Kernels without some of their parts: what each costs."""
