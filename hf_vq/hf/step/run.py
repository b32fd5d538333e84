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
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import dispatch, env, patches
from ...cache import VQCache, VQCacheLayer
from ...cache.argument import CACHE
from ...cache.next_token import Places, ready, refusal, slot
from ...dispatch.entry import load
from ...errors import VQBackendError
from ...ops.library import autocasts, is_plain_eager
from .snapshot import Snapshot, problem
from .trace import Refused, Step, trace
from .verify import compare, difference

_ATTRIBUTE = "_hf_vq_step"
_KEPT = 4  # programs of a model
_FAR = 1000  # a position to look at next to those of the prompt
_CHANGES = 3  # tokens in a row: a model that writes to itself is not traced again
_WORTH = 8  # tokens that a model computes before its step is traced
_CHECKED = 128  # tokens of a window that the prompt of a trace fills
_ASKED = {"input_ids", CACHE, "position_ids", "attention_mask", "use_cache", "return_dict",
          "logits_to_keep", "cache_position"}  # fmt: skip


class Forward:
    """The `forward` of one model, which pickles and copies with it, and does not keep it alive."""

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
        model = self.model
        if not torch.compiler.is_compiling() and not args:
            out = _step(model, kwargs)
            if out is not None:
                return out
        return type(model).forward(model, *args, **kwargs)


def install(model: PreTrainedModel) -> None:
    """Let a model on a CPU run its decoding steps over a `VQCache` as programs."""
    if env.NATIVE_STEP.get() and "forward" not in model.__dict__ and model.device.type == "cpu":
        patches.override(model, "forward", Forward(model))


def why_not(model: PreTrainedModel, cache: VQCache) -> str | None:
    """Why the decoding steps of a model over a cache run in PyTorch, or None. It traces them."""
    if not env.NATIVE_STEP.get():
        return f"{env.NATIVE_STEP.name} is not 1"
    if not isinstance(model, PreTrainedModel):
        return "it is not a whole model of Transformers"
    own = model.__dict__.get("forward")
    if own is not None and type(own) is not Forward:
        return "the forward of the model was replaced"
    found = _steps_of(model).find(model, cache)
    return found if isinstance(found, str) else None


class _Native:
    """A program that was verified, bound to the cache that it ran on last."""

    def __init__(self, step: Step, compiled: Any, words: int) -> None:
        self.words, self.kind, self.logits, self.dtype = (
            words, step.kind, step.logits, step.program.dtype
        )  # fmt: skip
        self.compiled, self.layers = compiled, sorted(step.slots)
        self.cache: Any = lambda: None  # a weak reference
        self.places: list[Places] = []  # of its layers, empty where they have to be found again
        self.lock = threading.Lock()

    def run(self, cache: VQCache, token: int, position: int) -> Any:
        """The model's output for a token; None if the cache has to take it from the model."""
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
                if not ready(layer):
                    return None
                place = slot(layer)
                if not self.compiled.bind(index, place.view, place[1:]):
                    return None  # PyTorch says what does not fit
                places[number : number + 1] = [Places(layer)]
            out = torch.empty(self.logits, dtype=self.dtype)
            self.compiled.run(token, position, out)
            for each in places:
                each.advance()
            self.places, self.cache = places, weakref.ref(cache)
        return self.kind(logits=out, **{CACHE: cache})


