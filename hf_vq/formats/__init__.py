"""What is stored: schemes, packed codes, universal codebooks."""

from .catalog import KV_SCHEMES, WEIGHT_SCHEMES, KVScheme, kv_scheme, scheme_name, weight_scheme
from .packing import pack_bits, unpack_bits
from .scheme import VQScheme
from .tensors import TensorSpec, kv_codebook_spec, stored_bits, tensor_specs, validate_tensor

__all__ = [
    "KV_SCHEMES",
    "WEIGHT_SCHEMES",
    "KVScheme",
    "TensorSpec",
    "VQScheme",
    "kv_codebook_spec",
    "kv_scheme",
    "pack_bits",
    "scheme_name",
    "stored_bits",
    "tensor_specs",
    "unpack_bits",
    "validate_tensor",
    "weight_scheme",
]
