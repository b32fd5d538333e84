"""Every error that hf_vq raises on purpose. The message says what, where and what to do."""


class VQError(ValueError):
    """Base of all errors of hf_vq: catching it catches every one below."""


class VQSchemeError(VQError):
    """An unknown scheme, a wrong value in one of its fields, a dimension it cannot pack."""


class VQConfigError(VQError):
    """An argument of `VQConfig`, or a stored value, of a wrong type or out of range."""


class VQFormatError(VQError):
    """A stored tensor is missing, of the wrong shape or type, truncated or corrupted."""


class VQCacheError(VQError):
    """A KV cache, or its model, does not support the requested operation."""


class VQCalibrationError(VQError):
    """A text or a model cannot be used for calibration; the message names the cure."""


class VQBackendError(VQError):
    """No kernel can run an op, or the one that was forced cannot: the message lists why."""


def shown(value: object) -> str:
    """`repr(value)` for a message, cut to one line's length; never raises."""
    try:
        text = repr(value)
    except Exception:  # for example an integer of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."
