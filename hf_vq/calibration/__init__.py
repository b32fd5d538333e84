"""Calibration on text: codes of weights, codebooks and bits of a KV cache."""
