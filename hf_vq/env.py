"""Every HF_VQ_* environment variable: its default, its meaning, and its parser.

`python -m hf_vq.env` prints the table that docs/install.md carries.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def flag(text: str) -> bool:
    """Read `1/0`, `true/false`, `yes/no` or `on/off`; anything else raises ValueError."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def choice(text: str) -> str:
    """Read `auto`, or a flag as `1` or `0`; anything else raises ValueError."""
    word = text.strip().lower()
    try:
        return word if word == "auto" else str(int(flag(word)))
    except ValueError:
        raise ValueError("expected auto, 0 or 1") from None


@functools.cache
def _key(name: str) -> object:
    return os.environ.encodekey(name)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable, read anew at every `get()`: it may change while Python runs."""

    name: str
    default: T
    doc: str
    read: Callable[[str], T]

    def get(self) -> T:
        """Current value; the default if unset or empty.

        Raises:
            ValueError: the value cannot be parsed; the message names the variable.
        """
        # os.environ.get is slow for an unset variable, the usual case: it raises and catches a
        # KeyError, in every call of an op. Its dict is not public, so `get` below is the fallback.
        data = getattr(os.environ, "_data", None)
        if data is not None and _key(self.name) not in data:
            return self.default
        text = os.environ.get(self.name, "")
        if not text or text.isspace():
            return self.default
        try:
            return self.read(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from None


AUTOLOAD = Variable(
    "HF_VQ_AUTOLOAD",
    True,
    "`0`: a process loads VQ models only after it imported hf_vq itself.",
    flag,
)
BACKEND = Variable(
    "HF_VQ_BACKEND",
    "",
    "Run only the entries of the dispatch table with this name or prefix, for example `reference`.",
    str.strip,
)
CAPTURE = Variable(
    "HF_VQ_CAPTURE",
    True,
    "`0`: `generate` replays its own CUDA graphs only after `hf_vq.capture`.",
    flag,
)
CPU_ISA = Variable(
    "HF_VQ_CPU_ISA",
    "",
    "Use the CPU kernels of `zen4`, `avx512`, `avx2`, `dotprod`, `neon` or `scalar` instead of the "
    "best.",
    str.strip,
)
FUSED_INPUTS = Variable(
    "HF_VQ_FUSED_INPUTS",
    True,
    "`0`: each W4A8 layer rounds its own inputs; none is rounded by the norm or the product that "
    "computes it.",
    flag,
)
NATIVE_STEP = Variable(
    "HF_VQ_NATIVE_STEP",
    "auto",
    "On a CPU, a token of `generate` over a `VQCache` is one call of the library. `auto`: once a "
    "model was asked for 48 tokens. `1`: at once. `0`: never.",
    choice,
)
NO_NATIVE = Variable(
    "HF_VQ_NO_NATIVE",
    False,
    "`1` while installing: build without a compiler; ops run in PyTorch.",
    flag,
)
STORE = Variable(
    "HF_VQ_STORE",
    "",
    "Where compiled GPU kernels are kept; by default `hf_vq/kernels` in `HF_HOME`.",
    str.strip,
)

VERIFY = Variable(
    "HF_VQ_VERIFY",
    True,
    "`0`: load models, caches and codebooks without comparing them with their digests.",
    flag,
)
VLLM_KV = Variable(
    "HF_VQ_VLLM_KV",
    "",
    "[vLLM's KV cache](vllm.md#kv-cache): `u4`, `u3`, `u2` or `qserve-kv4`.",
    str.strip,
)

VARIABLES: tuple[Variable[bool] | Variable[str], ...] = (
    AUTOLOAD,
    BACKEND,
    CAPTURE,
    CPU_ISA,
    FUSED_INPUTS,
    NATIVE_STEP,
    NO_NATIVE,
    STORE,
    VERIFY,
    VLLM_KV,
)


def table() -> str:
    """All variables as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in VARIABLES:
        default = variable.default
        shown = (
            f"`{int(default) if isinstance(default, bool) else default}`" if default != "" else ""
        )
        rows.append(f"| `{variable.name}` | {shown} | {variable.doc} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
