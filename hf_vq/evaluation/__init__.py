"""Quality and size of models: what `hf-vq eval`, `info` and `demo` compute and show."""
