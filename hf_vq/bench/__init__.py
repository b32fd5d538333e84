"""Measurements: quality of quantized weights and KV caches, and the tables made from them.

`python -m hf_vq.bench SUITE` runs a suite and writes one JSON record, or leaves the rows of a run
that is stopped in RECORD.unfinished;
`python -m hf_vq.bench tables` writes the records into the tables of the README and the docs.
"""
