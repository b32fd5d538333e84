"""Problems that reach every bucket of the choosers of CUDA kernels (`hf_vq.codegen.families`).

A chooser makes one plan for all sizes of a bucket: tokens up to 2,048 and beyond, fewer than 256
rows times kv heads and more, one token or up to 8, .. Here the sizes that buckets begin with are
found by calling the choosers' own functions, plans are chosen for all of them, and as few problems
are kept as meet every value of every feature, and every pair of values that occurs (`cover`). So a
bucket that is new has a problem without anybody adding one.

Tests run all of them on a GPU (tests/gpu/test_buckets.py) and compare, without one, what the
backends would launch with what was asked for (tests/unit/codegen/test_buckets.py).
scripts/sanitize_cuda runs them under compute-sanitizer.
"""
