"""Memory bandwidth of torch's threads: the roofline of every kernel that reads codes."""

from __future__ import annotations

from hf_vq.backends.cpu import library as native

from ..timing import Candidate, cold_copies


def reading(nbytes: int) -> Candidate | None:
    """Reads `nbytes` bytes of main memory, on huge pages; None without the native library."""
    library = native.load()
    if library is None:
        return None
    memory = [native.allocate((nbytes,)).fill_(1) for _ in range(cold_copies(nbytes))]
    return Candidate(lambda i: library.hf_vq_read_memory(memory[i].data_ptr(), nbytes), len(memory))
