"""`VQConfig(activations=...)`: what it gains, where it works, what is recorded, what is refused."""

import json
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
)

import hf_vq
from hf_vq.calibration import activations, blocks, offload
from hf_vq.errors import VQConfigError, VQError
from hf_vq.formats import WEIGHT_SCHEMES
from hf_vq.hf import VQConfig
from hf_vq.hf.quantizer import logger
from tests.fixtures.calibration import logits, written
from tests.fixtures.tiny_models import CONFIGS, tokens

LOAD = AutoModelForCausalLM.from_pretrained
pytestmark = pytest.mark.filterwarnings("ignore:vq-3 loses much quality")
MASSIVE = 7  # a channel of the MLP
WIDE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 128, "bos_token_id": 0,
}  # fmt: skip


def load(folder, scheme="vq-3", **options):
    options.setdefault("activations", "model")
    return LOAD(folder, quantization_config=VQConfig(scheme, **options))


@pytest.fixture(scope="module")
def massive(tmp_path_factory):
    """A model with a channel in front of down_proj that is 200 times as large as the others, as
    SmolLM2 has one: its weights there are as much smaller."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.ndim == 2 else 1)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[MASSIVE] *= 200
            layer.mlp.down_proj.weight[:, MASSIVE] /= 200
    folder = tmp_path_factory.mktemp("massive")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def said(monkeypatch):
    """Lines of the log."""
    lines = []
    monkeypatch.setattr(logger, "warning", lambda line, *args: lines.append(line % args))
    return lines


def divergence(model, original, ids):
    exact, found = (logits(one, ids).log_softmax(-1) for one in (original, model))
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize("scheme", ["vq-3", "vq-3-scaled"])
def test_a_massive_channel_is_spared(massive, scheme):
    original = LOAD(massive)
    ids = written(original)
    plain = divergence(load(massive, activations=None), original, ids)
    for given in ("model", "random", tokens(8, 32)):
        assert divergence(load(massive, scheme, activations=given), original, ids) < 0.4 * plain


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_models_come_closer_and_come_back(name, dense, tmp_path):
    original, ids = LOAD(dense(name)), tokens(4, 48)
    plain, model = load(dense(name), activations=None), load(dense(name))
    errors = [(logits(one, ids) - logits(original, ids)).square().mean() for one in (model, plain)]
    assert errors[0] < errors[1]
    model.save_pretrained(tmp_path)
    again, state = LOAD(tmp_path), model.state_dict()
    assert state.keys() == again.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in again.state_dict().items())


def test_what_is_recorded(dense, tmp_path):
    config = VQConfig("vq-3", seed=4, activations="model")
    model = LOAD(dense("llama"), quantization_config=config)
    assert config.provenance is None and config.activations == "model", "the user's is left alone"
    found = model.config.quantization_config
    about = {"text": "model", "tokens": 2048, "seed": 4, "layers": 14, "fallbacks": {}}
    assert found.provenance["activations"] == about and found.format_version == 1
    assert "activations" not in found.to_dict(), "older versions read the file"
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    del stored["provenance"]["digests"]  # of the files
    assert VQConfig.from_dict(stored).to_dict() == found.to_dict()
    assert "2,048 tokens that the model wrote" in (tmp_path / "README.md").read_text()
    streamed = load(dense("llama"), activations=None).config.quantization_config
    assert "activations" not in {**streamed.to_dict(), **streamed.provenance}


def test_equal_seeds_give_equal_codes(dense):
    one, same, other = (load(dense("llama"), seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(one[name], other[name])


def test_layers_with_one_input_share_a_diagonal(massive):
    layer = load(massive, "vq-3-scaled").model.layers[0]
    rows = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    assert all(torch.equal(one.vq_diagonal, rows[0].vq_diagonal) for one in rows)
    assert not torch.equal(layer.mlp.gate_proj.vq_diagonal, rows[0].vq_diagonal)


def test_a_text_is_read(dense, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 400)
    ids = list(range(3, 90)) * 30

    class Tokenizer:
        bos_token_id = None

        def __call__(self, *_, **__):
            return type("Found", (), {"input_ids": ids})

    monkeypatch.setattr(activations, "tokenizer_of", lambda *_: Tokenizer())
    found = load(dense("llama"), activations=text).config.quantization_config
    about = found.provenance["activations"]
    assert about["text"] == "text.txt" and about["tokens"] == 2048
    assert str(tmp_path) not in json.dumps(found.to_dict())
    monkeypatch.setattr(activations, "TOKENS", 1024)
    monkeypatch.setattr(activations, "MOST_TOKENS", 4096)
    monkeypatch.setattr(activations, "_AT_ONCE", 16)
    for wide, read in ((2048, 2048), (4096, 1024)):  # the text has 2,610: too few for the second
        given = WIDE | {"intermediate_size": wide}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**given), dtype=torch.float32)
        hf_vq.quantize_model(model, VQConfig("vq-4", activations=text))
        about = model.config.quantization_config.provenance["activations"]
        assert about["tokens"] == read
    with pytest.raises(VQError, match="no file"):
        load(dense("llama"), activations=str(tmp_path / "nothing.txt"))


@pytest.mark.parametrize(("wide", "read"), [(64, 1024), (2048, 2048), (2100, 2080), (8192, 4096)])
def test_wide_layers_are_judged_by_more_tokens(wide, read, monkeypatch):
    """As many tokens as the widest layer has inputs, in whole batches of both halves."""
    monkeypatch.setattr(activations, "TOKENS", 1024)
    monkeypatch.setattr(activations, "_AT_ONCE", 16)
    model = LlamaForCausalLM(LlamaConfig(**WIDE, intermediate_size=wide))
    scheme = WEIGHT_SCHEMES["vq-4"]
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "mlp" in n]
    found = activations.ActivationPass(
        model, dict.fromkeys(names, scheme), VQConfig("vq-4", activations="random")
    )
    assert found.tokens == read


def test_not_together_with_calibration():
    for options in ({"calibration": "model"}, {"target_bits": 3.0}):
        with pytest.raises(VQConfigError, match="leave activations out"):
            VQConfig(activations="random", **options)


@pytest.mark.parametrize(
    "given", [5, [], [1] * 8, [[1] * 16, [2] * 17], [0.5] * 32, torch.rand(32)]
)
def test_other_activations_are_refused(given):
    with pytest.raises(VQConfigError, match="activations must be"):
        VQConfig(activations=given)


ENCODERS = {
    "bert": (
        AutoModelForMaskedLM,
        lambda: BertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=96, max_position_embeddings=64,
        ),
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        lambda: T5Config(
            d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=96,
            decoder_start_token_id=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_models_that_write_nothing_read_random_tokens(name, tmp_path, said):
    kind, config = ENCODERS[name]
    kind.from_config(config()).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, quantization_config=VQConfig(activations="model"))
    about = model.config.quantization_config.provenance["activations"]
    assert about["text"] == "random" and not about["fallbacks"]
    assert len(said) == 1 and "random tokens are read, not the model's own words" in said[0]
    plain = kind.from_pretrained(tmp_path, quantization_config=VQConfig(activations=None))
    state, streamed = model.state_dict(), plain.state_dict()
    codes = [key for key in about_codes(model) if torch.equal(state[key], streamed[key])]
    assert state.keys() == streamed.keys()
    outside = ["cls.predictions.transform.dense.weight"] if name == "bert" else []
    assert codes == outside, "every layer of a block was heard"


def about_codes(model):
    """Names of the codes of a model."""
    return [f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "scheme")]


def test_models_without_token_ids_are_quantized_as_they_are_read(tmp_path, said):
    config = ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        image_size=32, patch_size=16,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path)
    model = ViTForImageClassification.from_pretrained(
        tmp_path, quantization_config=VQConfig(activations="model")
    )
    assert said == [
        "hf_vq: the layers are quantized without activations: ViTForImageClassification does not "
        "read token ids."
    ]
    found = model.config.quantization_config
    assert "activations" not in {**found.to_dict(), **found.provenance}


def test_too_little_memory_is_told(dense, said, monkeypatch):
    monkeypatch.setattr(offload, "free_memory", lambda place: 1000)
    streamed = load(dense("llama")).state_dict()
    assert len(said) == 1 and "0.0 GB are free; quantize it once on a machine with more" in said[0]
    expected = load(dense("llama"), activations=None).state_dict()
    assert all(torch.equal(expected[key], tensor) for key, tensor in streamed.items())


def test_free_memory_is_that_of_the_place():
    everywhere = offload.free_memory("cpu")
    assert everywhere is None or everywhere > 1 << 20
    assert offload.free_memory("meta") is None


def test_inputs_that_are_not_finite_fall_back(dense, tmp_path, said):
    model = LOAD(dense("llama"))
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    found = load(tmp_path).config.quantization_config.provenance["activations"]
    assert found["text"] == "random"
    names = {f"model.layers.1.self_attn.{one}_proj" for one in "qkv"}
    assert names <= set(found["fallbacks"])
    assert len(said) == 2 and "own words" in said[0] and "NaN or infinity" in said[1]
    assert not any("layers.0" in name for name in found["fallbacks"])


def test_offloaded_weights_are_read_block_by_block(dense, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu",
              "lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}  # fmt: skip
    config = VQConfig("vq-3", activations="random")
    here = LOAD(dense("llama"), quantization_config=config)
    there = LOAD(
        dense("llama"), quantization_config=config, device_map=places, offload_folder=tmp_path
    )
    ids = tokens()
    torch.testing.assert_close(logits(there, ids), logits(here, ids))


def test_recipes_and_schemes_without_a_rotation(dense):
    layers = {"down_proj": "vq-4", "layers.1.self_attn.v_proj": "gptvq-2"}
    model = load(dense("llama"), layers=layers)
    found = model.config.quantization_config.provenance
    assert set(found["relative_error"]) == {
        name for name, module in model.named_modules() if hasattr(module, "scheme")
    }
    assert found["activations"]["fallbacks"] == {}


@pytest.fixture
def halves(request, tmp_path):
    """A model of bfloat16 numbers, saved in bfloat16 and in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
    return tmp_path


