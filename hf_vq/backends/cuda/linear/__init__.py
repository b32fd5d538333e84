"""`linear`, `decode` and `rotate` on NVIDIA GPUs: one file per kernel."""
