"""Decoding steps of `generate` as CUDA graphs that nothing stands in front of.

`generate` with a static cache compiles the model (`get_compiled_call`). At every token the compiled
code compares all that it took for granted, thousands of attributes and tensors, and the CUDA graphs
of torch.compile compare addresses: Python, while the GPU waits. Here the first steps of a
`generate` do that, and later ones replay what was found:

    first steps   compiled code, which checks everything: what ran, on which memory?
    next step     captured as a CUDA graph, unless there is one of just that
    all others    copy the token, its position and the mask; replay

And the host reads a token while the GPU already computes the next one (`late_reading`):

    GPU     step 1 | step 2 | step 3 | ..
    host           launch 2, read 1 | launch 3, read 2 | ..

Models of codes, and models over a `VQCache`, are captured when they generate (`_automatic`), others
by `hf_vq.capture`.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from ... import env, patches
from ...cache.argument import CACHE
from ...cache.static_layer import VQStaticLayer
from ...errors import VQBackendError
from ...nn.experts import VQExperts
from ...nn.linear import VQLinear
from ..step.snapshot import has_hooks, package_of

logger = logging.getLogger(__name__)
_ATTRIBUTE = "_hf_vq_captured"  # of a model: a `_Captured`, or False where that is switched off
_METHOD = "get_compiled_call"
_KNOWN = ("torch", "transformers", "hf_vq", "peft")  # packages that leave nothing behind in a step
_KEPT = 4  # graphs of a model
_UNSETTLED = 8  # steps after which what runs has settled, or never does
GPUS = ("cuda",)  # types of devices
_CODED = (VQLinear, VQExperts)

Inputs = dict[str, Any]
Step = Callable[..., Any]
Watch = Callable[["_Captured", "_Graph", Inputs], None]


def capture(model: PreTrainedModel, enabled: bool | None = True) -> None:
    """Let `model.generate` replay its own CUDA graphs when the cache is static.

        hf_vq.capture(model)
        model.generate(**inputs, past_key_values=StaticCache(model.config, max_cache_len=4096))

    With codes, as weights or in the cache, `generate` does so by itself if no code of yours runs in
    the model or between two tokens (hooks, layers, streamers, logits processors, stopping criteria)
    and it was given no `compile_config`.

    The tokens are those of `generate` without it. Between two calls of `generate` the model may be
    changed in any way, while one runs it may not. Python of the model, such as hooks that collect
    activations, runs in the first steps of a call only. Caches that count in Python (sliding
    windows of Transformers) and models that do not compile as a whole run as always.

    The host reads tokens one step late. After an early end a step too many has run: the cache
    forgets it, but if tokens are sampled, the GPU's generator has drawn once more. Of two threads
    that generate with one model, one waits until the other's greedy text ends.

    Args:
        model: on one GPU.
        enabled: False = never, None = only by `generate` itself; both free its graphs.

    Raises:
        VQBackendError: `model` is no model of Transformers itself, or not on one GPU.
    """
    if not isinstance(model, PreTrainedModel):
        raise VQBackendError(
            f"hf_vq.capture needs the Transformers model itself, got {type(model).__name__}; in a "
            "PeftModel that is peft_model.get_base_model()."
        )
    model.__dict__.pop(_ATTRIBUTE, None)
    if not enabled:
        if enabled is not None:
            model.__dict__[_ATTRIBUTE] = False
        return
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or {device.type for device in devices} != {"cuda"}:
        raise VQBackendError(
            "hf_vq.capture needs a model on one GPU, this one is on "
            f"{', '.join(sorted(map(str, devices)))}. Load it with device_map='cuda:0'."
        )
    model.__dict__[_ATTRIBUTE] = _Captured(model, devices.pop(), automatic=False)
    patches.apply(patches.CAPTURE)


@contextmanager
def loop(model: Any, options: dict[str, Any], unchanging: bool) -> Iterator[None]:
    """The loop over tokens of one `generate`, which captures the model if it may.

    Args:
        options: of the loop, by name.
        unchanging: no code of the user's runs between two tokens.
    """
    config = options.get("generation_config")  # None: of a loop that is not Transformers'
    captured = model.__dict__.get(_ATTRIBUTE)  # a copy's is None
    if captured is None or (captured and captured.automatic):
        unchanging = unchanging and config is not None
        captured = _capture_by_itself(model, options) if unchanging else None
    outer = in_loop(), getattr(_thread, "is_late", False)
    # A step too many would draw once more from the generator of one who did not ask for it.
    late = captured and not (captured.automatic and config and config.do_sample)
    _thread.captured, _thread.is_late = captured, bool(late)
    own = vars(model).get(_METHOD)
    if captured:
        patches.override(model, _METHOD, partial(_get_compiled_call, model))
    try:
        yield
    finally:
        _thread.captured, _thread.is_late = outer
        if captured:
            patches.restore(model, _METHOD)
            if own is not None and getattr(own, "func", None) is not _get_compiled_call:
                patches.override(model, _METHOD, own)


def _get_compiled_call(model: PreTrainedModel, compile_config: Any) -> Step:
    """`get_compiled_call` while a captured model generates, in any thread."""
    compiled: Step = type(model).get_compiled_call(model, compile_config)
    captured = in_loop()
    if not captured or captured is not model.__dict__.get(_ATTRIBUTE):
        return compiled
    return _Decoding(captured, compiled)


def _capture_by_itself(model: PreTrainedModel, options: Inputs) -> _Captured | None:
    device = _automatic(model, options)
    if device is None:
        return None
    patches.apply(patches.CAPTURE)
    with _one_at_a_time:
        known: _Captured | None = model.__dict__.get(_ATTRIBUTE)
        if known is None or known.device != device:
            known = model.__dict__[_ATTRIBUTE] = _Captured(model, device, automatic=True)
    return known


def _automatic(model: PreTrainedModel, options: Inputs) -> torch.device | None:
    """The GPU of a model that `generate` captures by itself; None: it does not.

    Codes are several tensors where a dense layer has one, so that comparing them takes as long as
    the GPU's work. A captured model is right where compiled code is, unless Python of the user's
    runs in the model, or was chosen for compiling it.
    """
    if not env.CAPTURE.get() or model.device.type not in GPUS:
        return None
    config, inputs = options["generation_config"], options.get("model_kwargs", {})
    if not _counts_on_the_gpu(inputs.get(CACHE)):
        return None
    own = vars(model).get(_METHOD)
    chosen = [getattr(one, "compile_config", None) for one in (config, model.generation_config)]
    if (
        (own is not None and getattr(own, "func", None) is not _get_compiled_call)
        or chosen != [None, None]
        or options.get("synced_gpus")
        or not getattr(model, "_can_compile_fullgraph", True)
        or "llama4" in model.config.model_type  # which Transformers does not compile
        or model.config._attn_implementation not in ("sdpa", "vq")
        or not model._valid_auto_compile_criteria(inputs, config)
        or torch.nn.modules.module._has_any_global_hook()
        or any(map(_is_changed, model.modules()))
    ):
        return None
    coded = any(type(layer) is VQStaticLayer for layer in inputs[CACHE].layers)
    if not coded and not any(isinstance(module, _CODED) for module in model.modules()):
        return None
    devices = {parameter.device for parameter in model.parameters()}
    device = devices.pop()
    if devices:
        return None
    if device.type == "cuda":  # graphs share memory, which a stream keeps in order
        stream = torch.cuda.current_stream(device)
        return device if stream == torch.cuda.default_stream(device) else None
    return device


def _is_changed(module: torch.nn.Module) -> bool:
    """True if Python of the user's runs in a module: its class, a hook, a `forward` of another
    package, or one that was compiled."""
    forward = vars(module).get("forward", type(module).forward)
    return (
        has_hooks(module)
        or type(module).__module__.partition(".")[0] not in _KNOWN
        or package_of(forward) not in _KNOWN
        or hasattr(forward, "_torchdynamo_orig_callable")
        or module._compiled_call_impl is not None
    )


# `.ran`: what compiled code of this thread ran, on which memory; `.captured`: of the model that
# generates; `.is_late`: its tokens are read late; `.watch`: sees the inputs of each replay.
_thread = threading.local()


def in_loop() -> _Captured | None:
    """The captured model that generates in this thread, or None."""
    return getattr(_thread, "captured", None)


_one_at_a_time = threading.Lock()  # all that is captured


def reads_late() -> bool:
    """True if the model that generates in this thread is captured, and its tokens are read late."""
    return getattr(_thread, "is_late", False)


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Call `watch` with the graph and the inputs of every step, before it is replayed."""
    outer = getattr(_thread, "watch", None)
    _thread.watch = watch
    try:
        yield
    finally:
        _thread.watch = outer