@pytest.mark.parametrize("halves", CONFIGS, indirect=True)
def test_blocks_of_16_bits_are_computed_in_float32_on_a_cpu(halves, monkeypatch):
    """The codes are those of a float32 copy; and of that copy one block is in memory at once."""
    made, left, converted = [], [], blocks._converted

    def watched(tree, dtype):
        found = converted(tree, dtype)
        if isinstance(tree, dict) and dtype == torch.float32:  # the tensors of a block
            left.append(sum(one() is not None for one in made))
            made.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(blocks, "_converted", watched)
    monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: None)  # as on CPUs without AMX
    codes = []
    for dtype in (torch.bfloat16, torch.float32):
        config = VQConfig("vq-3", activations="random")
        model = LOAD(halves / str(dtype), quantization_config=config, dtype=dtype)
        assert model.dtype == dtype
        codes.append({k: v for k, v in model.state_dict().items() if v.dtype == torch.uint8})
    one, other = codes
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert len(made) > len(one) and not any(left)


def test_a_block_that_cannot_run_in_float32_runs_in_its_own_dtype(dense, monkeypatch):
    def refuse(self, *args):
        used.append(self.dtype)
        if self.dtype is torch.float32 and len(used) > 4:
            raise RuntimeError("expected BFloat16")
        return run(self, *args)

    used, run = [], blocks.Blocks._in_dtype
    monkeypatch.setattr(blocks.Blocks, "_in_dtype", refuse)
    monkeypatch.setattr(blocks, "multiplied_by_tiles", lambda: None)  # as on CPUs without AMX
    config = VQConfig("vq-3", activations="random")
    model = LOAD(dense("llama"), quantization_config=config, dtype=torch.bfloat16)
    assert used[4:6] == [torch.float32, torch.bfloat16] and set(used[5:]) == {torch.bfloat16}
    found = model.config.quantization_config.provenance["activations"]
    assert not found["fallbacks"] and "failed" not in found


def test_a_model_that_mixes_dtypes_is_run_in_its_own(dense, monkeypatch):
    """Not every architecture takes float32 embeddings."""

    def refuse(self, *args):
        if args[-1] is not None:
            raise RuntimeError("expected BFloat16")
        init(self, *args)

    init = blocks.Blocks.__init__
    monkeypatch.setattr(blocks.Blocks, "__init__", refuse)
    config = VQConfig("vq-3", activations="random")
    model = LOAD(dense("llama"), quantization_config=config, dtype=torch.bfloat16)
    assert not model.config.quantization_config.provenance["activations"]["fallbacks"]
