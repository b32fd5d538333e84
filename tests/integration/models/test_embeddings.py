"""Embeddings of integers and of codes, alone and tied to the output head."""

import copy
import pickle

import accelerate
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    T5Config,
)

from hf_vq.errors import VQConfigError, VQFormatError, VQSchemeError
from hf_vq.evaluation.storage import file_storage, model_storage, read_headers
from hf_vq.formats import coded_rows, integers
from hf_vq.formats.integers import decode_rows, encode_rows, row_bytes
from hf_vq.formats.universal import universal_mse
from hf_vq.hf import VQConfig
from hf_vq.hf.embeddings import encode
from hf_vq.hf.quantizer import VQHfQuantizer
from hf_vq.nn.dense_head import DenseHead
from hf_vq.nn.embedding import VQEmbedding, VQTiedHead
from tests.fixtures.checkpoints import CLEAN, LOAD, assert_same_state, logits
from tests.fixtures.tiny_models import tokens


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_by_half_a_step_at_most(kind, dtype):
    """No number is further from its code than half a step, fp16's rounding of the step aside."""
    weight = (torch.randn(50, 64) * torch.logspace(-3, 2, 50)[:, None]).to(dtype)
    stored = encode_rows(weight, kind)
    assert stored.shape == (50, row_bytes(kind, 64)) and stored.dtype == torch.uint8
    assert row_bytes(kind, 64) == {"int8": 66, "int4": 40}[kind]
    found, rows = decode_rows(stored, kind, 64), weight.float()
    if kind == "int8":
        step = rows.abs().amax(-1, keepdim=True) / 127
        assert ((found - rows).abs() <= step * (0.5 + 127 * 2**-11) + 1e-7).all()
    else:
        groups, near = rows.unflatten(-1, (-1, 32)), found.unflatten(-1, (-1, 32))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        rounding = (low.abs() + high - low) * 2**-10
        assert ((near - groups).abs() <= (high - low) / 30 + rounding + 1e-7).all()
    again = decode_rows(stored.reshape(5, 10, -1), kind, 64)
    assert torch.equal(again, found.reshape(5, 10, 64))


def test_hard_rows():
    for kind in ("int8", "int4"):
        assert not decode_rows(encode_rows(torch.zeros(2, 32), kind), kind, 32).any()
        constant = torch.full((2, 32), 0.375)
        torch.testing.assert_close(
            decode_rows(encode_rows(constant, kind), kind, 32), constant, rtol=2**-10, atol=0
        )
        for bad in (float("nan"), float("inf"), 1e8):
            with pytest.raises(VQFormatError, match=r"embed holds NaN.*Leave embeddings out"):
                encode_rows(torch.full((2, 32), bad), kind, "embed")
    with pytest.raises(VQSchemeError, match="divisible by 32; embed has 48"):
        encode_rows(torch.randn(2, 48), "int4", "embed")


