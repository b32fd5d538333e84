"""CUDA kernels made at run time: problem -> plan -> source -> cubin -> launch.

    device    what a GPU has, by name or from the driver
    plan      every constant of one kernel; the dataclass is the template's parameter list
    choose    four pure functions that find the plan of a problem
    compiler  NVRTC: a template of kernels/cuda and a plan -> machine code
    store     machine code on disk, found again by every process
    launch    a loaded kernel and its arguments

No torch here: addresses and streams are numbers. Only `launch`, and asking a device what it has,
need a GPU.
"""
