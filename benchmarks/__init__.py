"""Measurements, run from a checkout and never installed.

`python -m benchmarks SUITE` runs a suite and writes its record, or leaves the rows of a run that is
stopped in RECORD.unfinished; `python -m benchmarks tables` writes the records into the tables of
the README and the docs; `python -m benchmarks stale` lists records that may be out of date.
"""
