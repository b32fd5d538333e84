"""Layers that stay dense although nobody named them: what does not fit, and heads that are new."""

import logging

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from hf_vq.errors import VQConfigError, VQFormatError, VQSchemeError
from hf_vq.hf import VQConfig, dequantize, quantize_model
from hf_vq.hf.left_dense import weights_read
from hf_vq.nn import VQLinear
from hf_vq.nn.replace import convertible, vq_modules
from tests.fixtures.checkpoints import LOAD, assert_same_state
from tests.fixtures.tiny_models import tokens

DOWN = "model.layers.0.mlp.down_proj"
BERT = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def odd(tmp_path):
    """A Llama whose down projections have rows of 100 weights, 4 x 25."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=100, vocab_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "odd")
    return tmp_path / "odd"


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "vq-4"},
        {"scheme": "vq-2"},
        {"scheme": "turboquant-4"},
        {"scheme": "quip-sharp-2"},
        {"scheme": "qoq-w4a8-g128"},
        {"target_bits": 3},
    ],
    ids=lambda options: str(next(iter(options.values()))),
)
def test_what_does_not_fit_stays_dense(odd, tmp_path, caplog, options):
    with caplog.at_level(logging.WARNING, "hf_vq"):
        model = LOAD(odd, quantization_config=VQConfig(**options))
    (line,) = [r.getMessage() for r in caplog.records if "stay dense" in r.getMessage()]
    assert "2 of 14 layers" in line and "model.layers.*.mlp.down_proj [64, 100] (2)" in line
    assert type(model.get_submodule(DOWN)) is nn.Linear and len(vq_modules(model)) == 12
    model.save_pretrained(tmp_path / "vq")
    caplog.clear()
    again = LOAD(tmp_path / "vq")
    assert "stay dense" not in caplog.text
    assert_same_state(model, again)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_a_layer_that_is_named_must_fit(odd):
    with pytest.raises(VQSchemeError, match="down_proj"):
        LOAD(odd, quantization_config=VQConfig(layers={"down_proj": "vq-3"}))


def test_nothing_is_said_of_layers_that_were_left_out(odd, caplog):
    LOAD(odd, quantization_config=VQConfig(modules_to_not_convert=["down_proj"]))
    assert "stay dense" not in caplog.text


def test_experts_in_an_unknown_layout_stay_dense(dense, caplog, monkeypatch):
    monkeypatch.setattr("hf_vq.nn.experts.FLAGS", ("unheard_of",))
    model = LOAD(dense("qwen3-moe"), quantization_config=VQConfig())
    assert "mlp.experts" in caplog.text and vq_modules(model)
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("bias", [False, True])
def test_falcon(tmp_path, bias):
    config = FalconConfig(
        hidden_size=64, vocab_size=96, num_hidden_layers=1, num_attention_heads=2, bias=bias
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    model = LOAD(tmp_path / "dense", quantization_config=VQConfig())
    assert len(vq_modules(model)) == 4
    model.save_pretrained(tmp_path / "vq")
    again = LOAD(tmp_path / "vq")
    expected = model(tokens()).logits
    assert torch.equal(again(tokens()).logits, expected)
    torch.testing.assert_close(again.dequantize()(tokens()).logits, expected, rtol=1e-4, atol=1e-5)


class Product(nn.Linear):
    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Doubles(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Clips(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class Rounds(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(torch.bfloat16).to(x.dtype))


class Routes(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class HasMore(Product):
    def __init__(self, *args):
        super().__init__(*args)
        self.more = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("kind", [Product, Doubles, Clips, Rounds, Routes, HasMore])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_subclasses_of_linear(kind, bias, device):
    with torch.device(device):
        layer = kind(16, 8, bias)
        before = dict(layer._parameters)
        assert convertible(layer) == (kind is Product)
    assert layer._parameters == before and (layer.in_features, layer.out_features) == (16, 8)


def dense_bert(folder, kind=BertForMaskedLM, **more):
    kind(BertConfig(**BERT, **more)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("activations", [None, "random"])
def test_a_new_head_is_initialized_and_stays_dense(tmp_path, activations):
    folder = dense_bert(tmp_path / "dense")
    load = BertForSequenceClassification.from_pretrained
    config = VQConfig(activations=activations)
    model, info = load(folder, quantization_config=config, output_loading_info=True)
    assert {"classifier.weight", "bert.pooler.dense.weight"} <= set(info["missing_keys"])
    for name in ("classifier", "bert.pooler.dense"):
        layer = model.get_submodule(name)
        assert type(layer) is nn.Linear and 0 < layer.weight.std() < 0.1
        assert name in model.config.quantization_config.modules_to_not_convert
    assert len(vq_modules(model)) == 6
    model.save_pretrained(tmp_path / "vq")
    assert torch.equal(load(tmp_path / "vq")(tokens()).logits, model(tokens()).logits)


def test_a_quantized_model_gets_a_new_head(tmp_path):
    folder = dense_bert(tmp_path / "dense")
    quantized = BertForMaskedLM.from_pretrained(folder, quantization_config=VQConfig())
    quantized.save_pretrained(tmp_path / "vq")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "vq")
    assert type(model.bert.pooler.dense) is nn.Linear and len(vq_modules(model)) == 6
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("quantized", [False, True])
def test_another_number_of_labels(tmp_path, quantized):
    load = BertForSequenceClassification.from_pretrained
    folder = dense_bert(tmp_path / "dense", BertForSequenceClassification, num_labels=3)
    options = {"quantization_config": VQConfig(), "num_labels": 5}
    if quantized:
        load(folder, quantization_config=VQConfig()).save_pretrained(tmp_path / "vq")
        folder = tmp_path / "vq"
        options.pop("quantization_config")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder, **options)
    model = load(folder, **options, ignore_mismatched_sizes=True)
    assert type(model.classifier) is nn.Linear and len(vq_modules(model)) == 7
    assert model(tokens()).logits.shape[-1] == 5 and model(tokens()).logits.isfinite().all()


def test_another_size_of_a_layer_behind_the_base_model(tmp_path):
    folder = dense_bert(tmp_path / "dense")
    config = VQConfig(layers={"cls.predictions.transform.dense": "vq-3"})
    model = BertForMaskedLM.from_pretrained(folder, quantization_config=config)
    assert isinstance(model.cls.predictions.transform.dense, VQLinear)


def test_a_classifier_stays_dense(tmp_path):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, vocab_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_labels=16, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(tmp_path, quantization_config=VQConfig())
    assert type(model.score) is nn.Linear and len(vq_modules(model)) == 7


@pytest.mark.parametrize("activations", [None, "random"])
def test_a_layer_of_a_block_is_no_new_part(tmp_path, activations):
    from safetensors.torch import load_file, save_file

    file = dense_bert(tmp_path / "dense") / "model.safetensors"
    name = "bert.encoder.layer.0.output.dense.weight"
    kept = {key: tensor for key, tensor in load_file(file).items() if key != name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=r"output\.dense"):
        BertForSequenceClassification.from_pretrained(
            tmp_path / "dense", quantization_config=VQConfig(activations=activations)
        )


@pytest.mark.usefixtures("reference_kernels")
def test_a_weight_that_the_model_reads_stays_dense(tmp_path):
    """Mamba multiplies by `dt_proj.weight` itself."""
    config = MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=96, time_step_rank=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    model = LOAD(tmp_path / "dense", quantization_config=VQConfig())
    assert len(vq_modules(model)) == 3
    assert type(model.backbone.layers[0].mixer.dt_proj) is nn.Linear
    model.save_pretrained(tmp_path / "vq")
    again = LOAD(tmp_path / "vq")
    expected = model(tokens()).logits
    assert torch.equal(again(tokens()).logits, expected)
    torch.testing.assert_close(again.dequantize()(tokens()).logits, expected, rtol=1e-4, atol=1e-5)


class Reads(nn.Module):
    """Reads weights, or their dtype, of its own layers and of those further down."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 16), "down": nn.Linear(16, 16)}) for _ in range(2)
        )
        nn.init.zeros_(self.d.weight)

    def forward(self, x):
        x = self.b(self.a(x).to(self.a.weight.dtype)).to(self.b.weight.device)
        x = self.c(x) @ self.blocks[0].up.weight
        for block in self.blocks:
            x = x + block.down.weight.sum() + block["up"](x)
        return self.d(x)

    def fix_init_weight(self):  # of timm: while such layers stayed dense, so did half of a ViT
        self.d.weight.div_(2)

    def load_pretrained(self, path):
        self.d.weight.copy_(torch.load(path))

    def _load_weights(self):
        self.d.weight.zero_()


