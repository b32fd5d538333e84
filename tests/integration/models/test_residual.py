"""Second passes of a model: offloaded, left out, merged. A "device" to which they have to be copied
is the CPU here; tests/unit/nn/test_offload_buffers.py has streams."""

import copy
import json
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_vq
from hf_vq.errors import VQBackendError, VQConfigError, VQFormatError
from hf_vq.formats.digests import Header
from hf_vq.hf import VQConfig, place_pass2
from hf_vq.hf.quantizer import VQHfQuantizer
from hf_vq.nn import quantized_module, residual_offload
from hf_vq.nn.offload_buffers import Slots
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import CLEAN, LOAD, assert_same_state, logits
from tests.fixtures.tiny_models import tokens

SCHEMES = (
    "turboquant-4+2",
    "vq1x3r2-universal-g32-random_hadamard32-shared",
    "vq1x4+1r2-universal-g32-qr32-rerotated",
    "vq1x3r2-universal-g32-scaled_hadamard32-rerotated",
    "turboquant-4+2-scaled",
)


class Immediate:
    """A device that copies at once, on the CPU; it counts."""

    def __init__(self):
        self.copied = 0

    def check(self):
        pass

    def empty(self, nbytes):
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, pairs, after, old):
        for to, source in pairs:
            to.copy_(source)
            self.copied += source.nbytes

    def wait(self, event):
        pass

    def mark(self, memory, used):
        pass

    def finish(self):
        pass


@pytest.fixture
def far(monkeypatch):
    """Second passes have to be copied, though all is on the CPU; the slots."""
    slots = Slots(Immediate())
    monkeypatch.setattr(residual_offload, "is_away", lambda tensor, device: True)
    monkeypatch.setattr(residual_offload, "_pools", {torch.device("cpu"): slots})
    return slots


def first_passes(model):
    """The same model computed with the first passes alone."""
    model = copy.deepcopy(model)
    for module in vq_modules(model).values():
        one = module.scheme.first_pass()
        module.scheme, module.spec, module.second = one, one.spec(), None
        for name in [name for name in module.specs if name.endswith("_2")]:
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
            del module.specs[name]
        parts = getattr(module, "projections", {"": module})
        for part in parts.values():
            for key in [key for key in part.attributes if key.endswith("_2")]:
                del part.attributes[key]
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@torch.no_grad()
def test_offloaded_is_resident(quantized, far, name, scheme):
    """Experts too, which `turboquant-model` copies while everything waits, or does not know."""
    resident = LOAD(quantized(name, scheme))
    model = LOAD(quantized(name, scheme), quantization_config=VQConfig(pass2="offload"))
    for _ in range(3):
        assert torch.equal(logits(model), logits(resident))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens(), **options), resident.generate(tokens(), **options))
    largest = max(
        sum(-(-part[key].nbytes // 256) * 256 for key in residual_offload.OFFLOADED if key in part)
        for module in vq_modules(model).values()
        for part in (
            [module.tensors()]
            if not hasattr(module, "num_experts")
            else [module.tensors(projection, 0) for projection in module.projections]
        )
    )
    assert far.nbytes == 2 * largest
    if name == "llama":
        assert far.misses <= 15  # each layer once; then all are expected
    place_pass2(model, "resident")
    assert all(module.second is None for module in vq_modules(model).values())
    before = far.transfer.copied
    assert torch.equal(logits(model), logits(resident)) and far.transfer.copied == before


pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")


@torch.no_grad()
def test_prefill_only(quantized, far):
    model = LOAD(quantized("llama", SCHEMES[0]))
    alone, resident = first_passes(model), LOAD(quantized("llama", SCHEMES[0]))
    place_pass2(model, "prefill_only")
    assert torch.equal(logits(model), logits(resident))
    copied = far.transfer.copied
    assert copied
    step = tokens()[:, :1]
    assert torch.equal(model(step).logits, alone(step).logits)
    assert not torch.equal(model(step).logits, resident(step).logits)
    assert far.transfer.copied == copied


@torch.no_grad()
def test_experts_of_one_token_leave_the_second_pass_out(quantized, far):
    model = LOAD(quantized("qwen3-moe", SCHEMES[0]))
    alone = first_passes(model)
    place_pass2(model, "prefill_only")
    step = tokens()[:1, :1]
    # Of one row, PyTorch's dense products depend on where the copied model's weights lie.
    torch.testing.assert_close(model(step).logits, alone(step).logits, rtol=0, atol=1e-6)
    assert not far.transfer.copied


@torch.no_grad()
def test_some_layers(quantized, far):
    policies = {"layers.0.mlp": "offload", "layers.1.self_attn.q_proj": "prefill_only"}
    model = LOAD(quantized("llama", SCHEMES[0]))
    expected = logits(model)
    place_pass2(model, policies)
    placed = {name for name, module in vq_modules(model).items() if module.second is not None}
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert placed == {
        *(f"model.layers.0.{part}" for part in parts),
        "model.layers.1.self_attn.q_proj",
    }
    assert torch.equal(logits(model), expected)
    assert far.misses == 4


@torch.no_grad()
def test_an_interrupted_forward_does_no_harm(quantized, far):
    """`turboquant-model` finds its order by a dry run, whose exceptions it swallows."""
    resident = LOAD(quantized("llama", SCHEMES[0]))
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))

    def fails(*arguments):
        raise KeyboardInterrupt

    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"):
        handle = model.get_submodule(name).register_forward_pre_hook(fails)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        handle.remove()
        assert torch.equal(logits(model), logits(resident))


