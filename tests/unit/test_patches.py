"""hf_vq.patches: what of other libraries is replaced, when, and how it is put back."""

import json
import os
import subprocess
import sys
import threading
import types
from importlib.util import find_spec

import pytest

from hf_vq import patches

LIBRARIES = ("transformers", "accelerate", "torch", "peft", "huggingface_hub", "safetensors")

# What `import hf_vq` adds to registries that are made for it.
ADDED = [
    "transformers.masking_utils.AttentionMaskInterface._global_mapping['vq']",
    "transformers.modeling_utils.AttentionInterface._global_mapping['vq']",
    "transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING['hf_vq']",
    "transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING['vq']",
    "transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING['hf_vq']",
    "transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING['vq']",
]

# Every attribute of every module and class, and every entry of their dicts, lists and sets.
LOOK = """
import importlib, json, sys, types
LIBRARIES = {libraries}

def modules():
    return [m for n, m in list(sys.modules.items())
            if n.split(".")[0] in LIBRARIES and isinstance(m, types.ModuleType)]

def look():
    found = {{}}
    def take(owner, where):
        for name, value in list(vars(owner).items()):
            if name in ("__builtins__", "__annotations_cache__", "_abc_impl"):
                continue
            found[where + "." + name] = value
            kind = type(value)
            if issubclass(kind, dict) and name != "__dict__" and len(value) < 20000:
                for key, entry in list(dict.items(value)):
                    if isinstance(key, (str, type)):
                        found[f"{{where}}.{{name}}[{{key!r}}]"] = entry
            elif kind in (list, tuple, set, frozenset):
                found[f"{{where}}.{{name}}()"] = kind, list(map(id, value))
    for module in modules():
        take(module, module.__name__)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                take(value, f"{{module.__name__}}.{{value.__qualname__}}")
    return found

def of_hf_vq(value):
    kind = value if isinstance(value, type) else type(value)
    names = [getattr(value, "__module__", None), getattr(kind, "__module__", None)]
    return any(str(name).split(".")[0] == "hf_vq" for name in names)
"""

IMPORTED = """
import json, sys
import {first}
print(json.dumps([n for n in sys.modules if n.split(".")[0] in {libraries}]))
"""

MEASURE = """
import torch, transformers, peft, accelerate
import torch._inductor.config
for name in {names}:
    try:
        importlib.import_module(name)
    except Exception:
        pass
before = look()
import hf_vq
after = look()
changed = [n for n, v in before.items() if n not in after or (
    after[n] is not v and not (type(v) is tuple and after[n] == v))]
added = [n for n, v in after.items() if n not in before and (of_hf_vq(v) or "['vq" in n)]
print(json.dumps([changed, added]))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What `import hf_vq` changes and what it adds, in a process that had everything imported."""

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            cwd=tmp_path_factory.mktemp("run"), env={**os.environ, "HF_VQ_AUTOLOAD": "0"},
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    names = run(IMPORTED.format(first="hf_vq", libraries=LIBRARIES))
    return run(LOOK.format(libraries=LIBRARIES) + MEASURE.format(names=names))


# Caches and counters of the libraries themselves, which work goes on with.
OWN = ("torch.library", "torch._library", "torch._ops", "torch.ops", "torch._C")


@pytest.mark.slow
def test_import_changes_no_attribute(measured):
    changed = [name for name in measured[0] if not name.startswith(OWN)]
    assert changed == []


@pytest.mark.slow
def test_import_adds_to_public_registries_only(measured):
    added = [name for name in measured[1] if not name.startswith(OWN)]
    assert sorted(added) == ADDED


@pytest.fixture
def library(monkeypatch):
    """Another library, two patches of it, and an hf_vq that makes them."""
    other, ours = types.ModuleType("other"), types.ModuleType("ours")

    class Base:
        def run(self):
            return "plain"

    class Child(Base):
        pass

    other.Base, other.Child, other.slot, other.second = Base, Child, None, None
    other.registry = {"taken": 1}
    calls = []

    def wrap(before):
        calls.append(before)
        return lambda self: f"ours, then {before(self)}"

    ours.wrap, ours.fill = wrap, lambda before: fill
    fill = object()
    monkeypatch.setitem(sys.modules, "other", other)
    monkeypatch.setitem(sys.modules, "ours", ours)
    table = (
        patches.Patch("other:Child.run", "ours:wrap", ("begin", "again"), "it is plain"),
        patches.Patch("other:slot", "ours:fill", (patches.TRACE,), "nothing is fused", fills=True),
        patches.Patch("other:second", "ours:fill", (patches.TRACE,), "likewise", fills=True),
    )
    monkeypatch.setattr(patches, "TABLE", table)
    for name in ("_made", "_entries"):
        monkeypatch.setattr(patches, name, {})
    monkeypatch.setattr(patches, "_happened", set())
    other.calls, other.fill = calls, fill
    return other


def test_a_patch_is_made_once_and_undone(library):
    plain = library.Base.run
    assert patches.applied() == ()
    for event in ("begin", "begin", "again"):
        patches.apply(event)
        assert library.Child().run() == "ours, then plain" and library.calls == [plain]
    assert library.Base().run() == "plain" and patches.applied() == ("other:Child.run",)
    patches.undo()
    assert "run" not in vars(library.Child) and library.Child.run is plain
    patches.apply("again")
    assert library.Child().run() == "ours, then plain"