class _Steps:
    """The programs of a model, while it stays unchanged."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.snapshot: Snapshot | None = None
        self.found: OrderedDict[Any, _Native | str] = OrderedDict()
        self.lock = threading.Lock()
        self.computed = 0  # tokens without a program
        self.changes = 0  # of the model, from one token to the next

    def __reduce__(self) -> Any:
        """A copy of a model, or one from a file, is traced anew."""
        return type(None), ()

    def find(self, model: PreTrainedModel, cache: VQCache, at_once: bool = True) -> _Native | str:
        """The program for a cache, or why there is none.

        Args:
            at_once: trace now; else tracing waits for some tokens, as it takes longer than they.
        """
        snapshot = self.snapshot
        if snapshot is None or not snapshot.is_current():
            reason = problem(model)
            if reason is not None:
                return reason
            with self.lock:
                self.found.clear()
                self.snapshot = Snapshot(model)
                self.changes += 1
        else:
            self.changes = 0
        if not at_once and self.changes > _CHANGES:
            return "the model changes again and again"
        key = _kind_of(model, cache)
        found = self.found.get(key)
        if found is None:
            self.computed += 1
            if not at_once and self.computed <= _WORTH:
                return "too few tokens were computed so far"
            with self.lock:
                found = self.found.get(key) or _made(model, cache)
                self.found[key] = found
                if len(self.found) > _KEPT:
                    self.found.popitem(last=False)
        return found


def _steps_of(model: PreTrainedModel) -> _Steps:
    steps = model.__dict__.get(_ATTRIBUTE)
    if steps is None:
        steps = model.__dict__[_ATTRIBUTE] = _Steps(model)
    return steps


def _kind_of(model: PreTrainedModel, cache: VQCache) -> tuple[Any, ...]:
    """Key of a program, next to the model."""
    options = cache.options
    return (
        model.config._attn_implementation, options.scheme, options.sinks, options.window,
        cache.quantize_sliding, id(cache.codebooks), env.BACKEND.get(),
        dispatch.selection.generation,
    )  # fmt: skip


def _step(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """The output of a step that is a program, or None."""
    cache, ids = inputs.get(CACHE), inputs.get("input_ids")
    if type(cache) is not VQCache or ids is None or ids.shape != (1, 1):
        return None
    if torch.is_grad_enabled() or not is_plain_eager(ids) or autocasts(ids.device):
        return None
    if not env.NATIVE_STEP.get() or cache.offloading or not _plain(inputs):
        return None
    length, token = int(cache.get_seq_length()), int(ids.item())
    position = inputs.get("position_ids")
    # Without positions a model counts in its own way.
    if length == 0 or position is None or position.shape != (1, 1):
        return None
    mask = inputs.get("attention_mask")
    if mask is not None and (mask.shape != (1, length + 1) or not bool(mask.all())):
        return None
    found = _steps_of(model).find(model, cache, at_once=False)
    if isinstance(found, str):
        return None
    return found.run(cache, token, int(position.item()))


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
        with torch.no_grad(), torch.inference_mode(False):
            return _traced(model, cache)
    except (Refused, VQBackendError) as error:
        return str(error)
    except Exception as error:  # the model is run in a way that its author did not expect
        return f"tracing it raised {type(error).__name__}: {error}"


def _traced(model: PreTrainedModel, cache: VQCache) -> _Native:
    tokens = cache.options.sinks + min(cache.options.window, _CHECKED) + 3
    words = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, words, (1, tokens + 2), generator=generator)
    for layer in cache.layers:
        if type(layer) is not VQCacheLayer:
            raise Refused(f"a layer of the cache is a {type(layer).__name__}")
    own = _like(cache, model)
    type(model).forward(model, input_ids=prompt[:, :-2], use_cache=True, **{CACHE: own})
    one, other = (int(token) for token in prompt[0, -2:])
    step = trace(model, own, one, None)
    compiled = load(dispatch.STEPS["cpu"])(step.program, len(own.layers))
    compare(step, compiled)
    limit = getattr(model.config, "max_position_embeddings", None) or _FAR + 1
    again = trace(model, own, other, min(_FAR, limit - 1))
    reason = difference(step.program, again.program)
    if reason is not None:
        raise Refused(reason)
    compare(again, compiled)
    return _Native(step, compiled, words)


def _like(cache: VQCache, model: PreTrainedModel) -> VQCache:
    """An empty cache of the same kind."""
    options = cache.options
    means = None
    if cache.codebooks is None:
        means = [getattr(layer, "calibrated", None) for layer in cache.layers]
    return VQCache(
        model.config, options.scheme, options.sinks, options.window, strict=options.strict,
        static=False, quantize_sliding=cache.quantize_sliding, key_means=means,
        codebooks=cache.codebooks,
    )  # fmt: skip
