"""A decoding step of `generate` on a CPU as one call of libhf_vq_cpu.

recorder   what PyTorch computes, as instructions; `recipes` has one for each op
trace      a step that PyTorch computes, as a `Program`
verify     two traces are one program, and each instruction computes what PyTorch did
snapshot   whether the model is still the one that was traced
run        a program on a user's cache, else the model itself
"""

from .run import install, loop, when, why_not

__all__ = ["install", "loop", "when", "why_not"]
