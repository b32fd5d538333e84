"""Numbers of a config.json that would keep Transformers making modules for hours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...errors import VQFormatError

MOST = 4096  # layers of a part of a model: a few seconds of making empty modules
_COUNTS = re.compile(r"(^|_)(n_?layers?|layers|layer|depths?|blocks)$")


def check_layers(config: Any, where: str) -> None:
    """Refuse a model of more layers than `MOST`, before it is made.

    Args:
        config: a config of Transformers; its parts are read, too.
        where: the file or folder it is from, for the message.

    Raises:
        VQFormatError: names the field.
    """
    for name, number in _counts(config.to_dict(), ""):
        if number > MOST:
            raise VQFormatError(
                f"{where}: {name} is {number}. hf_vq loads no model of more than {MOST} layers. "
                "Download the checkpoint again."
            )


def _counts(fields: dict[Any, Any], path: str) -> Iterator[tuple[str, int]]:
    for name, value in ((str(key), value) for key, value in fields.items()):
        if isinstance(value, dict):
            yield from _counts(value, f"{path}{name}.")
        elif _COUNTS.search(name):
            numbers = value if isinstance(value, list) else [value]
            yield from ((path + name, n) for n in numbers if isinstance(n, int))
