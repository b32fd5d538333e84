"""Every change that hf_vq makes to another library: one table, each with its reason.

`import hf_vq` makes none of them. `apply` makes those of an event when it happens for the first
time, and `undo` puts back what was there. Modules are named by strings and imported when they are
needed, so any layer can call this one.

Public registries are not patches: `import hf_vq` adds its quantizer, attention and mask to those of
Transformers, and its quantizer to those of diffusers once that is imported (`when_imported`).

One wrapper is not here, because it must work where hf_vq is not imported: `hf_vq_autoload` wraps
accelerate's `load_checkpoint_and_dispatch`, which else fails for models of codes (HF_VQ_AUTOLOAD=0
leaves it out; `undo` does not).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any

# Events.
CACHE = "a VQCache is made"
BACKEND = "a model with codes is made, or enable_cache_backend is called"
CONFIG = "a VQConfig is made, or unpickled"
TRACE = "torch.compile traces a product of codes"
CAPTURE = "a model is captured"
VLLM_KV = "a vLLM whose backends do not size their blocks is asked for a KV cache of codes"
VLLM_BACKEND = "vLLM may be asked for a KV cache of codes"

_ABSENT: Any = object()  # an attribute that its owner inherits, or does not have


@dataclass(frozen=True)
class Patch:
    """One attribute of another library.

    Args:
        target: "module:attribute", dotted inside of classes.
        replacement: "module:function" of hf_vq; called with the attribute, returns its successor.
        events: when it is made.
        why: what does not work without it.
        fills: a slot that is filled only if it is None and its module is imported; of several with
            one replacement the first that is free.
        waits: nothing is imported for it; if its module is not, it is made when that is.
    """

    target: str
    replacement: str
    events: tuple[str, ...]
    why: str
    fills: bool = False
    waits: bool = False


TABLE = (
    Patch(
        "transformers.generation.utils:GenerationMixin._prepare_cache_for_generation",
        "hf_vq.hf.generation:tell_the_prompt",
        (CACHE, BACKEND),
        "a VQCache must know left padding and the end of the prompt before the first forward, and "
        "whether generate compiles; Cache has no method that generate calls then",
    ),
    Patch(
        "transformers.modeling_utils:AttentionInterface.get_interface",
        "hf_vq.hf.attention_choice:choose_by_cache",
        (CACHE, BACKEND),
        "attention over codes is `vq` whatever the model's implementation is; a cache cannot name "
        "the attention that reads it",
    ),
    Patch(
        "transformers.generation.utils:QuantizedCache",
        "hf_vq.hf.generation:with_vq_backend",
        (BACKEND,),
        'cache_config={"backend": "vq"}; the backends of QuantizedCache are an if-chain',
    ),
    Patch(
        "transformers.generation.continuous_batching:ContinuousMixin.init_continuous_batching",
        "hf_vq.serving.continuous_batching:with_vq_pages",
        (BACKEND,),
        "pages of codes; continuous batching names its manager, and that its cache, in code",
    ),
    Patch(
        "transformers.quantizers.auto:LOADING_ATTRIBUTES_CONFIG_TYPES",
        "hf_vq.hf.config:with_loading_attributes",
        (CONFIG,),
        "options of a VQConfig that is given for a stored model, such as pass2; the tuple has no "
        "function that adds to it",
    ),
    Patch(
        "transformers.generation.utils:DeferredStopCheck",
        "hf_vq.hf.graphs.late_reading:reading_late",
        (CAPTURE,),
        "the GPU does not wait for the host between two tokens; Transformers defers its check for "
        "the end of a text on MPS only",
    ),
    Patch(
        "transformers.generation.utils:GenerationMixin._sample",
        "hf_vq.hf.generation:around_the_loop",
        (CACHE, BACKEND, CAPTURE),
        "that check is not told which model generates, and decoding steps do not know whether code "
        "of the user's runs between two tokens and may change the model",
    ),
    Patch(
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
        "hf_vq.hf.checkpoint.save:saving_codes",
        (CONFIG,),
        "models of codes are saved whole or not at all, with digests and a model card",
    ),
    Patch(
        "transformers.modeling_utils:PreTrainedModel.push_to_hub",
        "hf_vq.hf.checkpoint.save:pushing_codes",
        (CONFIG,),
        "the same",
    ),
    Patch(
        "transformers.modeling_utils:PreTrainedModel.num_parameters",
        "hf_vq.hf.checkpoint.save:counting_weights",
        (CONFIG,),
        "counts the weights that codes stand for, not bytes of codes",
    ),
    Patch(
        "transformers.modeling_utils:PreTrainedModel.resize_token_embeddings",
        "hf_vq.hf.embeddings:resizing_no_codes",
        (CONFIG,),
        "refuses to resize an embedding of codes",
    ),
    Patch(
        "peft.tuners.tuners_utils:BaseTuner.inject_adapter",
        "hf_vq.interop.adapters:decoding_for_adapters",
        (BACKEND,),
        "adapters that merge into codes, or read the dense weight; PEFT's backends for quantized "
        "layers are an if-chain, which LoRA, LoHa, IA3 and others do not ask",
        waits=True,
    ),
    Patch(
        "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
        "hf_vq.vllm.kv_cache:with_coded_blocks",
        (VLLM_KV,),
        "blocks of the size of their codes; a backend has no say in it before vLLM 0.32",
        waits=True,
    ),
    Patch(
        "vllm.v1.attention.selector:_cached_get_attn_backend",
        "hf_vq.vllm.kv_cache:with_coded_backend",
        (VLLM_BACKEND,),
        "a KV cache of codes without --attention-backend CUSTOM; vLLM chooses among its own "
        "backends, and floats would be kept without a word",
        waits=True,
    ),
    *(
        Patch(
            f"torch._inductor.config:post_grad_custom_{slot}_pass",
            "hf_vq.ops.horizontal_fusion:fusing_pass",
            (TRACE,),
            "linear layers that share an input become one launch; a slot in use is not replaced",
            fills=True,
        )
        for slot in ("pre", "post")
    ),
)  # fmt: skip

MODEL_METHODS = {
    "save_pretrained": "of a part of another module, which does not know codes: refuses",
    "mark_tied_weights_as_initialized": "while a model is loaded: a missing tensor is an error, "
    "not random numbers",
    "fuse_qkv_projections": "of diffusers: codes of several layers do not become those of one",
    "get_compiled_call": "on a GPU, decoding steps of the `generate` that runs replay CUDA graphs",
    "forward": "on a CPU, a decoding step over a VQCache is one call of libhf_vq_cpu",
    "__getstate__": "copies, and models from files, have no `forward` of another model",
}
"""Methods that `override` replaces on one model. A model that owns a function that refers to it is
not free after `del model`, but when Python next looks for cycles. So what every model of codes
needs is in TABLE, for its class. In addition, hf_vq gives norms and activations in front of W4A8
layers a new `forward` (hf/fused_activations.py), PEFT's adapters on codes new methods
(interop/adapters.py), and renames offloaded codes in accelerate's map of a model
(hf/quantize_op.py)."""


@dataclass
class _Made:
    owner: Any
    name: str
    before: Any  # _ABSENT: the owner inherits it
    after: Any


_lock = threading.RLock()
_made: dict[str, _Made] = {}  # by target
_happened: set[str] = set()
_entries: dict[tuple[str, str], tuple[Any, Any]] = {}  # of registries: before, after
_waiting: dict[str, Callable[[], None]] = {}  # by module: what registers hf_vq there


def apply(event: str) -> None:
    """Make the patches of an event, once; thread-safe, and cheap when called again."""
    if event in _happened:
        return
    with _lock:
        for patch in TABLE:
            if event in patch.events:
                if patch.waits and patch.target.partition(":")[0] not in sys.modules:
                    _wait()
                else:
                    (_fill if patch.fills else _replace)(patch)
        if event != TRACE:  # torch._inductor.config.patch empties slots again
            _happened.add(event)


def applied() -> tuple[str, ...]:
    """The targets that are replaced now."""
    return tuple(_made)


def undo() -> None:
    """Restore all replaced attributes and registry entries.

    An attribute that another library replaced after hf_vq stays, and counts as applied until that
    library restores it: its function may call ours, and patching again would wrap both. For tests,
    and for a process that no longer uses hf_vq; caches and models of codes in use lose the patched
    behaviour.
    """
    with _lock:
        _happened.clear()
        if not _waiting:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _AfterImport]
        for target, made in reversed(list(_made.items())):
            found = getattr(made.owner, made.name, None)
            inherited = made.before is _ABSENT
            if found is made.after and inherited:
                delattr(made.owner, made.name)
            elif found is made.after:
                setattr(made.owner, made.name, made.before)
            elif made.name in vars(made.owner) if inherited else found is not made.before:
                warnings.warn(f"{target} was replaced again after hf_vq; it stays.", stacklevel=2)
                continue
            del _made[target]
        for table, key in list(_entries):
            restore_entry(table, key)


def replace_entry(table: str, key: str, value: Any) -> None:
    """Replace an entry of a registry "module:attribute" of another library.

    After a second call for one key, `restore_entry` still restores the original entry.
    """
    with _lock:
        entries = _get(table)
        before, _ = _entries.get((table, key), (entries.get(key, _ABSENT), None))
        _entries[table, key] = before, value
        entries[key] = value


def restore_entry(table: str, key: str) -> None:
    """Undo `replace_entry`, unless somebody else replaced the entry since; may be called again."""
    with _lock:
        before, after = _entries.pop((table, key), (_ABSENT, _ABSENT))
        entries = _get(table)
        if entries.get(key, None) is not after:
            return
        if before is _ABSENT:
            del entries[key]
        else:
            entries[key] = before


def override(model: Any, method: str, function: Callable[..., Any]) -> None:
    """Replace a method of one model; `method` is one of `MODEL_METHODS`.

    Args:
        function: must pickle and copy with the model: a `functools.partial` of a function of a
            module does. A bound method is unpickled as the method of its class.
    """
    if method not in MODEL_METHODS:
        raise KeyError(f"{method} is not in MODEL_METHODS")
    model.__dict__[method] = function


def restore(model: Any, *methods: str) -> None:
    """Give a model the methods of its class back."""
    for method in methods:
        model.__dict__.pop(method, None)


_OF_CODES = "_hf_vq_of_codes"  # of a model: True; of a function: it knows such models
_PATCHED = "transformers.modeling_utils:PreTrainedModel"
_acting = threading.local()  # `.calls`: methods and models that are called now


def begin_codes(model: Any) -> None:
    """Let the methods of a model's class do what models of codes need; of its copies, too."""
    vars(model)[_OF_CODES] = True
    owner = type(model)
    with _lock:
        for patch in TABLE:  # a class that overrides a method acts before `PreTrainedModel` does
            path, _, name = patch.target.rpartition(".")
            before = getattr(owner, name, None) if path == _PATCHED else None
            if before is not None and not hasattr(before, _OF_CODES):
                target = f"{owner.__module__}:{owner.__qualname__}.{name}"
                if target in _made:  # of another class with this name
                    target += f" {id(owner):x}"
                _set(target, owner, name, _get(patch.replacement)(before))


