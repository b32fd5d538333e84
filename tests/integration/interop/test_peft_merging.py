"""Every method of PEFT that merges, on codes: train, save, load, merge, unmerge, switch."""

import copy
import logging
import pickle
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_vq import VQConfig
from hf_vq.errors import VQBackendError
from hf_vq.interop.small_change import part_left
from hf_vq.nn import VQLinear
from tests.fixtures.tiny_models import tokens

peft = pytest.importorskip("peft")
LOAD = AutoModelForCausalLM.from_pretrained
SQUARE = ["q_proj", "o_proj"]  # VeRA and its kin want layers of one shape
TARGETS = ["q_proj", "down_proj"]
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:.*gradient_checkpointing:FutureWarning"
)
_LORA = {"r": 4, "lora_alpha": 16}
METHODS = {
    "lora": ("LoraConfig", _LORA),
    "rslora": ("LoraConfig", {**_LORA, "use_rslora": True}),
    "dora": ("LoraConfig", {**_LORA, "use_dora": True}),
    "pissa": ("LoraConfig", {**_LORA, "init_lora_weights": "pissa"}),
    "olora": ("LoraConfig", {**_LORA, "init_lora_weights": "olora"}),
    "orthogonal": ("LoraConfig", {**_LORA, "init_lora_weights": "orthogonal"}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "total_step": 100}),
    "loha": ("LoHaConfig", {"r": 4}),
    "lokr": ("LoKrConfig", {"r": 4}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": SQUARE}),
    "pvera": ("PveraConfig", {"r": 4, "target_modules": SQUARE}),
    "randlora": ("RandLoraConfig", {"r": 4, "target_modules": SQUARE}),
    "vblora": (
        "VBLoRAConfig",
        {"r": 4, "num_vectors": 16, "vector_length": 16, "target_modules": SQUARE},
    ),
    "oft": ("OFTConfig", {"oft_block_size": 8, "r": 0}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "miss": ("MissConfig", {"r": 4}),
    "miss-bat": ("MissConfig", {"r": 4, "init_weights": "bat"}),
    "hra": ("HRAConfig", {"r": 4}),
    "hira": ("HiraConfig", {"r": 4}),
    "road": ("RoadConfig", {"group_size": 8}),
    "shira": ("ShiraConfig", {"r": 4}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 20}),
    "c3a": ("C3AConfig", {"block_size": 32}),
    "delora": ("DeloraConfig", {"r": 4}),
    "gralora": ("GraloraConfig", {"r": 4}),
    "waveft": ("WaveFTConfig", {"n_frequency": 20}),
}
OWN = 0.01  # relative squared error of vq-4
CHANGE_THE_BASE = ("pissa", "olora")  # when they are made


def config_of(method):
    name, options = METHODS[method]
    if not hasattr(peft, name):
        pytest.skip(f"this peft has no {name}")
    return getattr(peft, name)(**{"target_modules": TARGETS, "task_type": "CAUSAL_LM", **options})


def stored(model):
    """Codes, scales and codebooks by name, wherever an adapter has put their layer."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor.clone()
        for name, tensor in model.state_dict().items()
        if tensor.dtype == torch.uint8 or ".vq_" in name
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def train(model, steps=3, rate=2e-2):
    """Train until the adapter matters; also from initial values where its change is zero."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


@torch.no_grad()
def logits(model):
    return model(tokens()).logits.float()


def adapted(model):
    """PEFT's layers on codes, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and isinstance(module.base_layer, VQLinear)
    }


def dense_twin(layer):
    """The same adapter as PEFT's class alone knows it, on the decoded weight."""
    twin = copy.deepcopy(layer)
    for method in ("merge", "unmerge", "forward", "get_delta_weight"):
        twin.__dict__.pop(method, None)
    base = layer.base_layer
    dense = nn.Linear(base.in_features, base.out_features, base.bias is not None)
    dense.weight.data = base.decoded()
    if base.bias is not None:
        dense.bias.data = base.bias.detach().clone()
    twin.base_layer = dense
    return twin


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_method(quantized, tmp_path, monkeypatch, method, dtype):
    def fresh():
        return LOAD(quantized(), dtype=dtype)

    base = fresh()
    untouched = stored(base)
    plain = logits(base)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config_of(method))
    with_adapter = stored(model)
    assert same(with_adapter, untouched) is (method not in CHANGE_THE_BASE)
    losses = train(model)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert same(stored(model), with_adapter)
    trained = logits(model)
    assert not torch.equal(trained, plain)

    layers = adapted(model)
    assert len(layers) == 4
    expected, start = {}, {}
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setenv("HF_VQ_BACKEND", "reference")
        for name, layer in layers.items():
            twin = dense_twin(layer)
            x = torch.randn(3, twin.base_layer.in_features)
            torch.testing.assert_close(layer(x), twin(x), rtol=1e-4, atol=1e-5)
            start[name] = twin.base_layer.weight.detach().clone()
            twin.merge()
            expected[name] = twin.base_layer.weight.detach()

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), trained)

    for safe in (False, True):
        model.merge_adapter(safe_merge=safe)
        for name, layer in layers.items():
            base_layer, wanted = layer.base_layer, expected[name]
            found = (base_layer.decoded() - wanted).square().sum() / wanted.square().sum()
            assert found <= 2 * OWN  # besides the error that the codes have anyway
            left = part_left(base_layer.decoded(), start[name], wanted)
            assert left > 0.85
        merged = logits(model)
        model.unmerge_adapter()
        assert same(stored(model), with_adapter)
        assert torch.equal(logits(model), trained)
    with model.disable_adapter():
        without = logits(model)
    assert torch.equal(without, plain) or method in CHANGE_THE_BASE

    alone = model.merge_and_unload()
    assert not adapted(alone) and torch.equal(logits(alone), merged)
    alone.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(LOAD(tmp_path / "merged", dtype=dtype)), merged)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("method", ["lora", "ia3", "loha"])
