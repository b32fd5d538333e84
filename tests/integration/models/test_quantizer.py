"""Quantizing while loading, saving and loading again."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)
from transformers.quantizers import auto

from hf_vq import ops, progress
from hf_vq.errors import VQConfigError, VQFormatError
from hf_vq.hf import VQConfig, VQHfQuantizer, quantize_op, register
from hf_vq.hf.module_patterns import matches
from hf_vq.nn import VQLinear
from hf_vq.nn.dense_head import DenseHead
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import CLEAN, LOAD, assert_same_state, logits
from tests.fixtures.tiny_models import CONFIGS, tokens


def with_decoded_weights(folder, quantized):
    """The dense model whose weights are what the quantized one stores, in float64."""
    model = LOAD(folder, dtype=torch.float64, experts_implementation="eager")
    for name, module in vq_modules(quantized).items():
        dense = model.get_submodule(name)
        for weight in module.weights():
            if isinstance(module, VQLinear):
                decoded = ops.decode_weight(
                    module.tensors(), module.scheme, module.in_features, torch.float64
                )
                decoded = decoded.T if module.transposed else decoded
            else:
                decoded = module.decoded(weight, torch.float64)
            assert getattr(dense, weight).shape == decoded.shape
            getattr(dense, weight).data.copy_(decoded)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("reference_kernels")
def test_it_computes_what_it_stores(dense, name):
    model = LOAD(dense(name), quantization_config=VQConfig("vq-4"))
    exact = with_decoded_weights(dense(name), model)
    expected = logits(exact)
    # The error of the same maths in the same dtype is the yardstick.
    allowed = 2 * (logits(exact.float()) - expected).abs().max() + 1e-5 * expected.abs().max()
    assert (logits(model) - expected).abs().max() <= allowed
    provenance = model.config.quantization_config.provenance
    assert len(provenance["relative_error"]) == sum(
        len(module.weights()) for module in vq_modules(model).values()
    )
    assert all(0 < error < 0.02 for error in provenance["relative_error"].values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_is_bit_equal(dense, tmp_path, name):
    model = LOAD(dense(name), quantization_config=VQConfig("vq-3"))
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    assert model.config.quantization_config.to_dict() == again.config.quantization_config.to_dict()


@pytest.mark.parametrize(
    "scheme",
    [
        "turboquant-4+4",
        "turboquant-8",
        "turboquant-2",
        "quip-sharp-2",
        "gptvq-2",
        "aqlm-2-int7",
        "turboquant-3+1",
        "vq1x4r2-universal-g128-random_hadamard128-rerotated",
        "vq1x2+3r2-universal-g32-qr32-rerotated",
        "vq1x4+2r2-universal-g0-hadamard0-shared",
        "vq1x4+2r2-universal-g64-qr64-nested",
        "vq2x6r1-tensor-g64-qr64",
        "vq2x4r2-universal-g0-hadamard0",
    ],
)
@pytest.mark.filterwarnings("ignore:.*calibration")
def test_every_kind_of_scheme(dense, tmp_path, scheme):
    """Also rotations that differ by pass: `turboquant-model` saves some, and loads others."""
    config = VQConfig(scheme, modules_to_not_convert=["mlp", "layers.1"], seed=5)
    model = LOAD(dense("llama"), quantization_config=config)
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dense, tmp_path, dtype):
    model = LOAD(dense("qwen3"), quantization_config=VQConfig(), dtype=dtype)
    layer = model.model.layers[0].self_attn.q_proj
    assert (layer.weight.dtype, layer.vq_scale.dtype) == (torch.uint8, torch.float16)
    assert layer.vq_codebook.dtype == torch.float16 and layer.bias.dtype == dtype
    model.save_pretrained(tmp_path)
    again = LOAD(tmp_path)
    assert again.dtype == dtype
    assert_same_state(model, again)
    other = LOAD(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(other.model.layers[0].self_attn.q_proj.vq_scale, layer.vq_scale)


def test_casting_leaves_codes_scales_and_codebooks(quantized, tmp_path):
    model, cast = LOAD(quantized()), LOAD(quantized()).to(torch.bfloat16).bfloat16()
    for name, module in vq_modules(model).items():
        for attribute in module.specs:
            kept = getattr(cast.get_submodule(name), attribute)
            assert kept.dtype == getattr(module, attribute).dtype
            assert torch.equal(kept, getattr(module, attribute))
    assert cast.model.norm.weight.dtype == torch.bfloat16
    cast.save_pretrained(tmp_path)
    again = LOAD(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in cast.state_dict().items())


def test_layers_share_one_codebook(quantized):
    model = LOAD(quantized())

    def storages(model):
        return {module.vq_codebook.data_ptr() for module in vq_modules(model).values()}

    assert len(storages(model)) == 1
    assert storages(LOAD(quantized())) == storages(model)
    assert len(storages(copy.deepcopy(model).to(torch.bfloat16))) == 1


def test_a_meta_model_can_be_made_and_moved(quantized):
    model = LOAD(quantized()).to("meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_stored_bits_are_the_nominal_ones(tinybooks, tmp_path):
    config = VQConfig("vq-4", modules_to_not_convert=[r"model.layers.[123]"], search="norm")
    model = LOAD(tinybooks, quantization_config=config)
    model.save_pretrained(tmp_path)
    nominal = weights = 0.0
    for module in vq_modules(model).values():
        nominal += module.weight_count() * module.scheme.bits(module.in_features)
        weights += module.weight_count()
    stored = model.config.quantization_config.provenance["bits_per_weight"]
    assert stored == pytest.approx(nominal / weights, rel=0.01)
    file = (tmp_path / "model.safetensors").stat().st_size
    dense = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters(remove_duplicate=True)
        if not any(name.startswith(prefix + ".") for prefix in vq_modules(model))
    )
    digest = len(r"\"\":\"\",") + 32  # beside the name
    header = sum(130 + len(name) + digest for name in model.state_dict())
    assert file <= dense + stored * weights / 8 + header


def test_tied_weights_and_the_head_stay_dense(dense):
    for name in ("llama", "llama-tied"):
        model = LOAD(dense(name), quantization_config=VQConfig())
        assert type(model.lm_head) is DenseHead
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == (name == "llama-tied")
        assert len(vq_modules(model)) == 14


@pytest.mark.parametrize("skip", ["layers.0", "down_proj", r"model\.layers\.\d\.self_attn"])
def test_skips_are_added_to_the_default_ones(dense, tmp_path, skip):
    config = VQConfig(modules_to_not_convert=[skip])
    model = LOAD(dense("llama"), quantization_config=config)
    assert type(model.lm_head) is DenseHead and 0 < len(vq_modules(model)) < 14
    assert config.to_dict() == VQConfig(modules_to_not_convert=[skip]).to_dict()  # not changed
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert vq_modules(model).keys() == vq_modules(again).keys()
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert len(vq_modules(base)) == len(vq_modules(model))


def test_what_a_skip_means():
    for name, entry, skipped in (
        ("model.layers.1.mlp", "model.layers.1", True),
        ("model.layers.11.mlp", "model.layers.1", False),
        ("model.layers.11.mlp", "layers.1", False),
        ("model.layers.1.mlp.up_proj", "layers.1", True),
        ("model.layers.11.mlp", r"model\.layers\.1", False),
        ("model.layers.11.mlp", r"model\.layers\.\d+", True),
        ("model.layers.11.mlp", "model.layers.11.", True),
        ("mlp.gate_proj", "mlp.gate", False),
        ("lm_head", "lm_head|other", True),
        ("lm_head2", "lm_head|other", False),
        ("a.down_proj", "down_proj", True),
        ("a.down_proj", "proj", False),
    ):
        assert matches(name, entry) == skipped, (name, entry)


def test_a_base_model_and_one_with_a_head_read_each_other(dense, quantized, tmp_path):
    whole = LOAD(quantized())
    base = AutoModel.from_pretrained(quantized())
    assert torch.equal(base(tokens()).last_hidden_state, whole.model(tokens()).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    headed, info = LOAD(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert_same_state(headed.model, whole.model)
    config = VQConfig(activations=None)
    small = AutoModel.from_pretrained(dense("llama"), quantization_config=config)
    small.save_pretrained(tmp_path / "small")
    assert_same_state(LOAD(tmp_path / "small").model, whole.model)


def test_a_new_head_is_new(quantized):
    model, info = AutoModelForSequenceClassification.from_pretrained(
        quantized(), num_labels=3, output_loading_info=True
    )
    assert type(model.score) is nn.Linear and info["missing_keys"] == {"score.weight"}
    assert len(vq_modules(model)) == 14


def test_shards(quantized, tmp_path):
    model = LOAD(quantized("qwen3-moe"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    again.save_pretrained(tmp_path)  # one file now, in the place of the shards
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same_state(LOAD(tmp_path), model)


def test_a_state_dict_instead_of_files(quantized):
    model = LOAD(quantized())
    state = model.state_dict()
    again = LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=state)
    assert_same_state(model, again)
    del state["model.layers.1.mlp.up_proj.vq_scale"]
    with pytest.raises(VQFormatError, match=r"layers.1.mlp.up_proj.vq_scale.*random"):
        LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=state)


def test_the_seed_decides(dense):
    models = [LOAD(dense("llama"), quantization_config=VQConfig(seed=seed)) for seed in (1, 1, 2)]
    codes = [model.model.layers[0].mlp.up_proj.weight for model in models]
    assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])


def test_a_dict_is_a_config(dense):
    model = LOAD(dense("llama"), quantization_config={"quant_method": "vq", "scheme": "vq-3"})
    assert model.config.quantization_config.scheme_name == "vq-3"


def test_sizes_are_known_before_loading(dense, quantized):
    """device_map="auto" plans with the sizes that the model will have."""
    from transformers.integrations.accelerate import compute_module_sizes

    seen = {}

    class Watching(VQHfQuantizer):
        def update_weight_conversions(self, conversions, *arguments):
            seen["planned"] = compute_module_sizes(self._model, self)[0][""]
            return super().update_weight_conversions(conversions, *arguments)

    auto.AUTO_QUANTIZER_MAPPING["hf_vq"] = Watching
    try:
        for name in ("llama", "gpt-oss"):
            for model in (
                LOAD(dense(name), quantization_config=VQConfig("vq-3", activations=None)),
                LOAD(quantized(name, "vq-3")),
            ):
                # Buffers that are shared are planned once per layer.
                shared = sum(
                    getattr(module, attribute).nbytes
                    for module in vq_modules(model).values()
                    for attribute in module.shared_names()
                )
                parameters = sum(parameter.nbytes for parameter in model.parameters())
                rest = sum(b.nbytes for n, b in model.named_buffers() if "vq_" not in n)
                assert seen["planned"] == pytest.approx(parameters + rest + shared, rel=1e-6)
    finally:
        register()


def test_it_compiles_and_trains_adapters_and_can_be_saved(quantized):
    quantizer = LOAD(quantized()).hf_quantizer
    assert quantizer.is_trainable and quantizer.is_compileable and quantizer.is_serializable()


def test_registering_twice():
    register()
    assert auto.AUTO_QUANTIZER_MAPPING["hf_vq"] is VQHfQuantizer


def test_passing_a_config_to_a_quantized_model_keeps_the_files_one(quantized):
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = LOAD(quantized(), quantization_config=VQConfig("vq-3"))
    assert model.config.quantization_config.scheme_name == "vq-4"


def test_interrupting(dense, tmp_path, monkeypatch):
    """Ctrl-C is an ordinary KeyboardInterrupt and leaves no file."""
    calls = []

    def interrupted(*arguments, **options):
        calls.append(options["where"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fit(*arguments, **options)

    fit = quantize_op.fit_weight
    monkeypatch.setattr(quantize_op, "fit_weight", interrupted)
    monkeypatch.setattr(progress.logging, "tqdm", Bar)
    monkeypatch.setattr(progress, "_shows_bars", lambda: True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        LOAD(dense("llama"), quantization_config=VQConfig(activations=None))
    assert len(calls) == 3 and list(tmp_path.iterdir()) == []
    (bar,) = Bar.quantizing()
    total = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)  # weights
    assert (bar.total, bar.closed) == (total, 1) and 0 < bar.count < total
    monkeypatch.setattr(quantize_op, "fit_weight", fit)
    LOAD(dense("llama"), quantization_config=VQConfig(search="norm", activations=None))
    _, bar = Bar.quantizing()
    assert (bar.total, bar.count, bar.closed) == (total, total, 1)
    assert "model.layers.1.mlp.down_proj" in bar.names and "vq-4" in bar.label


class Bar:
    """A progress bar that remembers."""

    made: ClassVar[list] = []

    def __init__(self, iterable=None, *, total=None, desc="", **options):
        self.iterable, self.total, self.label = iterable, total, desc
        self.names, self.count, self.closed = [], 0, 0
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __iter__(self):
        return iter(self.iterable)

    def set_postfix_str(self, name):
        self.names.append(name)

    def update(self, count=1):
        self.count += count

    def close(self):
        self.closed += 1

    @classmethod
    def quantizing(cls):
        return [bar for bar in cls.made if bar.label.startswith("Quantizing")]


def test_nothing_to_quantize(dense):
    with pytest.raises(VQConfigError, match="no layer to quantize"):
        LOAD(dense("llama"), quantization_config=VQConfig(modules_to_not_convert=["model"]))