def end_codes(model: Any) -> None:
    """Undo `begin_codes` for a model."""
    vars(model).pop(_OF_CODES, None)


def of_codes(ours: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is `ours(before, model, ..)` for models of codes, once in a call: what `before`
    calls on the same model is the plain one."""

    @functools.wraps(before)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _acting.__dict__.setdefault("calls", set())
        call = before.__name__, id(self)
        if _OF_CODES not in vars(self) or call in calls:
            return before(self, *args, **kwargs)
        calls.add(call)
        try:
            return ours(before, self, *args, **kwargs)
        finally:
            calls.discard(call)

    setattr(method, _OF_CODES, True)
    return method


def when_imported(module: str, register: Callable[[], None]) -> None:
    """Call `register` when a module of another library is imported, or now if it has been; never
    if the library is not installed."""
    with _lock:
        if module in sys.modules:
            register()
        elif PathFinder.find_spec(module.partition(".")[0]) is not None:
            _waiting[module] = register
            _wait()


class _AfterImport:
    """A finder on `sys.meta_path`: a module for which patches wait gets them when it has run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module as the finders after this one do (`importlib.abc.MetaPathFinder`)."""
        waiting = [p for p in TABLE if p.waits and p.target.partition(":")[0] == name]
        spec = PathFinder.find_spec(name, path) if waiting or name in _waiting else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_patch(module: Any) -> None:
            run(module)
            with _lock:
                for patch in waiting:
                    if _happened.intersection(patch.events):  # not undone since
                        _replace(patch)
                if register := _waiting.pop(name, None):
                    register()

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def _wait() -> None:
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)


def _get(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return functools.reduce(getattr, attribute.split("."), import_module(module))


def _replace(patch: Patch) -> None:
    if patch.target in _made:
        return
    path, _, name = patch.target.rpartition("." if "." in patch.target.partition(":")[2] else ":")
    try:
        owner = _get(path) if ":" in path else import_module(path)
        before = getattr(owner, name)
    except (ImportError, AttributeError):
        warnings.warn(
            f"this version has no {patch.target}, which hf_vq replaces: {patch.why}. Install a "
            "version that hf_vq was made for.",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    _set(patch.target, owner, name, _get(patch.replacement)(before))


def _set(target: str, owner: Any, name: str, after: Any) -> None:
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, after)
    _made[target] = _Made(owner, name, own, after)


def _fill(patch: Patch) -> None:
    """Fill a slot, unless it or another of the same replacement is filled already."""
    slots = []
    for other in TABLE:
        if other.replacement == patch.replacement:
            path, _, name = other.target.partition(":")
            if path not in sys.modules:
                return
            slots.append(getattr(sys.modules[path], name))
    path, _, name = patch.target.partition(":")
    owner, value = sys.modules[path], _get(patch.replacement)(None)
    if getattr(owner, name) is None and all(slot is not value for slot in slots):
        setattr(owner, name, value)
        _made[patch.target] = _Made(owner, name, None, value)
