"""Paths of the kernel sources, the compiled CPU library and the template of model cards."""

import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def kernel_sources() -> Path:
    """The folder of kernel sources: `hf_vq/kernels` in a wheel, else the checkout's `kernels/`."""
    packaged = _PACKAGE / "kernels"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "kernels"


def card_template() -> Path:
    """The Jinja template of model cards: of `hf_vq/model_cards` in a wheel, else the checkout's."""
    packaged = _PACKAGE / "model_cards"
    folder = packaged if packaged.is_dir() else _PACKAGE.parent / "model_cards"
    return folder / "template.md.j2"


def cpu_library() -> Path | None:
    """The compiled `libhf_vq_cpu`, or None where the package was built without a compiler."""
    # An editable install has two folders: the built files in site-packages and the checkout.
    for folder in sys.modules[__package__].__path__:
        library = Path(folder) / "lib" / f"libhf_vq_cpu{_SUFFIX}"
        if library.is_file():
            return library
    return None
