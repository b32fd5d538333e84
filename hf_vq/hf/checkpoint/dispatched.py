"""accelerate's `load_checkpoint_and_dispatch` of a checkpoint of codes.

A model of `from_config` is dense whatever its config says, and accelerate sets tensors of equal
shapes only. `hf_vq_autoload` wraps its function: models of codes come here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...errors import VQConfigError


def load_and_dispatch(
    model: Any,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    max_memory: Any = None,
    no_split_module_classes: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    **others: Any,
) -> Any:
    """Load the model as its class's `from_pretrained` does: verified, and with equal arguments.

    Args:
        model: of `from_config`, with the checkpoint's config; it stays empty.
        checkpoint: the folder, or its file of weights or index.
        others: accelerate's other arguments. How blocks are split, and what hooks skip, the class
            of the model says.

    Returns:
        A new model of the same class.

    Raises:
        VQConfigError: the class has no `from_pretrained`.
    """
    path, kind = Path(checkpoint), type(model)
    if not hasattr(kind, "from_pretrained"):
        raise VQConfigError(
            f"the checkpoint holds codes, and {kind.__name__} has no from_pretrained: build it as "
            "it was saved, and use hf_vq.load_quantized(model, folder)."
        )
    given = {"device_map": device_map, "max_memory": max_memory, "dtype": dtype}
    given |= {"offload_folder": offload_folder, "offload_buffers": offload_buffers or None}
    options = {name: value for name, value in given.items() if value is not None}
    return kind.from_pretrained(path.parent if path.is_file() else path, **options)
