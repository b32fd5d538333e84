"""`linear` in NVIDIA's cuTile."""
