"""`install`: `model.forward` runs the decoding steps that are programs, and the model the others.

A step is a program if one token comes for one sequence, a growing `VQCache` holds its past, nothing
but logits is asked for, and the model is as it was when it was traced. The first such step of a
model traces it, on a cache of random tokens; whatever does not hold runs the model, as always.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ... import dispatch, env, patches
from ...cache import VQCache, VQCacheLayer
from ...cache.argument import CACHE, OLD_CACHE
from ...cache.next_token import Places, WindowPlaces, refusal, take
from ...dispatch.entry import load
from ...errors import VQBackendError
from ...ops.library import autocasts, is_plain_eager
from .recorder import Refused
from .snapshot import Snapshot, has_hooks, problem
from .trace import FAR, Step, trace
from .verify import compare, difference, whole

_ATTRIBUTE = "_hf_vq_step"
_INSTALLED = {_ATTRIBUTE, "__getstate__"}  # attributes of a model, next to its `forward`
_KEPT = 4  # programs of a model
_POSITION = 1000  # to look at next to those of the prompt
_PAYS = 48  # tokens whose savings pay for tracing a step
_CHANGES = 3  # programs in a row that were of no use: no more are made
_CHANGING = "the model changes again and again"
_SINKS, _WINDOW = 4, 4  # at most, of the cache that a step is traced on
_ASKED = {"input_ids", CACHE, "position_ids", "attention_mask", "use_cache", "return_dict",
          "logits_to_keep", "cache_position"}  # fmt: skip


class Forward:
    """The `forward` of one model, which it does not keep alive; copies begin without (`State`).

    Others may have wrapped it, as hooks of accelerate do: then it pickles and copies with them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state["model"])

    @property
    def model(self) -> Any:
        """Whose it is."""
        return self._model()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.model).forward.__get__(self.model))

    @property
    def __code__(self) -> Any:
        """The code of the class's `forward`, for torch.export."""
        return type(self.model).forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A step as a program, or what the model's class does."""
        model, inputs = self.model, kwargs
        if OLD_CACHE in kwargs and CACHE not in kwargs:
            inputs = {CACHE if name == OLD_CACHE else name: x for name, x in kwargs.items()}
        if torch.compiler.is_compiling() or args or not _is_step(inputs):
            return type(model).forward(model, *args, **kwargs)
        cache, steps = inputs[CACHE], _steps_of(model)
        found = steps.ready(model, cache)
        out = None if found is None else found.run(cache, inputs)
        return type(model).forward(model, **kwargs) if out is None else out


class State:
    """The `__getstate__` of one model: files and copies, shallow ones too, have the `forward` of
    its class, because this one would run this model. `generate` gives them another."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> Any:
        """The state that the model's class gives, less what `install` adds."""
        model: Any = self._model()
        of_class = getattr(type(model), "__getstate__", None)  # before Python 3.11 not everywhere
        state = vars(model) if of_class is None else of_class(model)
        if not isinstance(state, dict):
            return state
        return {
            name: value
            for name, value in state.items()
            if not (name in _INSTALLED or (name == "forward" and type(value) is Forward))
        }


def install(model: PreTrainedModel, cache: VQCache, new: int) -> None:
    """Let a model on a CPU run its decoding steps over a `VQCache` as programs.

    By default it does once it was asked for as many tokens as pay for tracing a step. Programs
    compute the bits of the model without them, so no text depends on when that is.

    Args:
        cache: of a call of `generate`.
        new: tokens that it makes at most.
    """
    wanted = env.NATIVE_STEP.get()
    if model.device.type != "cpu":
        model.__dict__.pop(_ATTRIBUTE, None)  # programs keep the weights that they read
    if wanted == "0" or model.device.type != "cpu":
        return
    steps = _steps_of(model)
    steps.requested += new
    pays = wanted == "1" or steps.requested >= _PAYS
    if "forward" not in model.__dict__:  # at once: torch.compile starts again if it changes later
        patches.override(model, "forward", Forward(model))
        patches.override(model, "__getstate__", State(model))
    if type(model.__dict__.get("forward")) is Forward:
        steps.begin(cache, pays)


@contextmanager
def loop(model: PreTrainedModel, unchanging: bool) -> Iterator[None]:
    """The loop over tokens of one `generate`.

    Args:
        unchanging: no code of the user's runs between two tokens, so the model is compared once,
            unless it runs around the forward. What another thread changes is seen by the next loop.
    """
    steps = model.__dict__.get(_ATTRIBUTE)
    own = type(model.__dict__.get("forward")) is Forward and not has_hooks(model)
    if steps is None or not (unchanging and own):
        yield
        return
    steps.unchanging.add(threading.get_ident())
    try:
        yield
    finally:
        steps.unchanging.discard(threading.get_ident())
        steps.compared.discard(threading.get_ident())


