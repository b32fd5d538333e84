"""`VQConfig(trainable=...)`: scales and learned codebooks train, alone and beside adapters."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq import VQConfig
from hf_vq.errors import VQConfigError
from hf_vq.nn.replace import vq_modules
from tests.fixtures.tiny_models import tokens

peft = pytest.importorskip("peft")
LOAD = AutoModelForCausalLM.from_pretrained
ROWS = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]
STEPS = {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
         "logging_steps": 1, "learning_rate": 1e-2}  # fmt: skip
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft",
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:.*gradient_checkpointing_enable:FutureWarning",
    "ignore:You passed `quantization_config`:UserWarning",
)


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


def stored(model, key):
    """Copies of the stored tensors that `key` names, by layer."""
    return {n: m.tensors()[key].clone() for n, m in vq_modules(model).items()}


def trainer_of(model, folder, **more):
    from transformers import Trainer, TrainingArguments  # peft comes first, with its warnings

    return Trainer(
        model, TrainingArguments(folder, **STEPS, **more), train_dataset=ROWS, eval_dataset=ROWS
    )


def test_a_model_that_trains_scales_is_evaluated_without_training(quantized, tmp_path):
    with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
        trainer_of(LOAD(quantized()), tmp_path)  # Transformers says so, of all libraries
    model = LOAD(quantized(), quantization_config=VQConfig(trainable="scales"))
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    with torch.no_grad():
        exact = float(LOAD(quantized()).eval()(input_ids=ids, labels=ids).loss)
    assert trainer_of(model, tmp_path).evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("scheme", "trainable"),
    [("vq-4", "scales"), ("turboquant-4+4", ("scales",)), ("qoq-w4a8", "scales"),
     ("gptvq-2", ("scales", "codebooks")), ("aqlm-2", ["codebooks"])],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer(quantized, tmp_path, scheme, trainable, dtype):
    config = VQConfig(trainable=trainable)
    model = LOAD(quantized("llama", scheme), dtype=dtype, quantization_config=config)
    assert torch.equal(logits(model), logits(LOAD(quantized("llama", scheme), dtype=dtype)))
    model.get_input_embeddings().requires_grad_(False)
    for name, parameter in model.named_parameters():  # the codes' layers alone
        parameter.requires_grad_(name.endswith("_delta"))
    key = "codebook" if "codebooks" in trainable else "scale"
    before, codes = stored(model, key), stored(model, "codes")
    trainer = trainer_of(model, tmp_path / "out", save_strategy="no")
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first
    assert all(torch.equal(t, codes[n]) for n, t in stored(model, "codes").items())
    assert all(not torch.equal(t, before[n]) for n, t in stored(model, key).items())
    trainer.save_model(tmp_path / "saved")
    again = LOAD(tmp_path / "saved", dtype=dtype)
    assert again.state_dict().keys() == LOAD(quantized("llama", scheme)).state_dict().keys()
    assert torch.equal(logits(again), logits(model))
    assert again.num_parameters() == model.num_parameters()


def test_resumed_training(quantized, tmp_path):
    """A checkpoint holds the moved tensors, from which training goes on; the best is put back."""

    def load():
        return LOAD(quantized(), quantization_config=VQConfig(trainable="scales"))

    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    trainer = trainer_of(load(), tmp_path, load_best_model_at_end=True, **options)
    trainer.train()
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-4)
    trainer = trainer_of(load(), tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("scheme", ["vq-4", "gptvq-2", "qoq-w4a8"])
@pytest.mark.parametrize("trainable", [None, "scales"])
def test_stored_tensors_themselves_do_not_train(quantized, scheme, trainable):
    """Transformers lets every float tensor train that it reads; nothing is frozen here."""
    model = LOAD(quantized("llama", scheme), quantization_config=VQConfig(trainable=trainable))
    found = [m._parameters.get(n) for m in vq_modules(model).values() for n in m.specs]
    before = [tensor.clone() for tensor in found if tensor is not None]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for _ in range(3):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
    after = [m._parameters.get(n) for m in vq_modules(model).values() for n in m.specs]
    assert all(map(torch.equal, before, [tensor for tensor in after if tensor is not None]))


def test_dense_experts_keep_no_changes(quantized, tmp_path):
    model = LOAD(quantized("qwen3-moe"), quantization_config=VQConfig(trainable="scales"))
    names = set(LOAD(quantized("qwen3-moe")).dequantize().state_dict())
    dense = model.dequantize()
    assert set(dense.state_dict()) == names
    dense.save_pretrained(tmp_path)  # as Transformers names experts
    assert any("experts.0.gate_proj" in name for name in load_file(tmp_path / "model.safetensors"))


def test_experts_train(quantized, tmp_path):
    model = LOAD(quantized("qwen3-moe"), quantization_config=VQConfig(trainable="scales"))
    model(tokens(), labels=tokens()).loss.backward()
    deltas = {n: p for n, p in model.named_parameters() if n.endswith("_delta")}
    assert any("experts" in name for name in deltas)
    with torch.no_grad():
        for parameter in deltas.values():
            assert parameter.grad.abs().sum() > 0
            parameter.sub_(0.1 * parameter.grad.sign())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(LOAD(tmp_path)), logits(model))


def test_beside_an_adapter(quantized, tmp_path):
    base = LOAD(quantized(), quantization_config=VQConfig(trainable="scales"))
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", r=4))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition("_")[2] for name in trained if "lora" not in name} == {"delta"}
    trainer = trainer_of(model, tmp_path / "out", save_strategy="no")
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    merged = copy.deepcopy(model).merge_and_unload()
    error = (logits(merged) - expected).norm() / expected.norm()
    assert error < 0.2
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(LOAD(tmp_path / "merged")), logits(merged))
    model.unload().save_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(LOAD(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)


def test_models_in_memory_copies_and_casts(dense):
    model = LOAD(dense("llama"))
    hf_vq.quantize_model(model, VQConfig(activations=None, trainable="scales"))
    deltas = [p for n, p in model.named_parameters() if n.endswith("_delta")]
    assert len(deltas) == 14 and model.hf_quantizer.is_qat_trainable
    with torch.no_grad():
        for parameter in deltas:
            parameter.fill_(1e-4)  # less than half a step of fp16, for most
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    cast = copy.deepcopy(model).to(torch.bfloat16)
    kinds = {p.dtype for n, p in cast.named_parameters() if n.endswith("_delta")}
    assert kinds == {torch.float32}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == trained
    assert (logits(hf_vq.dequantize(model)) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [({"trainable": "codes"}, "finetune"), ({"trainable": []}, "scales"),
     ({"trainable": ("scales", 1)}, "codebooks")],
)  # fmt: skip
def test_refusals(arguments, cure):
    with pytest.raises(VQConfigError, match=cure):
        VQConfig(**arguments)


def test_codebooks_that_all_layers_share_stay(quantized):
    with pytest.raises(VQConfigError, match=r"one codebook for all layers.*gptvq-2"):
        LOAD(quantized(), quantization_config=VQConfig(trainable="codebooks"))


def test_without_it_trainer_refuses(quantized, tmp_path):
    with pytest.raises(ValueError, match="purely quantized"):
        trainer_of(LOAD(quantized()), tmp_path)


def test_it_is_not_stored(quantized, tmp_path):
    model = LOAD(quantized(), quantization_config=VQConfig(trainable="scales"))
    model.save_pretrained(tmp_path)
    assert "trainable" not in (tmp_path / "config.json").read_text()
    assert not LOAD(tmp_path).hf_quantizer.is_qat_trainable
