"""The backends' own Python up to the launch, without a GPU: what they would ask the choosers, and
the plans of the kernels that they would launch.

Tensors have shapes and no numbers. Ops are called as they are, through
the table of entries; of the machine, only what a driver would say of it is made up.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import weakref
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from hf_vq import backends, dispatch
from hf_vq.backends.cuda.kv import append as cuda_append
from hf_vq.backends.cuda.kv import attention as cuda_attention
from hf_vq.codegen.jit import device, launch
from hf_vq.codegen.jit.device import Arch
from hf_vq.formats import qoq
from hf_vq.formats.tensors import tensor_specs
from hf_vq.ops import codes, kv_ops, published, w4a8
from tests.buckets import linear, rows
from tests.buckets import w4a8 as w4a8_buckets


@dataclasses.dataclass
class Recorded:
    """What was asked of choosers, and the plans that were launched with their blocks."""

    problems: list
    launches: list

    @property
    def plans(self):
        """Of what was launched."""
        return [plan for plan, _ in self.launches]


def facts(arch):
    """What a driver says of a GPU, by the names of its attributes."""
    major, minor = divmod(int("".join(filter(str.isdigit, arch.name))), 10)
    clock = 1_000_000  # kHz
    return {
        "MULTIPROCESSOR_COUNT": arch.sms, "CLOCK_RATE": clock, "GLOBAL_MEMORY_BUS_WIDTH": 8,
        "MEMORY_CLOCK_RATE": arch.dram_bytes_per_clock * clock * arch.sms / 2,
        "COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": arch.shared_per_block,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": arch.shared_per_sm,
        "MAX_THREADS_PER_MULTIPROCESSOR": arch.threads_per_sm,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": arch.registers_per_sm,
    }  # fmt: skip


def modules():
    """The backends of CUDA, imported."""
    found = pkgutil.walk_packages(backends.__path__, "hf_vq.backends.")
    return [
        importlib.import_module(one.name)
        for one in found
        if one.name.startswith("hf_vq.backends.cuda.")
        or one.name == "hf_vq.backends.torch.residual"
    ]


class OnGpu(TorchFunctionMode):
    """Tensors of the device `cuda` are tensors of `meta` that say they are on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Every function of torch, and every attribute of a tensor, while the mode is on."""
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _SAID and args[0].is_meta:
            return _SAID[func](args[0])
        if func is torch.Tensor.cpu and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*map(_meta, args), **{key: _meta(value) for key, value in kwargs.items()})


_SAID = {
    torch.Tensor.device.__get__: lambda x: torch.device("cuda", 0),
    torch.Tensor.is_cuda.__get__: lambda x: True,
    torch.Tensor.is_cpu.__get__: lambda x: False,
    torch.Tensor.is_meta.__get__: lambda x: False,
    torch.Tensor.get_device: lambda x: 0,
    torch.Tensor.data_ptr: lambda x: (id(x) << 4) & ((1 << 46) - 1),
}


def _meta(value):
    """`value`, or the device meta for a GPU."""
    named = isinstance(value, str) and value.startswith("cuda")
    device_ = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("meta") if named or device_ else value


class _Through:
    """An op of torch that runs what it was defined with, whatever its tensors are."""

    def __init__(self, run):
        self.default = self.run = run

    def __call__(self, *arguments):
        return self.run(*arguments)


@contextlib.contextmanager
def recording(monkeypatch, arch: Arch):
    """Record what is launched meanwhile on a GPU that is not there.

    Yields:
        record(case): a `Recorded` of one `tests.buckets.Case`.
    """
    found = Recorded([], [])
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        _driver(patch, arch)
        _launches(patch, found)
        _ops(patch)
        table = [
            dataclasses.replace(entry, available=None) if entry.devices == ("cuda",) else entry
            for entry in dispatch.ENTRIES
        ]
        choosers = _choosers(patch, found)
        stack.enter_context(dispatch.using(table))
        device.device_arch.cache_clear()
        assert device.device_arch(0) == arch

        def record(case):
            _forget()
            found.problems.clear()
            found.launches.clear()
            with OnGpu():
                inputs = case.inputs(torch.device("cuda", 0))
                _grids(inputs)
                case.run(inputs)
            return Recorded(list(found.problems), list(found.launches))

        record.choosers = choosers
        try:
            yield record
        finally:
            _forget()
    device.device_arch.cache_clear()


def _driver(patch, arch):
    known = facts(arch)
    patch.setattr(device, "driver_attribute", lambda name, ordinal: known[name])
    patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 7, raising=False)
    patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def _launches(patch, found):
    def load(self, plan, arguments, ordinal, store):
        self.plan, self.arguments, self.shared = plan, arguments, plan.shared_bytes
        self.overlaps = device.device_arch(ordinal).overlaps_launches
        self.context = self.function = self.local_bytes = 0
        self._any = launch.Prepared(self, 1)

    def prepare(self, kernel, blocks, /, **values):
        self.arguments, self.lock = kernel.arguments(**values), contextlib.nullcontext()
        self._kernel, self._blocks = kernel, blocks

    def start(self, stream, dependent, blocks=None):
        assert stream == 7
        count = self._blocks if blocks is None else blocks
        assert count > 0, f"no blocks of {self._kernel.plan}"
        found.launches.append((self._kernel.plan, count))

    patch.setattr(launch.Kernel, "__init__", load)
    patch.setattr(launch.Prepared, "__init__", prepare)
    patch.setattr(launch.Prepared, "start", start)
    # Numbers are of no use here, and many take long.
    for module in (linear, rows):
        patch.setattr(module, "random_tensors", lambda *layer: _shapes(tensor_specs(*layer)))
    patch.setattr(
        w4a8_buckets.qoq, "encode", lambda x, scheme: _shapes(qoq.qoq_specs(scheme, *x.shape))
    )
    patch.setattr(cuda_attention, "zeros", lambda nbytes, ordinal: 1 << 20)


def _shapes(specs):
    return {
        key: torch.empty(spec.shape, dtype=spec.dtype, device="cuda") for key, spec in specs.items()
    }


def _ops(patch):
    """Ops run what they were defined with."""
    runs = {
        "kv_attention": kv_ops._attention_op, "kv_append": kv_ops._append_op,
        "rotate": codes._rotate, "decode": codes._decode,
        "encode": codes._encode, "linear": library_of("linear"),
        "linears": library_of("horizontal_fusion", "_linears"), "w4a8_linear": w4a8._w4a8_linear,
        "w4a8_linears": w4a8._w4a8_linears, "published_linear": published._published_linear,
    }  # fmt: skip
    for name, run in runs.items():
        patch.setattr(torch.ops.hf_vq, name, _Through(run), raising=False)


def library_of(name, function=None):
    """What the module of an op defines it with."""
    return getattr(importlib.import_module(f"hf_vq.ops.{name}"), function or f"_{name}")


def _choosers(patch, found):
    """Have every `choose` that a backend calls tell its problem."""
    names = []
    for module in modules():
        for name, value in list(vars(module).items()):
            if name == "choose" and callable(value):
                patch.setattr(module, name, _told(value, found))
                names.append(module.__name__)
            elif inspect.ismodule(value) and hasattr(value, "choose"):
                inside = {key: getattr(value, key) for key in dir(value)}
                stand_in = SimpleNamespace(**{**inside, "choose": _told(value.choose, found)})
                patch.setattr(module, name, stand_in)
                names.append(module.__name__)
    return names


def _told(choose, found):
    @functools.wraps(choose)
    def chosen(problem):
        found.problems.append(problem)
        return choose(problem)

    return chosen


def _forget():
    """Everything that backends remember of launches and tensors."""
    for module in modules():
        for value in list(vars(module).values()):
            own = getattr(value, "__module__", "") == module.__name__
            if own and hasattr(value, "cache_clear"):
                value.cache_clear()
    cuda_append._grids.clear()


def _grids(inputs):
    """Grids of codebooks, whose numbers nobody has."""
    for book in _tensors(inputs):
        cells = torch.empty(1, dtype=torch.int32, device="cuda")
        cuda_append._grids[id(book)] = weakref.ref(book), cells, 1.0


def _tensors(inputs):
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, dict):
        yield from _tensors(list(inputs.values()))
    elif isinstance(inputs, list | tuple):
        for each in inputs:
            yield from _tensors(each)
