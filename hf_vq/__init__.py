"""Vector quantization for Hugging Face Transformers.

model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=VQConfig())
model.generate(**inputs, past_key_values=VQCache(model.config))
"""

from .cache import VQCache
from .calibration.equivalent_transforms.smooth_attention import smooth_attention
from .calibration.kv_allocation import allocate_kv
from .calibration.kv_codebooks import calibrate_kv
from .errors import (
    VQBackendError,
    VQCacheError,
    VQCalibrationError,
    VQConfigError,
    VQError,
    VQFormatError,
    VQSchemeError,
)
from .formats import KVScheme, QoQScheme, VQScheme
from .hf import (
    VQConfig,
    capture,
    dequantize,
    enable_cache_backend,
    explain,
    load_quantized,
    merge_passes,
    place_pass2,
    quantize_model,
    save_quantized,
)
from .hf import attention as _attention
from .hf import quantizer as _quantizer
from .interop.loftq import replace_lora_weights_loftq
from .interop.quantizer import adopt, release
from .nn.replace import set_activations_bits

__version__ = "0.1.0"

for _plugin in (_quantizer, _attention):
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
    "dequantize",
    "enable_cache_backend",
    "explain",
    "load_quantized",
    "merge_passes",
    "place_pass2",
    "quantize_model",
    "release",
    "replace_lora_weights_loftq",
    "save_quantized",
    "set_activations_bits",
    "smooth_attention",
]