def test_codes_of_eight_bits_are_not_taken_for_weights(quantized, method, safe):
    """They have a shape that PEFT's sums accept: LoRA's was lost, IA3's changed codes."""
    model = peft.get_peft_model(LOAD(quantized("llama", "turboquant-8")), config_of(method))
    plain = logits(model)
    train(model, steps=6, rate=5e-2)
    trained = logits(model)
    model.merge_adapter(safe_merge=safe)
    assert (logits(model) - trained).norm() < 0.05 * (trained - plain).norm()


def lora(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=TARGETS, **_LORA, **options))


@pytest.mark.parametrize(
    ("name", "scheme", "targets"),
    [
        ("qwen3", "vq-4", TARGETS),
        ("gpt2", "vq-4", ["c_attn", "c_proj"]),
        ("llama", "vq-4-scaled", TARGETS),
        ("llama", "qoq-w4a8", TARGETS),
        ("llama", "gptvq-2", TARGETS),
        ("llama", "turboquant-4+2", TARGETS),
    ],
)
def test_kinds_of_layers(quantized, tmp_path, name, scheme, targets):
    """Biases, GPT-2's Conv1D, a diagonal, learned codebooks, two passes, rounded inputs."""
    model = LOAD(quantized(name, scheme))
    bias = name == "gpt2"
    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, r=4, lora_alpha=16, lora_bias=bias)
    )
    before, state = stored(model), {k: v.clone() for k, v in model.state_dict().items()}
    plain = logits(model)
    train(model, steps=6, rate=5e-2)
    trained = logits(model)
    model.merge_adapter()
    merged = logits(model)
    assert (merged - trained).norm() < 0.5 * (trained - plain).norm()
    assert not same(stored(model), before)
    model.unmerge_adapter()
    after = model.state_dict()
    assert all(torch.equal(after[key], state[key]) for key in state if "lora_" not in key)
    model.merge_and_unload().save_pretrained(tmp_path)
    assert torch.equal(logits(LOAD(tmp_path)), merged)


@pytest.mark.parametrize("dora", [False, True])
def test_several_adapters(quantized, tmp_path, dora):
    """Switched, merged one after the other as at once, and taken out together."""
    model = lora(LOAD(quantized()), use_dora=dora)
    plain = logits(model)
    model.add_adapter("second", peft.LoraConfig(target_modules=TARGETS, use_dora=dora, **_LORA))
    for seed, name in enumerate(("default", "second")):
        model.set_adapter(name)
        torch.manual_seed(seed)
        train(model, steps=3 + seed)
    codes, alone = stored(model), {}
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        expected = alone.setdefault(name, logits(model))
        assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(LOAD(quantized()), tmp_path)
    again.load_adapter(tmp_path / "second", adapter_name="second")
    for name, expected in alone.items():
        again.set_adapter(name)
        assert torch.equal(logits(again.eval()), expected)

    model.merge_adapter(["default", "second"])
    at_once = stored(model)
    model.unmerge_adapter()
    assert same(stored(model), codes)
    model.merge_adapter(["default"])
    model.merge_adapter(["second"])
    assert same(stored(model), at_once)
    with pytest.warns(UserWarning, match="already merged"):
        model.merge_adapter(["second"])
    assert same(stored(model), at_once)
    with model.disable_adapter():  # which takes them out
        assert torch.equal(logits(model), plain)
    assert same(stored(model), codes)


def test_two_methods_on_one_layer(quantized):
    """Codes that another adapter changed since are not restored: its change would be lost."""
    model = peft.PeftMixedModel(LOAD(quantized()), config_of("lora"), "default").eval()
    model.add_adapter("other", config_of("loha"))
    model.set_adapter(["default", "other"])
    plain = logits(model)
    train(model, steps=6, rate=5e-2)
    trained = logits(model)
    model.merge_adapter()
    assert (logits(model) - trained).norm() < 0.5 * (trained - plain).norm()
    model.unmerge_adapter()
    assert (logits(model) - trained).norm() < 0.5 * (trained - plain).norm()
    with model.disable_adapter():
        assert (logits(model) - plain).norm() < 0.5 * (trained - plain).norm()