@contextmanager
def recording(captured: _Captured, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is launched within as `graph`. Other threads (a streamer's) may use the GPU
    meanwhile."""
    record = torch.cuda.graph(graph, pool, captured.stream, capture_error_mode="thread_local")
    before = torch.cuda.stream(torch.cuda.current_stream(captured.device))
    # Where recording fails, it leaves its own stream as the current one.
    with _one_at_a_time, torch.cuda.device(captured.device), before, record:
        yield


def _backend(graph: Any, inputs: Any) -> Step:
    """Inductor without CUDA graphs. It knows no model, since Dynamo forgets no backend."""
    from torch._inductor.compile_fx import compile_fx

    compiled = cast(Step, compile_fx(graph, inputs))

    def run(*flat: Any) -> Any:
        _thread.ran = run, flat
        return compiled(*flat)

    return run


def record(captured: _Captured, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the launches of `launch`, which do not run, as a graph with separate memory."""
    graph = torch.cuda.CUDAGraph()
    with recording(captured, graph, None):
        launch()
    return graph


class _Captured:
    """A model that was compiled, and the graphs captured of it.

    Args:
        automatic: nobody asked for it, so it is used where `_automatic` says so.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, automatic: bool) -> None:
        self.automatic = automatic
        self.compiled: Step = torch.compile(model.__call__, backend=_backend, fullgraph=True)
        self.graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self.device, self.whole = device, True
        self.stream = torch.cuda.Stream(device)  # one, as graphs share the pool
        self.pool = torch.cuda.graph_pool_handle()
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        """A copy of a model, or one from a file, is not captured."""
        return type(None), ()

    def checked(self, inputs: Inputs) -> tuple[Any, Any]:
        """The model's output, and what ran: compiled code, and all memory that it found itself.

        The latter is None if there is no telling.
        """
        _thread.ran = None
        try:
            out = self.compiled(**inputs)
        finally:
            ran, _thread.ran = _thread.ran, None  # which keeps all weights
        if ran is None:  # the compiler is switched off
            return out, None
        code, flat = ran
        given = {x.data_ptr() for x in _leaves(inputs)[0] if isinstance(x, Tensor)}
        found = [_identity(x) for x in flat if not (_on_gpu(x) and x.data_ptr() in given)]
        known = None not in found
        return out, (code, torch.is_inference_mode_enabled(), *found) if known else None

    def keep(self, key: Any, graph: _Graph) -> _Graph:
        """Remember the graph of what ran, and forget the one not used for longest."""
        self.graphs[key] = graph
        self.graphs.move_to_end(key)
        if len(self.graphs) > _KEPT:
            self.graphs.popitem(last=False)
        return graph


class _Graph:
    """One captured step with private copies of its inputs; it keeps no cache alive."""

    def __init__(self, captured: _Captured, inputs: Inputs) -> None:
        leaves, self.structure = _leaves(inputs)
        self.inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        own = tree_unflatten(self.inputs, self.structure)
        cache = inputs[CACHE]
        # Kernels read tables that live as long as the codebooks they were made of.
        coded = [layer for layer in cache.layers if isinstance(layer, VQStaticLayer)]
        self.codebooks = [(layer.k.codebook, layer.v.codebook) for layer in coded]
        self.graph = torch.cuda.CUDAGraph()
        try:
            with recording(captured, self.graph, captured.pool):
                out = captured.compiled(**own, **{CACHE: cache})
        finally:
            _thread.ran = None
        self.kind = type(out)
        self.out = {name: x for name, x in out.items() if name != CACHE}
        self.next: dict[Any, Any] = {}  # of `greedy_loop`

    def takes(self, inputs: Inputs) -> bool:
        """True if `inputs` differ from the captured ones in values only."""
        leaves, structure = _leaves(inputs)
        return structure == self.structure and all(map(_alike, leaves, self.inputs))

    def replay(self, inputs: Inputs) -> Any:
        """The model's output for `inputs`, cloned out of the graph's memory."""
        for x, own in zip(_leaves(inputs)[0], self.inputs, strict=True):
            if isinstance(x, Tensor):
                own.copy_(x)
        cache = inputs[CACHE]
        self.launch(cache)
        out = tree_map_only(Tensor, Tensor.clone, self.out)  # the next replay overwrites it
        return self.kind(**out, **{CACHE: cache})

    def launch(self, cache: Cache) -> None:
        """One step on the present `inputs`, to `out`."""
        self.graph.replay()
        for layer in cache.layers:
            if isinstance(layer, VQStaticLayer):
                layer.stale = True


class _Decoding:
    """The decoding step of one `generate` call, called for every token."""

    def __init__(self, captured: _Captured, compiled: Step) -> None:
        self.captured, self.compiled = captured, compiled
        self._begin(None)

    def _begin(self, cache: Cache | None) -> None:
        self.cache, self.key, self.settled = cache, None, False
        self.graph: _Graph | None = None
        self.checks, self.gave_up = 0, False

    def __call__(self, **inputs: Any) -> Any:
        """One step of the model."""
        captured = self.captured
        if not (captured.whole and _repeats(inputs)):
            return self.compiled(**inputs)
        if inputs[CACHE] is not self.cache:
            self._begin(inputs[CACHE])
        with captured.lock:
            if self.settled and self.graph is None and not self.gave_up:
                graph = captured.graphs.get(self.key)
                if graph is None or not graph.takes(inputs):
                    graph = self._record(inputs)
                self.graph = graph and captured.keep(self.key, graph)
            if self.graph is not None and self.graph.takes(inputs):
                self._watch(self.graph, inputs)
                return self.graph.replay(inputs)
        return self.compiled(**inputs) if self.gave_up else self._checked(inputs)

    def _watch(self, graph: _Graph, inputs: Inputs) -> None:
        """Leave the loop over tokens, by an exception, if it can go on without Transformers."""
        watch: Watch | None = getattr(_thread, "watch", None)
        if watch is not None:
            watch(self.captured, graph, inputs)

    def _record(self, inputs: Inputs) -> _Graph | None:
        """A graph of the step, which does not run; None: it cannot be one, and nobody asked."""
        try:
            return _Graph(self.captured, inputs)
        except RuntimeError as error:
            if not self.captured.automatic:
                raise
            self._give_up("a step is no CUDA graph", error)
            return None  # another cache may fit

    def _give_up(self, why: str, error: BaseException | None = None) -> None:
        """Let the model run as Transformers compiles it, with this cache."""
        if error is not None:
            why += f" ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if self.captured.automatic:
            logger.info("generate checks every step of the model: %s.", why)
        else:
            warnings.warn(f"hf_vq.capture: the model runs as always, {why}.", stacklevel=4)
        self.gave_up = True
        self.captured.graphs.clear()

    def _checked(self, inputs: Inputs) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        failures = TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode
        try:
            out, key = self.captured.checked(inputs)
        except failures as error:  # nothing ran yet
            self._give_up("it does not compile as a whole", error)
            self.captured.whole = False
            return self.compiled(**inputs)
        # What ran twice will run again. A step may have compiled for what the one before changed.
        self.settled = key is not None and (key == self.key or key in self.captured.graphs)
        self.key = key
        self.checks += 1
        if self.captured.automatic and not self.settled and self.checks == _UNSETTLED:
            self._give_up("its memory has no addresses that stay")
        return out


def _repeats(inputs: Inputs) -> bool:
    """True if every step launches the same kernels: one token per sequence, and a static cache,
    which counts its tokens on the GPU."""
    tokens = inputs.get("input_ids")
    if tokens is None or tokens.shape[1] != 1 or not _counts_on_the_gpu(inputs.get(CACHE)):
        return False
    plain = (bool, int, float, str, type(None))
    return all(_on_gpu(x) or isinstance(x, plain) for x in _leaves(inputs)[0])


def _counts_on_the_gpu(cache: Any) -> bool:
    layers = getattr(cache, "layers", ()) if isinstance(cache, Cache) else ()
    return bool(layers) and all(type(layer) in (StaticLayer, VQStaticLayer) for layer in layers)


def leaves(inputs: Inputs) -> list[Any]:
    """All inputs but the cache, in the order of `_Graph.inputs`."""
    return _leaves(inputs)[0]


def _leaves(inputs: Inputs) -> tuple[list[Any], TreeSpec]:
    """All inputs but the cache; some models take a dict of masks."""
    return tree_flatten({name: x for name, x in inputs.items() if name != CACHE})


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _identity(x: Any) -> Any:
    """Key of an input: its address on the GPU, else its value; None if it has no stable key."""
    if not isinstance(x, Tensor):
        return ("value", x)
    if not x.is_cuda:
        return ("value", x.shape, tuple(x.flatten().tolist()))
    address = x.data_ptr()  # 0: a subclass that wraps others
    return (address, x.shape) if address or not x.numel() else None


def _alike(x: Any, own: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(own, Tensor):
        return x.shape == own.shape and x.dtype == own.dtype and x.device == own.device
    return type(x) is type(own) and bool(x == own)
