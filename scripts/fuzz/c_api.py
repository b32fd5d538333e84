"""Problems of the C API with random sizes and bytes, on every instruction set of this processor.

The C++ tests (kernels/cpu/tests) draw and check them: every buffer ends at, or begins after, an
inaccessible page. Runs alternate between the shipped library and one with AddressSanitizer and
UBSan. Both were built by `make native`.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

from campaign import Finding, Tried, Try

from hf_vq import paths

_COUNTS = re.compile(r"(\d+) problems, (\d+) refused")
MISSING = "its programs are not built: run `make native` first, or give --built"
LIMITS = {"limit": 300, "memory": False}  # many problems a call; AddressSanitizer maps terabytes


def prepare(folder: Path) -> Try | None:
    """Find the test programs in `folder.parent / "built"`; None where they were not built."""
    built = (folder.parent / "built").resolve() / "here" / "kernels" / "cpu"
    programs = {
        "guard pages": (built / "tests" / "api_test_plain", paths.cpu_library(), 2),
        "ASan, UBSan": (built / "tests" / "api_test", built / "libhf_vq_cpu.so", 1),
    }
    if not all(program.is_file() and library for program, library, _ in programs.values()):
        return None

    def attempt(rng: random.Random, number: int) -> Tried:
        what = rng.choice(sorted(programs))
        program, library, repeats = programs[what]
        seed = str(rng.randrange(10**9))
        done = subprocess.run(
            [program, library, str(repeats)], env={**os.environ, "HF_VQ_TEST_SEED": seed},
            capture_output=True, text=True, timeout=LIMITS["limit"], check=False,
        )  # fmt: skip
        if done.returncode:
            said = (done.stderr + done.stdout)[-3000:]
            raise Finding(
                f"status {done.returncode} with {what}", f"HF_VQ_TEST_SEED={seed}\n{said}"
            )
        counts = _COUNTS.findall(done.stdout)
        return Tried(what, sum(int(ran) for ran, _ in counts))

    return attempt
