"""One file per family of kernels: problem, candidates, feasible, cost, choose."""