def test_threads_make_it_once(library):
    ready = threading.Barrier(8)

    def run():
        ready.wait()
        patches.apply("begin")

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.calls) == 1


def test_what_somebody_else_replaced_later_stays(library):
    patches.apply("begin")
    theirs = library.Child.run = lambda self: "theirs"
    with pytest.warns(UserWarning, match="other:Child.run was replaced again"):
        patches.undo()
    assert library.Child.run is theirs


def test_what_wraps_ours_is_not_wrapped_again(library):
    plain = library.Base.run
    patches.apply("begin")
    ours = library.Child.run
    library.Child.run = lambda self: f"theirs, then {ours(self)}"
    for _ in range(2):
        with pytest.warns(UserWarning, match="was replaced again"):
            patches.undo()
        assert patches.applied() == ("other:Child.run",)
        patches.apply("begin")
        assert library.Child().run() == "theirs, then ours, then plain"
    library.Child.run = ours  # they put back what they found
    patches.undo()
    assert patches.applied() == () and library.Child.run is plain
    patches.apply("begin")
    del library.Child.run  # somebody undid ours
    patches.undo()
    assert patches.applied() == () and library.Child.run is plain


def test_a_version_without_it_is_told_of(library):
    del library.Base.run
    with pytest.warns(RuntimeWarning, match="has no other:Child.run.*it is plain"):
        patches.apply("begin")
    assert patches.applied() == ()


def test_slots(library, monkeypatch):
    patches.apply(patches.TRACE)
    assert library.slot is library.fill and library.second is None
    library.slot = "theirs"
    for _ in range(2):
        patches.apply(patches.TRACE)
        assert (library.slot, library.second) == ("theirs", library.fill)
    library.second = "theirs"
    patches.apply(patches.TRACE)
    assert (library.slot, library.second) == ("theirs", "theirs")
    monkeypatch.delitem(sys.modules, "other")
    patches.apply(patches.TRACE)  # not imported: nobody compiles


@pytest.mark.usefixtures("restored_patches")
def test_slots_of_inductor_are_emptied_again():
    import torch._inductor.config as config

    patches.undo()
    for leave in (True, False):
        with config.patch(post_grad_custom_pre_pass=None, post_grad_custom_post_pass=None):
            patches.apply(patches.TRACE)
            assert config.post_grad_custom_pre_pass is not None
            if not leave:
                patches.undo()
                assert config.post_grad_custom_pre_pass is None
        patches.undo()  # of a slot that `patch` emptied: nothing to say, nothing kept
        assert not any("inductor" in target for target in patches.applied())


def test_entries_of_registries(library):
    for value in (2, 3):
        patches.replace_entry("other:registry", "taken", value)
        patches.replace_entry("other:registry", "new", value)
        assert library.registry == {"taken": value, "new": value}
    patches.restore_entry("other:registry", "taken")
    patches.restore_entry("other:registry", "taken")
    assert library.registry == {"taken": 1, "new": 3}
    patches.undo()
    assert library.registry == {"taken": 1}
    patches.replace_entry("other:registry", "taken", 2)
    library.registry["taken"] = 9  # somebody else's
    patches.undo()
    assert library.registry == {"taken": 9}


def test_methods_of_models():
    class Model:
        def save_pretrained(self):
            return "plain"

    model = Model()
    patches.override(model, "save_pretrained", lambda: "ours")
    assert model.save_pretrained() == "ours" and Model().save_pretrained() == "plain"
    patches.restore(model, "save_pretrained", "push_to_hub")
    assert model.save_pretrained() == "plain"
    with pytest.raises(KeyError, match="eval is not in MODEL_METHODS"):
        patches.override(model, "eval", lambda: None)


EVENTS = """
import hf_vq, copy, pickle
from hf_vq import patches
from transformers import LlamaConfig
def names(): return sorted(t.rpartition(".")[2].rpartition(":")[2] for t in patches.applied())
print(names())
cache = hf_vq.VQCache(LlamaConfig(num_hidden_layers=1)); print(names())
stored = pickle.dumps(cache); patches.undo(); print(names())
pickle.loads(stored); print(names())
patches.undo(); config = hf_vq.VQConfig(); stored = pickle.dumps(config); print(names())
patches.undo(); pickle.loads(stored); print(names())
patches.undo(); hf_vq.enable_cache_backend(); print(names())
patches.undo()
from hf_vq.hf import VQHfQuantizer
VQHfQuantizer(hf_vq.VQConfig()); print(names())
"""


@pytest.mark.slow
def test_each_event_makes_what_it_needs(run_python):
    cache = ["_prepare_cache_for_generation", "_sample", "get_interface"]
    backend = ["QuantizedCache", *cache, "init_continuous_batching"]
    saving = ["num_parameters", "push_to_hub", "resize_token_embeddings", "save_pretrained"]
    config = ["LOADING_ATTRIBUTES_CONFIG_TYPES", *saving]
    seen = [[], cache, [], cache, config, config, backend, sorted(backend + config)]
    assert run_python(EVENTS).splitlines() == list(map(str, seen))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by aqlm
def test_every_entry_of_the_table_is_there():
    """Under the names that the table has: another Transformers fails here first. vLLM has an
    environment of its own (tests/vllm)."""
    for patch in patches.TABLE:
        if patch.target.startswith("vllm.") and find_spec("vllm") is None:
            continue
        patches._get(patch.target)
        assert callable(patches._get(patch.replacement)) and patch.why and patch.events
