"""Norms and activations that round for W4A8 layers: the same logits, whoever else looks on."""

import copy
import pickle

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq.errors import VQBackendError
from hf_vq.hf import VQConfig
from hf_vq.hf.fused_activations import fuse_inputs, separate_inputs
from hf_vq.nn import W4A8Linear
from hf_vq.nn.lazy_activation import Gated, LazyActivation, Norm
from hf_vq.ops import w4a8
from hf_vq.ops.fused_inputs import fused_inputs
from tests.fixtures.tiny_models import CONFIGS, save_tiny, tokens

LOAD = AutoModelForCausalLM.from_pretrained
FAMILIES = ("llama", "qwen3")  # with biases, and with norms of heads


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    """The row of a CPU's kernels rounds for itself."""
    monkeypatch.setenv("HF_VQ_BACKEND", "reference")


@pytest.fixture
def rounded(monkeypatch):
    """Counts how often tokens are rounded."""
    counts, plain = [], w4a8.quantize_tokens

    def counted(x):
        counts.append(tuple(x.shape))
        return plain(x)

    monkeypatch.setattr(w4a8, "quantize_tokens", counted)
    return counts


def load(dense, name="llama", scheme="qoq-w4a8-g32", dtype=torch.bfloat16, **more):
    return LOAD(dense(name), quantization_config=VQConfig(scheme, **more), dtype=dtype)


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


def apart(model, monkeypatch):
    """Logits of the same model whose layers round for themselves."""
    monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
    found = logits(model)
    monkeypatch.delenv("HF_VQ_FUSED_INPUTS")
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_input_is_rounded_once_and_nothing_changes(dense, monkeypatch, rounded, name, dtype):
    model = load(dense, name, dtype=dtype)
    expected = apart(model, monkeypatch)
    layers = [module for module in model.modules() if isinstance(module, W4A8Linear)]
    assert len(rounded) == len(layers) == 2 * 7
    rounded.clear()
    assert torch.equal(logits(model), expected)
    assert rounded == [(2, 9, 64), (2, 9, 64), (2, 9, 64), (2, 9, 96)] * 2  # qkv, o, gate and up


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_gives_the_same_tokens(dense, monkeypatch, rounded, name):
    model = load(dense, name)
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found = model.generate(tokens(1, 5), **asked)
    assert len(rounded) == 6 * 2 * 4
    monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
    assert torch.equal(model.generate(tokens(1, 5), **asked), found)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(FAMILIES)))
def test_models_of_any_build_compute_the_same(dense, monkeypatch, name):
    model = load(dense, name)
    assert torch.equal(logits(model), apart(model, monkeypatch))


@pytest.mark.parametrize(
    ("layers", "rounds"),
    [
        ({"q_proj": "vq-4"}, 3 + 3 - 1),  # k, v, o, gate and up, down
        ({"down_proj": "vq-4"}, 3),
        ({"up_proj": "vq-4", "layers.1": "vq-4"}, None),
    ],
)
def test_layers_of_several_kinds(dense, monkeypatch, rounded, layers, rounds):
    model = load(dense, layers=layers)
    expected = apart(model, monkeypatch)
    rounded.clear()
    assert torch.equal(logits(model), expected)
    if rounds is not None:
        assert len(rounded) == 2 * rounds
    model = load(dense, modules_to_not_convert=["k_proj", "lm_head"])
    assert torch.equal(logits(model), apart(model, monkeypatch))


def test_a_layer_that_is_replaced_later_gets_floats(dense, monkeypatch):
    model = load(dense)
    attention = model.model.layers[0].self_attn
    attention.k_proj = attention.k_proj.restored(torch.bfloat16)
    model.model.layers[1].mlp.down_proj = torch.nn.Identity()
    inputs = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0] + 0)
    )
    with pytest.raises(RuntimeError):  # sizes of residuals
        logits(model)
    fused = inputs.pop()
    monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
    with pytest.raises(RuntimeError):
        logits(model)
    assert torch.equal(fused, inputs.pop())


def test_hooks_see_and_change_what_they_did(dense, monkeypatch):
    model, seen = load(dense), []
    block = model.model.layers[0]
    hooks = [
        block.input_layernorm.register_forward_hook(lambda m, a, out: seen.append(out.clone())),
        block.self_attn.q_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0] * 1)),
        block.self_attn.v_proj.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
        block.mlp.up_proj.register_forward_pre_hook(lambda m, a: (a[0].mul_(3),)),
        block.mlp.down_proj.register_forward_hook(lambda m, a, out: seen.append(a[0].float())),
        model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(
            lambda m, a: seen.append(a[0].sum())
        ),
    ]
    found = logits(model)
    first, seen[:] = list(seen), []
    assert torch.equal(apart(model, monkeypatch), found)
    assert len(first) == len(seen) == 4
    for one, other in zip(first, seen, strict=True):
        assert type(one) is torch.Tensor and torch.equal(one, other)
    for hook in hooks:
        hook.remove()
    assert not torch.equal(logits(model), found)


