"""Suite `quality-models`: weights and KV caches of any model, with other methods in one run."""
