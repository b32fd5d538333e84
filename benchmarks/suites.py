"""The suites by name, with the modules that run them; a module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

TIMED = {
    "cpu-linear": "cpu.linear",
    "cpu-attention": "cpu.attention",
    "cpu-generate": "cpu.generate",
    "cpu-w4a8": "cpu.w4a8",
    "cpu-load": "cpu.load",
    "cpu-calibrate": "cpu.calibrate",
    "cuda-linear": "cuda.linear",
    "cuda-int8": "cuda.int8",
    "cuda-peers": "cuda.peers",
    "cuda-mechanisms": "paper_vq_llm.mechanisms",
    "cuda-parts": "ablation.parts",
    "cuda-attention": "cuda.attention",
    "cuda-generate": "cuda.generate",
    "cuda-generate-kv": "cuda.generate_kv",
    "cuda-quantize": "cuda.quantize",
    "cuda-calibrate": "cuda.calibrate",
    "cuda-crossover": "cuda.crossover",
    "cuda-offload": "cuda.offload",
    "cuda-passes": "cuda.passes",
    "cuda-w4a8": "cuda.w4a8",
    "cuda-w4a8-block": "cuda.w4a8_block",
    "serve": "serving.serve",
    "serve-vllm": "serving.vllm_engine",
}
"""Suites of times."""

QUALITY = {
    "quality-weights": "quality.weights",
    "quality-passes": "quality.passes",
    "quality-finetune": "quality.finetune",
    "quality-qoq": "quality.qoq",
    "quality-kv": "quality.kv",
    "quality-kv-calibrated": "quality.kv_calibrated",
}
"""Suites of a model's quality on a text."""


def load(name: str) -> Any:
    """The module of a suite: its `run`, its SCHEMES and what else its options need."""
    return importlib.import_module(f"benchmarks.{(TIMED | QUALITY)[name]}")