@pytest.mark.parametrize("kind", ["int8", "int4", "turboquant-3", "turboquant-6"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_model_with_quantized_embeddings(dense, tmp_path, name, kind, monkeypatch):
    config = VQConfig("vq-4", embeddings=kind)
    model = LOAD(dense(name), quantization_config=config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert type(embedding) is VQEmbedding and embedding.weight.dtype == torch.uint8
    tied = name == "llama-tied"
    assert type(head) is (VQTiedHead if tied else DenseHead)
    assert (head.weight is embedding.weight) == tied
    # What is computed is what a dense model with these numbers would compute.
    plain = LOAD(dense(name), quantization_config=VQConfig("vq-4"))
    plain.get_input_embeddings().weight.data.copy_(embedding.decoded(torch.float32))
    if tied and kind in coded_rows.KINDS:  # a product of its own
        with monkeypatch.context() as patch:
            patch.setenv("HF_VQ_BACKEND", "reference")
            torch.testing.assert_close(logits(model), logits(plain), rtol=2e-3, atol=2e-3)
        found, exact = logits(model), logits(plain)
        if int(kind[-1]) > 4:
            torch.testing.assert_close(found, exact, rtol=2e-3, atol=2e-3)
        else:  # kernels round inputs and entries to 8 bits
            assert (found - exact).norm() <= 0.02 * exact.norm()
    else:
        assert torch.equal(logits(model), logits(plain))
    model.save_pretrained(tmp_path)
    again, info = LOAD(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in CLEAN)
    assert_same_state(model, again)
    assert torch.equal(logits(model), logits(again))
    stored = load_file(tmp_path / "model.safetensors")
    row = row_bytes(kind, 64) if kind in integers.KINDS else 64 * int(kind[-1]) // 8
    assert stored["model.embed_tokens.weight"].shape == (96, row)
    assert ("lm_head.weight" in stored) != tied
    assert again.get_output_embeddings().weight.dtype == (torch.uint8 if tied else torch.float32)
    again.tie_weights()
    assert torch.equal(logits(model), logits(again))
    generated = [
        one.generate(tokens(), max_new_tokens=4, do_sample=False) for one in (model, again)
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize("kind", coded_rows.KINDS)
@pytest.mark.parametrize("width", [64, 96])
def test_rows_of_codes(kind, width):
    """Rows that are looked up are those of the matrix, and near to what was encoded."""
    dense = nn.Embedding(40, width, dtype=torch.bfloat16)
    dense.weight.data *= torch.logspace(-3, 3, 40, dtype=torch.bfloat16)[:, None]
    stored = encode(dense.weight, kind, "embed")
    assert stored["scale"].shape == (40, 2)
    embedding = VQEmbedding(dense, kind, stored)
    rows = embedding.decoded(torch.float32)
    ids = torch.randint(0, 40, (3, 5))
    embedding.like.data = embedding.like.float()
    assert torch.equal(embedding(ids), rows[ids]) and torch.equal(embedding(ids[:0]), rows[ids[:0]])
    wanted = dense.weight.double()
    error = (rows - wanted).square().sum(-1) / wanted.square().sum(-1)
    # Of Gaussian numbers, at distortion 1.25 times of what 2^bits levels leave at best.
    assert error.mean() < 1.25 * universal_mse(1, int(kind[-1]))
    head = VQTiedHead(embedding)
    for count in (1, 7):
        x = torch.randn(2, count, width, dtype=torch.float64)
        y, expected = head(x.float()).double(), x @ rows.double().T
        # Of up to 5 bits, a kernel may round inputs and levels to 8: to 1 / 254 of the largest.
        size = x.norm(dim=-1, keepdim=True) * rows.double().norm(dim=-1)
        assert ((y - expected).abs() <= (1e-3 if kind > "turboquant-5" else 1 / 127) * size).all()
    with pytest.raises(IndexError):
        embedding(torch.tensor([-1]))


def test_bad_rows_of_codes(dense):
    with pytest.raises(VQFormatError, match="embed"):
        encode(torch.full((4, 64), float("nan")), "turboquant-6", "embed")
    with pytest.raises(VQSchemeError, match=r"embed .*Or use embeddings='int8'"):
        encode(torch.randn(4, 63), "turboquant-6", "embed")


def test_codes_cast_move_and_copy(dense, tmp_path, monkeypatch):
    """Scales keep their bits in every dtype, and a copied head reads the copied embedding."""
    config = VQConfig(embeddings="turboquant-6")
    model = LOAD(dense("llama-tied"), quantization_config=config)
    scale = model.get_input_embeddings().tensors()["scale"].clone()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = again.to(torch.bfloat16)
        embedding, head = again.get_input_embeddings(), again.get_output_embeddings()
        assert torch.equal(embedding.tensors()["scale"], scale) and again.dtype == torch.bfloat16
        for key in ("weight", *embedding.keys):
            assert getattr(head, key) is getattr(embedding, key)
        embedding.scale.data.zero_()
        assert not logits(again).any() and logits(model).any()
    model.to(torch.float16).save_pretrained(tmp_path)
    again = LOAD(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again.get_input_embeddings().tensors()["scale"], scale)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors["model.embed_tokens.scale"][3, 0] ^= 1
    save_file(tensors, path, metadata)
    with pytest.raises(VQFormatError, match=r"model\.embed_tokens\.scale"):
        LOAD(tmp_path)
    tensors["model.embed_tokens.scale"][3] = 255  # NaN
    save_file(tensors, path, metadata)
    monkeypatch.setenv("HF_VQ_VERIFY", "0")
    with pytest.raises(VQFormatError, match=r"model\.embed_tokens\.scale.*(NaN|finite)"):
        LOAD(tmp_path)
    tensors["model.embed_tokens.scale"] = tensors["model.embed_tokens.scale"][:, :1].contiguous()
    save_file(tensors, path, metadata)
    with pytest.raises(VQFormatError, match=r"model\.embed_tokens\.scale"):
        LOAD(tmp_path)


def test_a_count_of_parameters_is_of_the_dense_model(dense, tmp_path):
    count = LOAD(dense("llama-tied")).num_parameters()
    without = LOAD(dense("llama-tied")).num_parameters(exclude_embeddings=True)
    for kind in ("int8", "turboquant-6"):
        model = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings=kind))
        assert model.num_parameters() == count
        assert model.num_parameters(exclude_embeddings=True) == without
        storage = model_storage(model)
        assert storage.weights + sum(kind.weights for kind in storage.kept.values()) == count
        if kind in coded_rows.KINDS:
            model.save_pretrained(tmp_path)
            config = model.config.quantization_config
            filed = file_storage(read_headers(str(tmp_path)), config.stored_scheme)
            assert filed.bits_per_parameter == storage.bits_per_parameter
            assert filed.kept.keys() == storage.kept.keys()


@pytest.mark.parametrize("kind", ["int8", "turboquant-6"])
def test_offloaded_to_the_disk_and_to_memory(dense, tmp_path, kind):
    model = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings=kind))
    expected = logits(model)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"model.embed_tokens": "disk", "lm_head": "disk"}
    away = LOAD(tmp_path / "model", device_map=places, offload_folder=tmp_path / "away")
    for _ in range(2):
        assert torch.equal(logits(away), expected)
    with pytest.raises(VQConfigError, match=r"model\.embed_tokens: its codes are offloaded"):
        away.dequantize()
    accelerate.cpu_offload(model)
    assert torch.equal(logits(model), expected)


