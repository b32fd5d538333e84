"""Who can run an op. Each module here only adds rows to the dispatch table of `hf_vq.ops`."""
