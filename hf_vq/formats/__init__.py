"""Storage formats: schemes, packed codes, universal codebooks."""

from .catalog import (
    KV_SCHEMES,
    QOQ_SCHEMES,
    WEIGHT_SCHEMES,
    KVScheme,
    LinearScheme,
    kv_scheme,
    linear_scheme,
    scheme_name,
    weight_scheme,
)
from .packing import pack_bits, unpack_bits
from .qoq import QoQScheme
from .scheme import VQScheme
from .spec import TensorSpec, stored_bits, validate_tensor
from .tensors import kv_codebook_spec, tensor_specs

__all__ = [
    "KV_SCHEMES",
    "QOQ_SCHEMES",
    "WEIGHT_SCHEMES",
    "KVScheme",
    "LinearScheme",
    "QoQScheme",
    "TensorSpec",
    "VQScheme",
    "kv_codebook_spec",
    "kv_scheme",
    "linear_scheme",
    "pack_bits",
    "scheme_name",
    "stored_bits",
    "tensor_specs",
    "unpack_bits",
    "validate_tensor",
    "weight_scheme",
]
