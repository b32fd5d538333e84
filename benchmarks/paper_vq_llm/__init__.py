"""The kernel of the paper VQ-LLM (arXiv:2503.02236) as published: a baseline."""
