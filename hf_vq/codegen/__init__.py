"""CUDA kernels compiled at run time: problem -> plan -> source -> cubin -> launch.

    plan              all constants of one kernel; the dataclass is the template's parameter list
    families          candidates, feasible, cost, choose: pure functions from a problem to a plan
    tuned             measured plans, preferred over the model
    jit/device        properties of a GPU, by name or from the driver
    jit/compiler      NVRTC: a template of kernels/cuda and a plan -> machine code
    jit/kernel_store  machine code on disk, shared by all processes
    jit/launch        a loaded kernel and its arguments

No torch here: addresses and streams are numbers. Only `launch` and queries of the driver need a
GPU.
"""
