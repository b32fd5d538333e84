"""Vector quantization for Hugging Face Transformers.

model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=VQConfig())
model.generate(**inputs, past_key_values=VQCache(model.config))
"""

from .backends import cpu_attention as _cpu_attention
from .backends import cpu_linear as _cpu_linear
from .backends import cpu_nested as _cpu_nested
from .backends import cpu_static as _cpu_static
from .backends import cpu_vptq as _cpu_vptq
from .backends import cpu_w4a8 as _cpu_w4a8
from .backends import cuda as _cuda
from .backends import cuda_kv_rows as _cuda_kv
from .backends import cuda_w4a8_rows as _cuda_w4a8
from .backends import cutile as _cutile
from .backends import reference as _reference
from .backends import torch_attention as _torch_attention
from .backends import triton as _triton
from .backends import two_passes as _two_passes
from .cache import VQCache
from .errors import (
    VQBackendError,
    VQCacheError,
    VQCalibrationError,
    VQConfigError,
    VQError,
    VQFormatError,
    VQSchemeError,
)
from .fit import rows as _fit_rows
from .formats import KVScheme, QoQScheme, VQScheme
from .hf import (
    VQConfig,
    adopt,
    allocate_kv,
    calibrate_kv,
    capture,
    enable_cache_backend,
    explain,
    merge_passes,
    place_pass2,
    release,
    smooth_attention,
)
from .hf import attention as _attention
from .hf import quantizer as _quantizer

__version__ = "0.1.0"

# Rows of the dispatch table are asked in this order.
for _plugin in (
    _cuda, _cuda_kv, _cuda_w4a8, _cpu_linear, _cpu_nested, _cpu_vptq, _cpu_w4a8, _cpu_attention,
    _cpu_static, _triton, _cutile, _torch_attention, _two_passes, _reference, _fit_rows, _quantizer,
    _attention,
):  # fmt: skip
    _plugin.register()

__all__ = [
    "KVScheme",
    "QoQScheme",
    "VQBackendError",
    "VQCache",
    "VQCacheError",
    "VQCalibrationError",
    "VQConfig",
    "VQConfigError",
    "VQError",
    "VQFormatError",
    "VQScheme",
    "VQSchemeError",
    "__version__",
    "adopt",
    "allocate_kv",
    "calibrate_kv",
    "capture",
    "enable_cache_backend",
    "explain",
    "merge_passes",
    "place_pass2",
    "release",
    "smooth_attention",
]
