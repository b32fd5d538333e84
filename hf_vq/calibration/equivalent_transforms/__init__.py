"""Transforms of a float model that leave what it computes unchanged: folded into its weights."""
