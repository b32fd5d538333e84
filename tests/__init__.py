"""Tests. The problems in `tests.buckets` and the fixtures here are used by `scripts` and
`benchmarks`, too.
"""