@torch.no_grad()
def test_tensors_are_loaded_when_no_copy_waits(quantized, far, monkeypatch):
    """A copy that is still in a queue would read what is loaded over its source."""
    model = LOAD(quantized("llama", SCHEMES[0]))
    place_pass2(model, "offload")
    layer = next(iter(vq_modules(model).values()))
    state = {name: torch.zeros_like(tensor) for name, tensor in layer.state_dict().items()}
    before, seen = layer.vq_codes_2.clone(), []
    monkeypatch.setattr(far.transfer, "finish", lambda: seen.append(layer.vq_codes_2.clone()))
    layer.load_state_dict(state)
    assert len(seen) == 1 and torch.equal(seen[0], before)
    assert not layer.vq_codes_2.any()


@torch.no_grad()
def test_several_models_share_slots(quantized, far):
    one = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    other = LOAD(quantized("llama", SCHEMES[1]), quantization_config=VQConfig(pass2="offload"))
    expected = [logits(LOAD(quantized("llama", scheme))) for scheme in SCHEMES[:2]]

    def calls(layer):
        def hook(module, given, result):
            layer.mlp(result)

        return hook

    for layer, twin in zip(one.model.layers, other.model.layers, strict=True):
        twin.register_forward_hook(calls(layer))
    for _ in range(2):
        assert torch.equal(logits(other), expected[1])
        assert torch.equal(logits(one), expected[0])


def test_gradients_flow_through_offloaded_layers(quantized, far):
    resident = LOAD(quantized("llama", SCHEMES[0]))
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    grads = []
    for one in (resident, model):
        x = one.get_input_embeddings()(tokens()).detach().requires_grad_()
        one(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads) and not far.transfer.copied


def test_offloaded_layers_are_dequantized(quantized, far):
    """A NameError in `turboquant-model`."""
    resident = LOAD(quantized("llama", SCHEMES[0]))
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    name = "model.layers.1.mlp.up_proj"
    expected = resident.get_submodule(name).decoded()
    assert torch.equal(model.dequantize().get_submodule(name).weight, expected)


def test_copies_and_pickles_are_offloaded_too(quantized, far):
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    expected = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = far.transfer.copied
        assert torch.equal(logits(again), expected) and far.transfer.copied > before


def test_moving_to_a_gpu_leaves_second_passes_behind(quantized, far, monkeypatch):
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    layer = model.model.layers[0].mlp.up_proj
    kept, names = layer.vq_codes_2, list(layer._parameters)
    monkeypatch.setattr(quantized_module, "_leads_to_a_gpu", lambda fn: True)
    seen = []
    layer._apply(lambda tensor: seen.append(tensor.data_ptr()) or tensor.clone())
    assert layer.vq_codes_2 is kept and kept.data_ptr() not in seen
    assert list(layer._parameters) == names and layer.weight.data_ptr() not in seen
    monkeypatch.undo()
    model.to("meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_offloaded_layer_is_not_compiled(quantized, far, monkeypatch):
    model = LOAD(quantized("llama", SCHEMES[0]), quantization_config=VQConfig(pass2="offload"))
    assert not model.hf_quantizer.is_compileable
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(VQBackendError, match=r"up_proj cannot be compiled.*resident"):
        model.model.layers[0].mlp.up_proj(torch.randn(1, 64))
    place_pass2(model, None)
    assert model.hf_quantizer.is_compileable


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_model_without_second_passes(quantized, tmp_path, name, scheme):
    folder = quantized(name, scheme)
    whole = LOAD(folder)
    model, info = LOAD(
        folder, quantization_config=VQConfig(pass2="absent"), output_loading_info=True
    )
    assert not any(info[key] for key in CLEAN)
    assert torch.equal(logits(model), logits(first_passes(whole)))
    config = model.config.quantization_config
    assert config.vq_scheme == whole.config.quantization_config.vq_scheme.first_pass()
    assert config.provenance["relative_error"] == {}
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert not any(name.endswith("_2") for name in file.keys())  # noqa: SIM118


def test_a_file_without_second_passes(quantized, tmp_path):
    """They may be kept elsewhere; nothing is made up for those that are missing. A folder of
    `turboquant-model` loads as random numbers."""
    folder = quantized("llama", SCHEMES[0])
    LOAD(folder).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if not name.endswith("_2")}
    save_file(tensors, path, Header(path).metadata)
    with pytest.raises(VQFormatError, match=r"lacks .*vq_codes_2"):
        LOAD(tmp_path)
    model = LOAD(tmp_path, quantization_config=VQConfig(pass2="absent"))
    assert torch.equal(logits(model), logits(first_passes(LOAD(folder))))


