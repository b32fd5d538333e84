"""Ablation: kernels with parts left out, to find the cost of each part."""
