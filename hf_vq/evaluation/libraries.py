"""Other libraries in `hf-vq eval --compare`, called as in their documentation.

The row of a peer that is not installed, or that fails on this machine, gives the reason. Scales in
a peer's compute dtype count as 16 bits, as if the model were loaded in bfloat16.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.text import read_text
from ..errors import VQError
from .load import load_model, load_tokenizer

_SCALE_BYTES = 2
CALIBRATION_TOKENS = 1 << 15  # of GPTQ and of our own schemes


@dataclass(frozen=True)
class Job:
    """A model to quantize.

    Args:
        model: directory or Hub id of the original.
        dtype: to compute in.
        device_map: as `from_pretrained` takes it; None = CPU.
        calibration: UTF-8 text, for peers that need one.
        context: tokens of a sequence of it.
    """

    model: str
    dtype: torch.dtype | str
    device_map: str | None
    calibration: str | Path | None
    context: int


@dataclass(frozen=True)
class Peer:
    """A way to quantize weights.

    Args:
        label: for a table.
        module: what is imported, `package` what is installed for it.
        quantize: the quantized model.
        stored: (layer) -> its stored bytes; None for a layer that is not quantized.
        needs_text: True if the peer is calibrated on text.
    """

    label: str
    module: str
    package: str
    quantize: Callable[[Job], Any]
    stored: Callable[[nn.Module], int | None]
    needs_text: bool = False


@dataclass(frozen=True)
class CachePeer:
    """One of Transformers' `QuantizedCache`: its defaults, 0 to 128 newest tokens exact."""

    label: str
    module: str
    package: str
    backend: str
    bits: int
    axis: int


def installed(peer: Peer | CachePeer) -> None:
    """Check that a peer can be imported.

    Raises:
        VQError: it cannot; the message says how to install it.
    """
    try:
        importlib.import_module(peer.module)
    except ModuleNotFoundError as error:
        cure = f"pip install {peer.package}"
        if error.name is None or not peer.module.startswith(error.name):
            cure = f"{peer.package} lacks {error.name}: pip install {error.name}"
        raise VQError(f"not installed: {cure}") from None


def quantized(peer: Peer, job: Job) -> tuple[Any, float]:
    """A model quantized by a peer, and its stored bits per quantized weight.

    Raises:
        VQError: the peer is not installed, lacks a text, or has quantized no layer. Any other error
            is the peer's.
    """
    installed(peer)
    if peer.needs_text and job.calibration is None:
        raise VQError("needs a text to learn from: give --calibration FILE")
    sizes = linear_layers(job.model)
    model = peer.quantize(job).eval()
    found = [
        (sizes[name], nbytes)
        for name, module in model.named_modules()
        if name in sizes and (nbytes := peer.stored(module)) is not None
    ]
    if not found:
        raise VQError("it quantized no layer")
    weights, nbytes = (sum(column) for column in zip(*found, strict=True))
    return model, 8 * nbytes / weights


def linear_layers(model: str) -> dict[str, int]:
    """Weights of each linear layer of a model that was not quantized, by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {
        name: module.weight.numel()
        for name, module in empty.named_modules()
        if isinstance(module, nn.Linear)
    }


def quantized_cache(peer: CachePeer, config: Any) -> Any:
    """An empty cache of a peer for a model's config.

    Raises:
        VQError: it is not installed.
    """
    from transformers.cache_utils import QuantizedCache

    installed(peer)
    return QuantizedCache(
        peer.backend, config, nbits=peer.bits, axis_key=peer.axis, axis_value=peer.axis
    )


def cache_bits(cache: Any) -> float:
    """Stored bits of a number that a filled `QuantizedCache` holds as codes, scales included."""
    nbytes = elements = 0
    for layer in cache.layers:
        for stored in (layer._quantized_keys, layer._quantized_values):
            if isinstance(stored, tuple):  # HQQ: codes, and what belongs to them
                codes, meta = stored
                nbytes += codes.nbytes + _scales(meta["scale"], meta["zero"])
                elements += meta["shape"].numel()
            else:  # quanto
                nbytes += stored._data._data.nbytes + _scales(stored._scale, stored._shift)
                elements += stored.numel()
    return 8 * nbytes / elements


def _scales(*tensors: Tensor) -> int:
    return sum(tensor.numel() * min(tensor.element_size(), _SCALE_BYTES) for tensor in tensors)


def _loaded(job: Job, config: Any) -> Any:
    return load_model(job.model, dtype=job.dtype, config=config, device_map=job.device_map or "cpu")


def _nf4(job: Job) -> Any:
    from transformers import BitsAndBytesConfig

    dtype = job.dtype if isinstance(job.dtype, torch.dtype) else torch.bfloat16
    return _loaded(
        job,
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        ),
    )


def _nf4_bytes(module: Any) -> int | None:
    state: Any = getattr(module.weight, "quant_state", None)
    return None if state is None else int(module.weight.nbytes + state.absmax.nbytes)


def _hqq(job: Job, bits: int) -> Any:
    """Quantize with HQQ's loader: Transformers 5 has none for HQQ yet."""
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = load_model(job.model, dtype=job.dtype)
    AutoHQQHFModel.quantize_model(
        model,
        quant_config=BaseQuantizeConfig(nbits=bits, group_size=64),
        compute_dtype=model.dtype,
        device=job.device_map or "cpu",
    )
    return model


