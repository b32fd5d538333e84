"""Vector quantization for Hugging Face Transformers."""

from .backends import reference as _reference
from .errors import VQError
from .formats import VQScheme

__version__ = "0.1.0"

_reference.register()

__all__ = ["VQError", "VQScheme", "__version__"]
