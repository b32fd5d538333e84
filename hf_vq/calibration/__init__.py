"""What is learned of a model from text: codes of weights, codebooks and bits of a KV cache."""
