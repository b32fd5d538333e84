"""What problems of all kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_vq.codegen.attention_plan import Mask
from hf_vq.codegen.jit.device import Arch
from hf_vq.codegen.plan import Dtype, Plan
from hf_vq.formats.scheme import VQScheme
from hf_vq.formats.shared import universal_tensor
from hf_vq.formats.tensors import kv_codebook_spec

from .cover import Features
from .shared_memory import LARGE, NAN, fill

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Case(Protocol):
    """A problem of an op, and what is right."""

    @property
    def name(self) -> str:
        """Of the op and the problem, as a test says it."""

    def plans(self, arch: Arch) -> Sequence[Plan]:
        """What the choosers say of it: plans that must run."""

    def features(self, arch: Arch) -> Features:
        """What it is, and what its first plan has."""

    def inputs(self, device: torch.device) -> Any:
        """Random tensors for `run`."""

    def run(self, inputs: Any) -> tuple[Tensor, ...]:
        """The results of the public op."""

    def check(self, inputs: Any, found: tuple[Tensor, ...]) -> None:
        """Raise AssertionError unless results are those of float64, as far as rounding allows."""


_GIVEN = {"mask": Mask.NONE, "softcapped": False, "page": 0, "centred": False, "aligned": True,
          "matrices": 1}  # fmt: skip


def kernel_of(plan: Plan) -> Plan:
    """A plan but for what an op is called with and no chooser decides: dtypes, mask, soft-cap, size
    of pages, means that do not turn, alignment, number of matrices. Each of all others is run;
    pairs of features meet those (`cover`)."""
    found: dict[str, Any] = {}
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Plan):
            found[field.name] = kernel_of(value)
        elif isinstance(value, Dtype):
            found[field.name] = Dtype.FLOAT16
        elif field.name in _GIVEN:
            found[field.name] = _GIVEN[field.name]
    return replace(plan, **found)


def poison(device: torch.device) -> None:
    """Fill the memory that the allocator gives next with NaN: a result that nobody writes shows."""
    sizes = [size for size in (1 << 12, 1 << 18, 1 << 24) for _ in range(3)]
    held = [torch.full((size,), float("nan"), device=device) for size in sizes]
    del held  # all at once: one after the other would be the same memory


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether results are equal bit by bit; NaN equals itself."""
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def twice(run: Callable[..., Sequence[Tensor]], *given: Any) -> Sequence[Tensor]:
    """The tensors that `run` makes of `given`, in memory full of NaN; in shared memory there is NaN
    at the first call, and a large number at the second.

    Raises:
        AssertionError: they are not the same bits both times.
    """
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    for number in (NAN, LARGE):
        poison(device)
        fill(number, device)
        found.append(run(*given))
    assert same_bits(*found), "the second call on the same inputs has other bits"
    return found[0]


_KEPT = 2 << 30  # bytes


def run_twice(case: Case, device: torch.device, calls: int = 2) -> None:
    """Run a problem several times on the same inputs, in memory full of NaN; in shared memory there
    is NaN at the first call, and a large number at the others.

    Raises:
        AssertionError: results are wrong, or not the same bits each time.
    """
    inputs = case.inputs(device)
    poison(device)
    fill(NAN, device)
    first = case.run(inputs)
    case.check(inputs, first)
    for call in range(1, calls):
        poison(device)
        fill(LARGE, device)
        again = case.run(inputs)
        assert same_bits(first, again), f"call {call + 1} on the same inputs has other bits"
    if torch.cuda.memory_reserved(device) > _KEPT:
        del inputs, first
        torch.cuda.empty_cache()  # other processes run problems on the same GPU


def kv_codebook(scheme: VQScheme, heads: int, dim: int, device: torch.device) -> Tensor:
    """The universal one, or random ones."""
    if scheme.codebook in ("universal", "integers"):
        return universal_tensor(scheme).to(device)
    return torch.randn(kv_codebook_spec(scheme, heads, dim).shape, device=device).half()


def close(found: Tensor, exact: Tensor, bound: float, largest: float) -> None:
    """Raise unless found [groups, numbers] is finite, and of each group the error is at most
    `bound` of its norm, and of each number at most `largest`."""
    assert found.shape == exact.shape, f"{list(found.shape)} is not {list(exact.shape)}"
    bad = ~found.isfinite()
    assert not bad.any(), f"{int(bad.sum())} of {found.numel()} numbers are not finite"
    error = found.double() - exact
    norms, right = error.norm(dim=-1), exact.norm(dim=-1)
    wrong = norms > bound * right
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {len(norms)} groups are wrong by up to "
        f"{float((norms / right.clamp_min(1e-30)).max()):.2e} of their norm, not {bound:.2e}"
    )
    assert float(error.abs().max()) <= largest, f"a number is off by {float(error.abs().max()):.2e}"
