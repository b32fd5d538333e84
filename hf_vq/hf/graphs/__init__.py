"""Decoding steps of `generate` on a GPU as CUDA graphs.

cuda_graphs    a step of the model, captured after the first ones
greedy_loop    all that comes after: the choice of tokens is a graph, too
late_reading   the host reads tokens while the GPU computes the next ones
"""