def _hqq_bytes(module: Any) -> int | None:
    if not hasattr(module, "W_q"):
        return None
    return int(module.W_q.nbytes) + _scales(module.meta["scale"], module.meta["zero"])


def _torchao(job: Job, bits: int) -> Any:
    """Integers by the torchao format that every device runs; `Int4WeightOnlyConfig` needs a GPU."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    dtype = getattr(torch, f"int{bits}")
    kind = IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(128))
    return _loaded(job, TorchAoConfig(kind))


def _torchao_bytes(module: Any) -> int | None:
    weight = module.weight
    if not hasattr(weight, "qdata"):
        return None
    # It keeps a code in a byte until a model is exported; what is exported holds its bits.
    bits = int(str(weight.target_dtype).removeprefix("torch.int"))
    return int(weight.qdata.numel() * bits // 8) + _scales(weight.scale)


def _quanto(job: Job, bits: int) -> Any:
    from transformers import QuantoConfig

    return _loaded(job, QuantoConfig(weights=f"int{bits}"))


def _quanto_bytes(module: Any) -> int | None:
    weight = module.weight
    if not hasattr(weight, "_scale"):
        return None
    return int(weight._data._data.nbytes) + _scales(weight._scale, weight._shift)


def _gptq(job: Job, bits: int) -> Any:
    from transformers import GPTQConfig

    assert job.calibration is not None
    tokenizer = load_tokenizer(job.model)
    ids = tokenizer(read_text(job.calibration), add_special_tokens=False, verbose=False).input_ids
    count = min(len(ids), CALIBRATION_TOKENS) // job.context
    pieces = [ids[i * job.context : (i + 1) * job.context] for i in range(count)]
    config = GPTQConfig(
        bits=bits,
        group_size=128,
        dataset=[tokenizer.decode(piece) for piece in pieces],
        tokenizer=tokenizer,
        model_seqlen=job.context,
    )
    return _loaded(job, config)


def _gptq_bytes(module: Any) -> int | None:
    if not hasattr(module, "qweight"):
        return None
    return int(module.qweight.nbytes + module.qzeros.nbytes) + _scales(module.scales)


def _numbered(name: str, all_bits: tuple[int, ...], label: str, *rest: Any) -> Iterator[Any]:
    module, package, quantize, stored, *more = rest

    def of(bits: int) -> Callable[[Job], Any]:
        return lambda job: quantize(job, bits)

    for bits in all_bits:
        peer = Peer(label.format(bits), module, package, of(bits), stored, *more)
        yield f"{name}-{bits}", peer


WEIGHT_PEERS: dict[str, Peer] = {
    "nf4": Peer("bitsandbytes NF4 g64", "bitsandbytes", "bitsandbytes", _nf4, _nf4_bytes),
    **dict(_numbered("hqq", (4, 3, 2), "HQQ int{} g64", "hqq", "hqq", _hqq, _hqq_bytes)),
    **dict(_numbered("torchao", (4, 3, 2), "torchao int{} g128", "torchao", "torchao", _torchao,
                     _torchao_bytes)),
    **dict(_numbered("quanto", (4, 2), "quanto int{} g128", "optimum.quanto", "optimum-quanto",
                     _quanto, _quanto_bytes)),
    **dict(_numbered("gptq", (4, 3, 2), "GPTQ int{} g128", "gptqmodel", "gptqmodel", _gptq,
                     _gptq_bytes, True)),
}  # fmt: skip
CACHE_PEERS: dict[str, CachePeer] = {
    f"{backend}-{bits}": CachePeer(
        f"QuantizedCache, {backend} int{bits} g64", module, package, backend, bits, axis
    )
    # The axes are those that Transformers' documentation recommends.
    for backend, module, package, axis in (
        ("quanto", "optimum.quanto", "optimum-quanto", 0),
        ("hqq", "hqq.core.quantize", "hqq", 1),
    )
    for bits in (4, 2)
}