def test_older_versions_advise_to_update():
    assert VQConfig(embeddings="turboquant-6").format_version == 5
    assert VQConfig(embeddings="int8").format_version < 5


def test_dtypes_casts_and_copies(dense):
    model = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings="int8"))
    model = copy.deepcopy(model).to(torch.bfloat16)
    embedding = model.get_input_embeddings()
    assert embedding(tokens()).dtype == torch.bfloat16 and embedding.weight.dtype == torch.uint8
    assert logits(model).dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is embedding.weight
    assert model.dtype == torch.bfloat16


def test_only_rows_that_are_looked_up_are_decoded(dense, monkeypatch):
    from hf_vq.nn import embedding as module

    model = LOAD(dense("llama"), quantization_config=VQConfig(embeddings="int4"))
    decoded = []
    original = module.decode_rows
    monkeypatch.setattr(
        module, "decode_rows", lambda rows, *a: decoded.append(rows.shape) or original(rows, *a)
    )
    logits(model)
    assert decoded == [(2, 9, 40)]


def test_a_base_model_reads_the_file(dense, tmp_path):
    model = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings="int8"))
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    expected = model.model(tokens()).last_hidden_state
    assert torch.equal(base(tokens()).last_hidden_state, expected)


def test_dequantized(dense):
    model = LOAD(dense("llama-tied"), quantization_config=VQConfig(embeddings="int8"))
    rows = model.get_input_embeddings().decoded(torch.float32)
    back = model.dequantize()
    embedding, head = back.get_input_embeddings(), back.get_output_embeddings()
    assert type(embedding) is nn.Embedding and type(head) is nn.Linear
    assert head.weight is embedding.weight and torch.equal(embedding.weight, rows)
    logits(back)


def test_what_is_missing_or_wrong(dense, tmp_path):
    LOAD(dense("llama"), quantization_config=VQConfig(embeddings="int8")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    rows = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(VQFormatError, match=r"lacks model.embed_tokens.weight.*random"):
        LOAD(tmp_path)
    wrong = {**tensors, "model.embed_tokens.weight": rows[:, :-2].contiguous()}
    save_file(wrong, path, metadata={"format": "pt"})
    with pytest.raises((VQFormatError, RuntimeError), match=r"(?i)embed_tokens.weight|mismatch"):
        LOAD(tmp_path)


def test_what_cannot_be_stored(dense):
    with pytest.raises(
        VQConfigError, match=r"embeddings must be one of 'int8', 'int4', 't.*; got 'int2'"
    ):
        VQConfig(embeddings="int2")
    with pytest.raises(VQConfigError, match="does more than look rows up"):
        LOAD(dense("gemma3"), quantization_config=VQConfig(embeddings="int8"))


def test_a_weight_that_other_modules_share(tmp_path):
    """Encoder and decoder of T5 have the embedding too, not only the head."""
    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    names = r"decoder\.embed_tokens, encoder\.embed_tokens of T5ForConditionalGeneration"
    with pytest.raises(VQConfigError, match=rf"quantize shared: {names}.*Leave embeddings out"):
        AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path, quantization_config=VQConfig(embeddings="int8")
        )


def test_the_embedding_is_checked_before_anything_is_quantized(dense, tmp_path, monkeypatch):
    def quantized_first(*_):
        raise AssertionError

    monkeypatch.setattr(VQHfQuantizer, "get_quantize_ops", quantized_first)
    with pytest.raises(VQConfigError, match="does more than look rows up"):
        LOAD(dense("gemma3"), quantization_config=VQConfig(embeddings="int8"))
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(VQSchemeError, match=r"divisible by 32; model\.embed_tokens has 48"):
        LOAD(tmp_path, quantization_config=VQConfig(embeddings="int4"))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_integers_are_not_resized(dense, name):
    model = LOAD(dense(name), quantization_config=VQConfig(embeddings="int8"))
    expected = logits(model)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for size in ({"new_num_tokens": 97}, {"new_num_tokens": 90}, {"pad_to_multiple_of": 64}):
            with pytest.raises(VQConfigError, match=r"96 rows .* dequantize this one first"):
                again.resize_token_embeddings(**size)
        for size in ({}, {"new_num_tokens": 96}, {"new_num_tokens": 90, "pad_to_multiple_of": 32}):
            assert again.resize_token_embeddings(**size) is again.get_input_embeddings()
        assert torch.equal(logits(again), expected)
    back = model.dequantize()
    back.resize_token_embeddings(97, mean_resizing=False)
    assert logits(back).shape[-1] == 97
