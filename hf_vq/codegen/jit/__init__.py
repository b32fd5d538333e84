"""From source to a launch: NVRTC, the store of compiled kernels, the CUDA driver."""