def test_what_counts_as_reading_a_weight():
    model = nn.ModuleDict({"inner": Reads()})
    assert weights_read(model) == [
        "inner.a", "inner.blocks.0.up", "inner.blocks.0.down", "inner.blocks.1.down"
    ]  # fmt: skip


@pytest.mark.usefixtures("reference_kernels")
def test_a_model_without_input_embeddings_is_dequantized(tmp_path):
    config = Wav2Vec2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        conv_dim=(16, 16), conv_kernel=(3, 3), conv_stride=(2, 2), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=32,
    )  # fmt: skip
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    model = Wav2Vec2ForCTC.from_pretrained(tmp_path, quantization_config=VQConfig()).eval()
    sound = torch.randn(1, 400)
    expected = model(sound).logits
    torch.testing.assert_close(model.dequantize()(sound).logits, expected, rtol=1e-4, atol=1e-4)


def untied(folder, **more):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, vocab_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("activations", [None, "random"])
@pytest.mark.parametrize("scheme", ["vq-4", "turboquant-6", "qoq-w4a8"])
def test_an_output_head_that_is_named(tmp_path, scheme, activations):
    """It has codes, of the model's scheme or of another, also in a model that is loaded again."""
    folder = untied(tmp_path / "dense", tie_word_embeddings=False)
    options = {"layers": {"lm_head": scheme}, "activations": activations}
    model = LOAD(folder, quantization_config=VQConfig(**options))
    assert isinstance(model.lm_head, VQLinear) and len(vq_modules(model)) == 15
    assert model.lm_head.scheme == VQConfig(scheme).vq_scheme
    assert "lm_head" not in model.config.quantization_config.modules_to_not_convert
    model.save_pretrained(tmp_path / "vq")
    again, info = LOAD(tmp_path / "vq", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_state(model, again)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    in_memory = quantize_model(LOAD(folder), VQConfig(**options))
    assert_same_state(model, in_memory)
    dense = dequantize(again)
    assert type(dense.lm_head) is nn.Linear
    torch.testing.assert_close(dense(tokens()).logits, model(tokens()).logits, rtol=0.1, atol=0.1)


def test_an_output_head_is_not_named_by_an_entry_for_all_layers(tmp_path):
    folder = untied(tmp_path, tie_word_embeddings=False)
    config = VQConfig(layers={".*": "vq-3"}, activations=None)
    assert isinstance(LOAD(folder, quantization_config=config).lm_head, nn.Linear)
    config = VQConfig(layers={"lm_head": "vq-3"}, modules_to_not_convert=["lm_head"])
    with pytest.raises(VQConfigError, match="'lm_head' matches no module"):
        LOAD(folder, quantization_config=config)


def test_a_tied_output_head_that_is_named(tmp_path):
    folder = untied(tmp_path, tie_word_embeddings=True)
    with pytest.raises(VQConfigError, match=r"lm_head is tied .* VQConfig\(embeddings="):
        LOAD(folder, quantization_config=VQConfig(layers={"lm_head": "vq-4"}))


def test_an_output_head_of_codes_keeps_its_size(tmp_path):
    folder = untied(tmp_path, tie_word_embeddings=False)
    config = VQConfig(layers={"lm_head": "vq-4"}, activations=None)
    model = LOAD(folder, quantization_config=config)
    with pytest.raises(VQConfigError, match="output head of 96 rows cannot be resized to 100"):
        model.resize_token_embeddings(100)
    assert model.resize_token_embeddings(96).num_embeddings == 96
    assert model(tokens()).logits.shape[-1] == 96


def test_an_output_head_whose_weight_the_model_reads(tmp_path):
    config = MambaConfig(
        hidden_size=64, vocab_size=96, num_hidden_layers=1, tie_word_embeddings=False
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        VQConfigError, match=r"lm_head stays dense: the model.s code reads .* Leave the entry out"
    ):
        LOAD(tmp_path, quantization_config=VQConfig(layers={"lm_head": "vq-4"}))