def test_gradients_flow_as_before(dense, monkeypatch):
    def loss_and_grads(model):
        out = model(tokens(), labels=tokens())
        out.loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return out.loss, grads

    model = load(dense, dtype=torch.float32)
    loss, grads = loss_and_grads(model)
    monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
    expected, others = loss_and_grads(model)
    assert torch.equal(loss, expected) and len(grads) == len(others) > 0
    assert all(map(torch.equal, grads, others))


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_gradients_flow_where_only_some_inputs_need_them(dense, monkeypatch, name, look):
    """Below an adapter of `up_proj` the gate needs none; a hook may ask for that of an input."""
    model, x = load(dense, dtype=torch.float32), torch.linspace(-1, 1, 3 * 64).view(1, 3, 64)
    mlp, leaves, seen = model.model.layers[0].mlp, [], []

    def ask(module, args):
        leaves.append(args[0].requires_grad_(True))
        return (leaves[-1],)

    def add(module, args, out):
        leaves.append(torch.zeros(96, requires_grad=True))
        return out + leaves[-1]

    if name == "up_proj":
        mlp.up_proj.register_forward_hook(add)
    else:
        mlp.down_proj.register_forward_pre_hook(ask)
    if look:
        mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].sum()))
    found = []
    for fused in ("1", "0"):
        monkeypatch.setenv("HF_VQ_FUSED_INPUTS", fused)
        mlp(x).square().sum().backward()
        found.append(leaves.pop().grad)
    assert torch.equal(*found) and found[0].any()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_get_floats(dense, monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(load(dense), config).eval()
    assert torch.equal(logits(model), apart(model, monkeypatch))


def test_saved_copied_pickled_dequantized(dense, tmp_path, monkeypatch, rounded):
    model = load(dense)
    expected = logits(model)
    once = len(rounded)
    model.save_pretrained(tmp_path)
    for other in (LOAD(tmp_path), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rounded.clear()
        assert torch.equal(logits(other), expected) and len(rounded) == once
        norm = other.model.layers[0].input_layernorm
        assert norm.forward.args[0] is norm  # its own, not that of the model it was copied from
    assert other.state_dict().keys() == model.state_dict().keys()
    separate_inputs(other)
    rounded.clear()
    assert torch.equal(logits(other), expected) and len(rounded) == 14
    fuse_inputs(other)
    fuse_inputs(other)
    assert torch.equal(logits(other), expected) and len(rounded) == 14 + once
    restored = model.dequantize()
    assert not any("forward" in vars(module) for module in restored.modules())


def test_offloaded_models_keep_their_hooks(dense, tmp_path, rounded):
    model = load(dense)
    expected = logits(model)
    once = len(rounded)
    model.save_pretrained(tmp_path)
    model = LOAD(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offloaded")
    norm = model.model.layers[1].input_layernorm
    assert norm.weight.is_meta and "_hf_hook" in vars(norm)
    for fused in (True, False):
        rounded.clear()
        assert torch.equal(logits(model), expected) and norm.weight.is_meta
        assert len(rounded) == (once if fused else 14)
        separate_inputs(model)


def test_a_forward_of_others_is_left_alone(dense, rounded):
    model = load(dense)
    separate_inputs(model)
    for block in model.model.layers:
        norm = block.input_layernorm
        norm.forward = lambda x, norm=norm: 2 * type(norm).forward(norm, x)
    twice = logits(model)
    fuse_inputs(model)
    rounded.clear()
    assert torch.equal(logits(model), twice) and len(rounded) == 2 * 6
    separate_inputs(model)
    assert torch.equal(logits(model), twice)


def test_compiled_as_before(dense):
    model = load(dense)
    expected = logits(model)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(whole), expected)
    model = load(dense)
    model.model.layers[0].self_attn.compile(backend="aot_eager")
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_a_deferred_tensor_is_a_tensor():
    x, weight = torch.randn(3, 64), torch.randn(64)
    later = LazyActivation(Norm(x, weight, 1e-6))
    plain = later.source.floats()
    assert later.shape == (3, 64) and later.dtype == x.dtype and "Norm" in repr(later)
    assert torch.equal(later.to(torch.float64), plain.double())
    assert torch.equal(later[1], plain[1]) and torch.equal(x + later, x + plain)
    assert torch.equal(pickle.loads(pickle.dumps(later)), plain)
    assert torch.equal(copy.deepcopy(later), plain)
    gated = LazyActivation(Gated(x, x + 1))
    assert torch.equal(gated.float(), torch.nn.functional.silu(x) * (x + 1))


@torch.no_grad()
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy().tolist(),
        lambda x: numpy.asarray(x).tolist(),
        lambda x: torch.from_dlpack(x).tolist(),
        lambda x: x.share_memory_().tolist(),
        lambda x: x.untyped_storage().tolist(),
    ],
)
def test_memory_of_a_deferred_tensor_is_that_of_floats(read):
    later = LazyActivation(Norm(torch.randn(3, 64), torch.randn(64), 1e-6))
    assert read(later) == read(later.source.floats())
    assert later.data_ptr() == later.floats().data_ptr() != 0


