"""A plugin of vLLM: models with codes, served by an unpatched vLLM.

    vllm serve OUT          # OUT: written by `save_pretrained`, `hf-vq quantize` or `calibrate`

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes.
"""

from __future__ import annotations

from .config import register

__all__ = ["register"]
