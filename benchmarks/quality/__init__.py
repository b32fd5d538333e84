"""Suites of a model's quality on a text: KL divergence, top-1 agreement, perplexity."""
