"""`python -m benchmarks.peers.cutile_cubins FOLDER`: cuTile's kernel, compiled for another machine.

There, `python -m benchmarks cuda-passes --cubins FOLDER` launches it with the driver alone.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_vq import ops
from hf_vq.codegen.jit.device import checked
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.stored_weight import rotation_of

from ..timing import Candidate

ARCH, DTYPE = "sm_90", "bfloat16"
BITS, GROUP = 4, 128  # of a pass; columns that share a scale
ROWS, TOKENS = 64, 16  # of a block, as in `cutile_kernel`, which cannot be imported everywhere


def runnable(scheme: VQScheme, in_features: int) -> bool:
    """True if the kernel supports rows of this scheme."""
    passes = scheme.stages == "nested" or (scheme.stages == "independent" and scheme.residuals == 1)
    bits = {scheme.entry_bits, scheme.second_bits or scheme.entry_bits}
    return (
        passes
        and (scheme.vector_size, bits) == (1, {BITS})
        and scheme.codebook == "universal"
        and scheme.rotation != "qr"
        and scheme.group(in_features) == GROUP
    )


def path_of(folder: Path, arch: str, nested: bool) -> Path:
    """Path of the cubin for groups of 128."""
    return folder / f"{arch}-{DTYPE}-{'nested' if nested else 'one-pass'}.cubin"


def by_driver(
    x: Tensor, sets: list[dict[str, Tensor]], scheme: VQScheme, folder: Path
) -> Candidate:
    """The layer by a kernel of a folder, with the rotation before it."""
    function = _loaded(path_of(folder, ARCH, scheme.two_passes))
    book = "codebook_2" if scheme.two_passes else "codebook"

    def call(i: int) -> Tensor:
        tensors = sets[i]
        codes = tensors["codes"]
        halves = ops.rotate(x, rotation_of(tensors), scheme).unflatten(1, (-1, 2))
        y = x.new_empty(len(x), len(codes))
        arrays = (
            halves.permute(2, 0, 1).contiguous(), codes, tensors.get("codes_2", codes),
            tensors[book].flatten().to(x.dtype), tensors["scale"], y,
        )  # fmt: skip
        function((-(-len(x) // TOKENS), -(-len(codes) // ROWS)), arrays)
        return y

    return Candidate(call, len(sets))


def _loaded(path: Path) -> Callable[[tuple[int, int], tuple[Tensor, ...]], None]:
    """Load a kernel and return its launcher, which takes blocks and arrays."""
    from cuda.bindings import driver

    (module,) = checked(driver.cuModuleLoadData(path.read_bytes()))
    (function,) = checked(driver.cuModuleGetFunction(module, b"linear"))

    def launch(blocks: tuple[int, int], arrays: tuple[Tensor, ...]) -> None:
        values: list[int] = []
        types: list[Any] = []
        for array in arrays:
            values += [array.data_ptr(), *array.shape, *array.stride()]
            types += [ctypes.c_void_p] + [ctypes.c_int32] * 2 * array.ndim
        stream = torch.cuda.current_stream().cuda_stream
        given = tuple(values), tuple(types)
        checked(driver.cuLaunchKernel(function, *blocks, 1, 1, 1, 1, 0, stream, given, 0))

    return launch


def main(argv: list[str] | None = None) -> None:
    """Compile both kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--arch", default=ARCH, help="default: %(default)s")
    args = parser.parse_args(argv)
    from . import cutile_kernel

    args.folder.mkdir(parents=True, exist_ok=True)
    for nested in (False, True):
        path = path_of(args.folder, args.arch, nested)
        path.write_bytes(cutile_kernel.cubin(args.arch, DTYPE, nested))
        print(path)


if __name__ == "__main__":
    main()