def test_some_absent_others_offloaded(quantized, far, tmp_path):
    folder = quantized("llama", SCHEMES[0])
    policies = {"self_attn": "absent", "mlp": "offload"}
    model = LOAD(folder, quantization_config=VQConfig(pass2=policies))
    schemes = {module.scheme for module in vq_modules(model).values()}
    assert len(schemes) == 2
    assert model.config.quantization_config.pass2 == {"mlp": "offload"}
    expected = logits(model)
    assert far.transfer.copied
    model.save_pretrained(tmp_path)
    again = LOAD(tmp_path)
    assert_same_state(model, again)
    assert torch.equal(logits(again), expected)


def test_where_a_pass_is_is_not_stored(quantized, dense, far, tmp_path):
    config = VQConfig("turboquant-2+2", pass2="offload")
    model = LOAD(dense("llama"), quantization_config=config)
    assert model.model.layers[0].mlp.up_proj.second is not None
    logits(model)
    assert far.transfer.copied
    model.save_pretrained(tmp_path)
    stored_config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "pass2" not in stored_config
    again = LOAD(tmp_path)
    assert again.model.layers[0].mlp.up_proj.second is None
    assert_same_state(model, again)


def test_what_cannot_be_placed(quantized, dense):
    for policy in ("away", 3, {"mlp": "away"}, ["mlp"]):
        with pytest.raises(VQConfigError, match=r"pass2 must be one of 'resident', 'offload'"):
            VQConfig(pass2=policy)
    with pytest.raises(VQConfigError, match="has a second pass to place: vq-4 has one pass"):
        LOAD(quantized(), quantization_config=VQConfig(pass2="offload"))
    with pytest.raises(VQConfigError, match="has a second pass to leave out"):
        LOAD(quantized(), quantization_config=VQConfig(pass2="absent"))
    with pytest.raises(VQConfigError, match="saved with two passes"):
        LOAD(dense("llama"), quantization_config=VQConfig("turboquant-4+4", pass2="absent"))
    model = LOAD(quantized("llama", SCHEMES[0]))
    with pytest.raises(VQConfigError, match=r"'self_atn' matches no module"):
        place_pass2(model, {"self_atn": "offload"})
    with pytest.raises(VQConfigError, match="for loading"):
        place_pass2(model, "absent")


def test_policies_are_checked_before_anything_is_quantized(dense, monkeypatch):
    def quantized_first(*_):
        raise AssertionError

    for name in ("get_quantize_ops", "_process_model_after_weight_loading"):
        monkeypatch.setattr(VQHfQuantizer, name, quantized_first)
    chosen = {"target_bits": 4, "candidates": ["vq-2", "turboquant-4+2"], "layers": {"mlp": "vq-4"}}
    for options, says in (
        ({"scheme": "vq-4", "pass2": "offload"}, "to place: vq-4 has one pass"),
        ({"scheme": "turboquant-4+2", "pass2": {"self_atn": "offload"}}, "'self_atn' matches no"),
        ({**chosen, "pass2": {"mlp": "offload"}}, "'mlp' matches no"),
    ):
        with pytest.raises(VQConfigError, match=says):
            LOAD(dense("llama"), quantization_config=VQConfig(**options))
    # A scheme of two passes may be chosen for these layers.
    with pytest.raises(AssertionError):
        config = VQConfig(**chosen, pass2={"self_attn": "offload"})
        LOAD(dense("llama"), quantization_config=config)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2"])
def test_merged_passes(quantized, tmp_path, name, scheme):
    model = LOAD(quantized(name, scheme))
    before = {name: module for name, module in vq_modules(model).items()}
    scheme = model.config.quantization_config.vq_scheme
    biases = {n: p.clone() for n, p in model.named_parameters() if n.endswith("bias")}
    hf_vq.merge_passes(model)
    merged = vq_modules(model)
    bits = scheme.entry_bits + scheme.second_bits
    assert model.config.quantization_config.vq_scheme.entry_bits == bits
    for layer, module in merged.items():
        assert not module.scheme.two_passes and module.scheme.entry_bits == bits
        for weight in module.weights():
            dense, old = (as_rounded(one, weight) for one in (module, before[layer]))
            # Half of Lloyd-Max's distortion of so many bits, which a search of scales improves.
            error = (dense - old).square().sum() / old.square().sum()
            assert error < 3 * 4.0**-bits
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in biases.items())
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))


def as_rounded(module, weight):
    """The dense rows of a module, divided by the diagonal of a scaled scheme as they are stored."""
    if not hasattr(module, "num_experts"):
        return module.decoded() / module.tensors().get("diagonal", 1)
    dense = enumerate(module.matrices(weight, module.decoded(weight)))
    return torch.stack([m / module.tensors(weight, i).get("diagonal", 1) for i, m in dense])


def test_what_cannot_be_merged(quantized):
    with pytest.raises(VQConfigError, match="has two passes to merge"):
        hf_vq.merge_passes(LOAD(quantized()))
    with pytest.raises(VQConfigError, match="must be 1 to 8; got 9"):
        hf_vq.merge_passes(LOAD(quantized("llama", SCHEMES[0])), bits=9)