def test_what_cannot_be_merged_changes_nothing(quantized):
    model = lora(LOAD(quantized()), init_lora_weights=False)
    codes = stored(model)
    layer = list(adapted(model).values())[-1]
    layer.lora_B["default"].weight.data[0, 0] = float("nan")
    for safe, message in ((True, "NaNs detected"), (False, "NaN or infinity")):
        with pytest.raises(ValueError, match=message):
            layer.merge(safe_merge=safe)
        assert not layer.merged and same(stored(model), codes)
        assert type(layer.base_layer) is VQLinear


def test_copies(quantized):
    """A copy of a merged model has codes of its own to go back to."""
    model = lora(LOAD(quantized()), init_lora_weights=False).eval()
    plain = logits(model)
    model.merge_adapter()
    merged = stored(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.unmerge_adapter()
        assert torch.equal(logits(copied), plain)
        assert same(stored(model), merged)


def test_the_error_is_told_in_one_line(quantized, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_vq"), "propagate", True)
    model = lora(LOAD(quantized()), init_lora_weights=False)
    model.merge_adapter()
    line = r"merged.* again \(4\).* error: (\S+) on average, (\S+) at most \((\S+)\).*: (\d+) %"
    (found,) = [re.search(line, record.getMessage()) for record in caplog.records]
    errors, kept = {}, []
    for layer in adapted(model).values():
        base, unmerged = layer.base_layer, copy.deepcopy(layer)
        unmerged.unmerge()
        twin = dense_twin(unmerged)
        before = twin.base_layer.weight.detach().clone()
        twin.merge()
        wanted = twin.base_layer.weight.detach()
        errors[base.where] = float((base.decoded() - wanted).norm() ** 2 / wanted.norm() ** 2)
        change, left = wanted - before, base.decoded() - before
        kept.append(float((change * left).sum() / change.norm() ** 2))
    assert float(found[1]) == pytest.approx(sum(errors.values()) / 4, rel=0.01)
    assert float(found[2]) == pytest.approx(max(errors.values()), rel=0.01)
    assert errors[found[3]] == max(errors.values())
    assert int(found[4]) == pytest.approx(100 * sum(kept) / 4, abs=1)


def test_refusals(dense, quantized):
    tied = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings="int8"))
    model = peft.get_peft_model(tied, peft.LoraConfig(target_modules=["embed_tokens"], r=2))
    train(model, 1)
    rows = stored(model)
    for safe in (False, True):
        with pytest.raises(VQBackendError, match="rows are quantized"):
            model.merge_adapter(safe_merge=safe)
    assert same(stored(model), rows)
    config = peft.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"], r=2)
    with pytest.raises(VQBackendError, match="target_parameters names codes"):
        peft.get_peft_model(LOAD(quantized("llama", "turboquant-8")), config)


def test_dense_models_are_left_alone(dense):
    model = lora(LOAD(dense("llama")))
    layers = [m for m in model.modules() if hasattr(m, "base_layer")]
    assert not any({"merge", "unmerge", "forward"} & vars(layer).keys() for layer in layers)
    assert "merge_adapter" not in vars(model.base_model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_for_training(quantized, dtype, reentrant):
    """Checkpointing is on, and what is stored stays as it is, in its dtype."""
    model = LOAD(quantized(), dtype=dtype)
    before = {name: (p.dtype, p.detach().clone()) for name, p in model.named_parameters()}
    plain = logits(model)
    peft.prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    assert model.is_gradient_checkpointing
    assert not any(p.requires_grad for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == before[name][0] and torch.equal(parameter, before[name][1]), name
    assert torch.equal(logits(model), plain)
    codes = stored(model)
    losses = train(lora(model), steps=6)
    assert losses[-1] < losses[0] and same(stored(model), codes)
    dense = LOAD(quantized(), dtype=dtype).dequantize()
    assert not getattr(dense, "hqq_quantized", False)


IMPORTED_LATER = """
import sys, torch
from transformers import AutoModelForCausalLM
from hf_vq import patches
model = AutoModelForCausalLM.from_pretrained({folder!r})
assert not any(name.split(".")[0] == "peft" for name in sys.modules)
assert not any("peft" in target for target in patches.applied())
import peft
print([target for target in patches.applied() if "peft" in target])
config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
model = peft.get_peft_model(model, config)
model.merge_adapter()
patches.undo()
# What hf_vq enters into the registries of a library that is imported later, is no patch.
print(patches.applied(), patches._AfterImport in sys.meta_path and not patches._waiting)
"""


def test_peft_may_be_imported_before_or_after(quantized, run_python):
    printed = run_python(IMPORTED_LATER.format(folder=str(quantized()))).splitlines()
    assert printed == [
        "['peft.tuners.tuners_utils:BaseTuner.inject_adapter']", "() False"
    ]  # fmt: skip
