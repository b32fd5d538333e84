"""A bare `from_pretrained` loads a VQ model: `import torch` runs `hook`, "vq" imports hf_vq."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import PathFinder

TARGET = "transformers.quantizers.auto"


class _Mapping(dict):
    get = Mapping.get  # asks __getitem__, which dict.get does not

    def __contains__(self, key):
        if key == "vq" and not dict.__contains__(self, key):
            import hf_vq  # noqa: F401  registers "vq" here; does nothing while that import runs
        return isinstance(key, str) and dict.__contains__(self, key)  # a list has no hash

    def __missing__(self, key):
        return dict.__getitem__(self if key in self else {}, key)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        with suppress(Exception):  # Transformers then behaves as if hf_vq were not installed
            if module := sys.modules.get(TARGET):  # imported before torch, or importing it now
                for table in ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING"):
                    if type(getattr(module, table)) is dict:
                        setattr(module, table, _Mapping(getattr(module, table)))
            elif name == TARGET and (spec := PathFinder.find_spec(name, path)):
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: run(module) or self.find_spec("")
                return spec


def hook():  # noqa: D103
    if os.environ.get("HF_VQ_AUTOLOAD", "1").strip().lower() not in ("0", "false", "no", "off"):
        sys.meta_path.insert(0, _Finder())
