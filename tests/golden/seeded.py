"""Numbers that are the same on every machine: bytes of SHAKE-128, made into small exact numbers.

No generator of torch or numpy takes part, since normal numbers differ between vector units.
"""

import hashlib

import torch
from torch import Tensor


def seeded_bytes(name: str, *shape: int) -> Tensor:
    """uint8 `shape`, decided by `name`."""
    size = torch.Size(shape)
    digest = hashlib.shake_128(name.encode()).digest(size.numel())
    return torch.tensor(list(digest), dtype=torch.uint8).reshape(size)


def seeded_integers(name: str, low: int, high: int, *shape: int) -> Tensor:
    """int64 `shape` in low .. high, which are at most 256 apart."""
    return seeded_bytes(name, *shape).long() % (high - low + 1) + low


def seeded_floats(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`shape` of multiples of 1/64 from -2 to just below 2: exact in every float dtype of 8 bits of
    mantissa, as are their sums of 2^15 in float32."""
    return ((seeded_bytes(name, *shape).float() - 128) / 64).to(dtype)


def seeded_scales(name: str, *shape: int) -> Tensor:
    """fp16 `shape` of powers of two from 1/16 to 1/2: a product with one is exact."""
    return torch.exp2(-1.0 - seeded_integers(name, 0, 3, *shape)).half()


def tensor_row(tensor: Tensor) -> str:
    """A tensor in a line: dtype, shape and the first 64 bits of the SHA-256 of its bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def short_text(text: str) -> str:
    """Text of a file's metadata; of digests, of which there is one for each tensor, theirs."""
    if '"__metadata__"' not in text:
        return text
    return f"{len(text)} characters {hashlib.sha256(text.encode()).hexdigest()[:16]}"