@torch.no_grad()
def test_a_deferred_tensor_is_contiguous():
    x, weight = torch.randn(4, 3, 64).transpose(0, 1), torch.randn(64)
    later, layer = LazyActivation(Norm(x, weight, 1e-6)), torch.nn.Linear(64, 8)
    plain = later.source.floats()
    assert later.is_contiguous() and not plain.is_contiguous()
    assert torch.equal(later.contiguous().view(-1, 64), plain.reshape(-1, 64))
    assert torch.equal(layer(later), layer(plain.contiguous()))


@torch.no_grad()
def test_inputs_that_change_before_anybody_reads_are_refused():
    x = torch.randn(3, 64)
    later = LazyActivation(Norm(x, torch.ones(64), 1e-6))
    x.add_(1)
    with pytest.raises(VQBackendError, match="HF_VQ_FUSED_INPUTS=0"):
        later + 1


@torch.no_grad()
def test_kernels_that_round_for_themselves_get_floats(dense, monkeypatch):
    model, x = load(dense), torch.randn(1, 3, 64).bfloat16()
    norm = model.model.layers[0].input_layernorm
    assert type(norm(x)) is LazyActivation
    monkeypatch.delenv("HF_VQ_BACKEND")
    fused = fused_inputs(x, "qoq-w4a8-g32", 64) is not None
    assert type(norm(x)) is (LazyActivation if fused else torch.Tensor)


def test_explain_says_what_it_said(dense):
    model = load(dense)
    fused = str(hf_vq.explain(model))
    separate_inputs(model)
    assert str(hf_vq.explain(model)) == fused and "reference" in fused


def test_norms_that_compute_something_else_are_left_alone(dense):
    model = load(dense, "gemma3")
    assert not any("forward" in vars(module) for module in model.modules())
    model = load(dense, "qwen3")
    fused = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(fused) == 2 * 3 and not any("q_norm" in name for name in fused)


@torch.no_grad()
def test_a_norm_of_another_dtype_is_left_alone(dense, monkeypatch):
    model = load(dense).model
    model.layers[0].input_layernorm.float()
    found = model(tokens()).last_hidden_state
    monkeypatch.setenv("HF_VQ_FUSED_INPUTS", "0")
    assert torch.equal(model(tokens()).last_hidden_state, found)


@torch.no_grad()
def test_a_weight_that_kernels_cannot_read_is_left_to_the_norm(dense):
    norm, x = load(dense).model.layers[0].input_layernorm, torch.randn(1, 3, 64).bfloat16()
    assert type(norm(x)) is LazyActivation
    norm.weight = torch.nn.Parameter(norm.weight[:1].clone())
    assert type(norm(x)) is torch.Tensor
    norm.weight = torch.nn.Parameter(torch.ones(64, dtype=x.dtype, device="meta"))
    with pytest.raises(RuntimeError, match="device"):
        norm(x)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_other_families(family, tmp_path, rounded, monkeypatch):
    from transformers import MistralConfig, Qwen2Config

    kind = {"mistral": MistralConfig, "qwen2": Qwen2Config}[family]
    base = CONFIGS["llama"]().to_dict()
    sizes = {key: base[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "vocab_size")}  # fmt: skip
    CONFIGS[family] = lambda: kind(**sizes)
    try:
        folder = save_tiny(family, tmp_path)
    finally:
        del CONFIGS[family]
    model = LOAD(folder, quantization_config=VQConfig("qoq-w4a8-g32"), dtype=torch.bfloat16)
    found = logits(model)
    assert len(rounded) == 2 * 4
    assert torch.equal(apart(model, monkeypatch), found)
