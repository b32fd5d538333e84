"""A bare `from_pretrained` loads a VQ model: `import torch` runs `hook`, `METHODS` import hf_vq."""

import os
import sys
from contextlib import suppress
from functools import wraps
from importlib.machinery import PathFinder

TARGET = "transformers.quantizers.auto"
DIFFUSERS = "diffusers.quantizers.auto"  # has tables of the same names
ACCELERATE, DISPATCH = "accelerate.big_modeling", "load_checkpoint_and_dispatch"
METHODS, TABLES = ("hf_vq", "vq"), ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AUTO_QUANTIZER_MAPPING")


class _Lazy:
    """The entry of a table, until hf_vq is imported and enters its own."""

    def __init__(self, table, target=TARGET):
        self._table, self._target = table, target  # names: a copied table finds the library's own

    def __getattr__(self, name):
        if name.startswith("_"):  # copy, pickle and inspect ask for these
            raise AttributeError(name)
        return getattr(self._entry(name), name)

    def __call__(self, *args, **kwargs):
        return self._entry("__call__")(*args, **kwargs)

    def __instancecheck__(self, value):  # diffusers compares a config with the types of a table
        return "hf_vq" in sys.modules and isinstance(value, self._entry("__instancecheck__"))

    def _entry(self, name):
        import hf_vq  # noqa: F401  registers both; does nothing while that import runs

        found = getattr(sys.modules[self._target], self._table)["vq"]
        if type(found) is _Lazy:
            raise AttributeError(f"hf_vq is not imported yet: it has no {name}")
        return found


def _for_codes(load):
    """accelerate's loader: into a dense model of a checkpoint of codes, it would fit no tensor."""

    @wraps(load)
    def load_or_replace(model, checkpoint, *args, **kwargs):
        found = getattr(getattr(model, "config", None), "quantization_config", None)
        if getattr(found, "get", {}.get)("quant_method") not in METHODS:
            return load(model, checkpoint, *args, **kwargs)
        from hf_vq.hf.checkpoint.dispatched import load_and_dispatch

        return load_and_dispatch(model, checkpoint, *args, **kwargs)

    return load_or_replace


class _Finder:
    """Fills the tables, or wraps the loader, when a library makes them, and is gone then."""

    def __init__(self, target=TARGET):
        self.target = target

    def find_spec(self, name, path=None, target=None):
        with suppress(Exception):  # it then behaves as if hf_vq were not installed
            if module := sys.modules.get(self.target):  # imported before torch, or importing it now
                self.fill(module, complete=not module.__spec__._initializing)
            elif name == self.target and (spec := PathFinder.find_spec(name, path)):
                run = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (run(module), self.fill(module))
                return spec

    def fill(self, module, complete=True):
        names = (DISPATCH,) if self.target == ACCELERATE else TABLES
        found = {name: getattr(module, name, None) for name in names}
        if not complete and None in found.values():
            return
        for name, table in found.items():
            if callable(table):
                setattr(module, name, _for_codes(table))
            for method in METHODS if type(table) is dict else ():
                table.setdefault(method, _Lazy(name, self.target))
        # Not in place: it would have the loop that called us, or another thread's, skip a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


def hook():  # noqa: D103
    if os.environ.get("HF_VQ_AUTOLOAD", "1").strip().lower() not in ("0", "false", "no", "off"):
        more = (DIFFUSERS,) if PathFinder.find_spec("diffusers") else ()
        for target in (TARGET, ACCELERATE, *more):
            sys.meta_path.insert(0, finder := _Finder(target))
            finder.find_spec("")