def when() -> str:
    """When the decoding steps of a model run as programs."""
    wanted = env.NATIVE_STEP.get()
    return "" if wanted == "1" else f", once the model was asked for {_PAYS} tokens"


def why_not(model: PreTrainedModel, cache: VQCache) -> str | None:
    """Why the decoding steps of a model over a cache run in PyTorch, or None. It traces them."""
    if env.NATIVE_STEP.get() == "0":
        return f"{env.NATIVE_STEP.name} is 0"
    if not isinstance(model, PreTrainedModel):
        return "it is not a whole model of Transformers"
    own = model.__dict__.get("forward")
    if own is not None and type(own) is not Forward:
        return "the forward of the model was replaced"
    steps = _steps_of(model)
    found = _CHANGING if steps.changes > _CHANGES else steps.find(model, cache)
    return found if isinstance(found, str) else None


class _Native:
    """A program that was verified, bound to the cache that it ran on last."""

    def __init__(self, step: Step, compiled: Any, words: int) -> None:
        self.words, self.kind, self.logits, self.dtype = (
            words, step.kind, step.logits, step.program.dtype
        )  # fmt: skip
        self.compiled, self.layers = compiled, sorted(step.slots)
        self.cache: Any = lambda: None  # a weak reference
        # Of its layers, empty where they have to be found again.
        self.places: list[Places | WindowPlaces] = []
        self.lock = threading.Lock()
        self.runs = 0

    def run(self, cache: VQCache, inputs: dict[str, Any]) -> Any:
        """The model's output for a token; None if the cache has to take it from the model."""
        token, position = int(inputs["input_ids"].item()), int(inputs["position_ids"].item())
        if not 0 <= token < self.words:
            return None  # the model's error
        with self.lock:
            places = self.places if self.cache() is cache else []
            self.places = []
            layers = cache.layers
            for number, index in enumerate(self.layers):
                layer: Any = layers[index]
                if number < len(places) and places[number].layer is layer:
                    if places[number].hold():
                        continue
                elif refusal(layer):
                    return None
                taken = take(layer)
                if taken is None or not self.compiled.bind(index, taken[0].view, taken[0][1:]):
                    return None  # PyTorch says what does not fit
                places[number : number + 1] = [taken[1]]
            out = torch.empty(self.logits, dtype=self.dtype, device="cpu")
            self.compiled.run(token, position, out)
            for index, each in zip(self.layers, places, strict=True):
                if each.advance():
                    self.compiled.forget(index)
            self.places, self.cache = places, weakref.ref(cache)
            self.runs += 1
        return self.kind(logits=out, **{CACHE: cache})


class _Steps:
    """The programs of a model, while it stays unchanged, and when to make one."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.found: OrderedDict[Any, _Native | str] = OrderedDict()
        self.refused: dict[Any, str] = {}  # until `generate` is called again
        self.lock = threading.Lock()
        self.long: weakref.WeakSet[VQCache] = weakref.WeakSet()  # caches of calls that pay for it
        self.requested = 0  # tokens, by all calls of `generate`
        self.changes = 0  # programs in a row that a change of the model ended before they paid
        self.unchanging: set[int] = set()  # threads in whose loops nobody changes the model,
        self.compared: set[int] = set()  # and those of them that have compared it

    def __reduce__(self) -> Any:
        """A copy of a model, or one from a file, is traced anew."""
        return type(None), ()

    def begin(self, cache: VQCache, pays: bool) -> None:
        """`generate` was called."""
        (self.long.add if pays else self.long.discard)(cache)
        self.refused.clear()

    def ready(self, model: PreTrainedModel, cache: VQCache) -> _Native | None:
        """The program for the next token of a cache, or None."""
        if cache not in self.long and env.NATIVE_STEP.get() != "1":
            return None
        key = _kind_of(model, cache)
        if key in self.refused:
            return None
        thread = threading.get_ident()
        if self.found and thread not in self.compared:
            self._compare(model)
            if thread in self.unchanging:
                self.compared.add(thread)
        found = self.found.get(key)
        if found is None:
            found = _CHANGING if self.changes > _CHANGES else self.find(model, cache)
        if isinstance(found, _Native):
            return found
        self.refused[key] = found
        return None

    def find(self, model: PreTrainedModel, cache: VQCache) -> _Native | str:
        """The program for a cache, which is made now, or why there is none."""
        self._compare(model)
        if self.snapshot is None and (reason := problem(model)) is not None:
            return reason
        key = _kind_of(model, cache)
        with self.lock:
            self.snapshot = self.snapshot or Snapshot(model)
            found = self.found[key] = self.found.get(key) or _made(model, cache)
            if len(self.found) > _KEPT:
                self.found.popitem(last=False)
        return found

    def _compare(self, model: PreTrainedModel) -> None:
        """Forget all programs if the model is not the one that they were made of."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.is_current(model):
            return
        with self.lock:  # while another thread traces, modules have other methods
            if self.snapshot is None or self.snapshot.is_current(model):
                return
            runs = [each.runs for each in self.found.values() if isinstance(each, _Native)]
            self.changes = self.changes + 1 if max(runs, default=_PAYS) < _PAYS else 0
            self.found.clear()
            self.snapshot = None


def _steps_of(model: PreTrainedModel) -> _Steps:
    steps = model.__dict__.get(_ATTRIBUTE)
    if steps is None:
        steps = model.__dict__[_ATTRIBUTE] = _Steps()
    return steps


def _kind_of(model: PreTrainedModel, cache: VQCache) -> tuple[Any, ...]:
    """Key of a program, next to the model."""
    options = cache.options
    return (
        model.config._attn_implementation, options.scheme, options.sinks, options.window,
        cache.quantize_sliding, id(cache.codebooks), env.BACKEND.get(),
        dispatch.selection.generation,
    )  # fmt: skip


def _is_step(inputs: dict[str, Any]) -> bool:
    """True if the inputs of a model are those of a step that may be a program."""
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if type(cache) is not VQCache or ids is None or ids.shape != (1, 1):
        return False
    if ids.device.type != "cpu":
        return False
    if torch.is_grad_enabled() or not is_plain_eager(ids) or autocasts(ids.device):
        return False
    if env.NATIVE_STEP.get() == "0" or cache.offloading or not _plain(inputs):
        return False
    length, position = int(cache.get_seq_length()), inputs.get("position_ids")
    # Without positions a model counts in its own way.
    if length == 0 or position is None or position.shape != (1, 1):
        return False
    mask = inputs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return mask is None
    return mask.shape == (1, length + 1) and bool(mask.all())


def _plain(inputs: dict[str, Any]) -> bool:
    """True if logits of the token are all that is asked for."""
    for name, value in inputs.items():
        if name not in _ASKED and value is not None and value is not False:
            return False
    keep = inputs.get("logits_to_keep", 0)
    return (
        inputs.get("return_dict") is True
        and inputs.get("use_cache") in (None, True)
        and isinstance(keep, int)
        and keep in (0, 1)
    )


# -- tracing -------------------------------------------------------------------------------------


def _made(model: PreTrainedModel, cache: VQCache) -> _Native | str:
    """A program for a cache, verified; or why there is none."""
    forced = env.BACKEND.get()
    if forced:
        return f"HF_VQ_BACKEND={forced}"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "the model takes no position_ids"
    try:
        with torch.no_grad(), torch.inference_mode(False), torch.random.fork_rng(devices=[]):
            return _traced(model, cache)
    except (Refused, VQBackendError) as error:
        return str(error)
    except Exception as error:  # the model is run in a way that its author did not expect
        return f"tracing it raised {type(error).__name__}: {error}"


def _traced(model: PreTrainedModel, cache: VQCache) -> _Native:
    own = _like(cache, model)
    tokens = own.options.sinks + own.options.window + 3
    words = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, words, (1, tokens + 2), generator=generator)
    for layer in cache.layers:
        if type(layer) not in (VQCacheLayer, DynamicSlidingWindowLayer):
            raise Refused(f"a layer of the cache is a {type(layer).__name__}")
    type(model).forward(model, input_ids=prompt[:, :-2], use_cache=True, **{CACHE: own})
    one, other = (int(token) for token in prompt[0, -2:])
    compile_ = load(dispatch.STEPS["cpu"])
    early, far = _lengths(own, model)
    step = trace(model, own, one, early, early)
    calls = compare(step, compile_(step.program, len(own.layers)))
    again = trace(model, own, other, far, FAR)
    reason = difference(step.program, again.program)
    if reason is not None:
        raise Refused(reason)
    calls |= compare(again, compile_(again.program, len(own.layers)))
    compiled = compile_(whole(step.program, again.program, calls), len(own.layers))
    return _Native(step, compiled, words)


def _lengths(cache: VQCache, model: PreTrainedModel) -> tuple[int | None, int]:
    """Positions of two tokens: in a window that is not yet full, of one token less, if the cache
    has windows; and far from the first one."""
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or _POSITION + 1
    layers: list[Any] = cache.layers
    windows = [each.sliding_window for each in layers if each.is_sliding]
    return min(windows) - 2 if windows else None, min(_POSITION, limit - 1)


def _like(cache: VQCache, model: PreTrainedModel) -> VQCache:
    """An empty cache of the same kind, for a few tokens."""
    options = cache.options
    means = None
    if cache.codebooks is None:
        means = [getattr(layer, "calibrated", None) for layer in cache.layers]
    return VQCache(
        model.config, options.scheme, min(options.sinks, _SINKS), min(options.window, _WINDOW),
        strict=options.strict,
        static=False, quantize_sliding=cache.quantize_sliding, key_means=means,
        codebooks=cache.codebooks,
    )  # fmt: skip
