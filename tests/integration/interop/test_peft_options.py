"""Options of PEFT beyond target_modules, and the trainers that people use."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_vq import VQConfig
from hf_vq.errors import VQBackendError
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import LOAD
from tests.fixtures.tiny_models import tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def gradients(model):
    """Names of the parameters that train, after a step; all of them must have a gradient."""
    model.train()(input_ids=tokens(), labels=tokens()).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None for p in trained.values())
    return set(trained)


@pytest.mark.parametrize(
    ("model", "quantization", "options", "message"),
    [
        ("qwen3-moe", {}, {"target_parameters": EXPERTS[:1]},
         r"gate_up_proj\), which do not train: leave it dense: .*not_convert=\['experts'\]"),
        ("llama", {}, {"target_parameters": ["q_proj.weight"]}, "use target_modules, or leave it"),
        ("llama", {}, {"modules_to_save": ["up_proj"]}, r"up_proj\), .* dense: .*\['up_proj'\]"),
        ("llama", {"embeddings": "int8"}, {"modules_to_save": ["embed_tokens"]},
         r"modules_to_save names codes \(model.embed_tokens\).*quantize without embeddings"),
        ("llama-tied", {"embeddings": "int4"}, {"modules_to_save": ["lm_head"]}, "without embed"),
        ("gpt2", {"embeddings": "int8"}, {"trainable_token_indices": [3]}, r"\(transformer.wte\)"),
        ("llama", {"embeddings": "int8"}, {"trainable_token_indices": {"embed_tokens": [3]}},
         "trainable_token_indices names codes"),
    ],
)  # fmt: skip
def test_what_cannot_train_names_the_cure(dense, model, quantization, options, message):
    """Before: experts were skipped without a word, and others failed on the dtype of codes."""
    config = VQConfig(activations=None, **quantization)
    base = LOAD(dense(model), quantization_config=config)
    target = ["c_attn"] if model == "gpt2" else ["q_proj"]
    with pytest.raises(VQBackendError, match=message):
        peft.get_peft_model(base, peft.LoraConfig(target_modules=target, **options))
    assert not any(parameter.is_meta for parameter in base.parameters())


def test_experts_that_stay_dense_have_adapters(dense):
    """The cure of the message."""
    config = VQConfig(activations=None, modules_to_not_convert=["experts"])
    base = LOAD(dense("qwen3-moe"), quantization_config=config)
    lora = peft.LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, lora_dropout=0.0)
    trained = gradients(peft.get_peft_model(base, lora))
    assert sum("experts" in name for name in trained) == 8 and len(trained) == 12


@pytest.mark.parametrize("tokens_that_train", [[3, 4], {"embed_tokens": [3, 4]}])
def test_rows_of_a_dense_embedding_train(quantized, tokens_that_train):
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=tokens_that_train)
    trained = gradients(peft.get_peft_model(LOAD(quantized()), config))
    assert any("embed_tokens" in name for name in trained)


@pytest.mark.parametrize("kind", ["int8", "turboquant-6"])
def test_adapters_on_a_quantized_embedding(dense, tmp_path, kind):
    def load():
        config = VQConfig(activations=None, embeddings=kind)
        return LOAD(dense("llama"), quantization_config=config)

    model = peft.get_peft_model(load(), peft.LoraConfig(target_modules=["embed_tokens", "q_proj"]))
    assert sum("embed_tokens" in name for name in gradients(model)) == 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_embedding" in name:
                parameter.normal_()
        expected = model.eval()(tokens()).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(load(), tmp_path).eval()
        assert torch.equal(again(tokens()).logits, expected)


def test_x_lora(quantized, tmp_path):
    """A mixture of adapters: their scalings train, and it is saved and loaded."""
    adapters = {str(number): str(tmp_path / f"adapter-{number}") for number in range(2)}
    for folder in adapters.values():
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(LOAD(quantized()), lora).save_pretrained(folder)

    def base():
        model = LOAD(quantized())
        model.config.use_cache = False  # PEFT asks for it
        return model

    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, xlora_depth=2, adapters=adapters
    )
    model = peft.get_peft_model(base(), config)
    assert all("internal_xlora_classifier" in name for name in gradients(model))
    model.save_pretrained(tmp_path / "x-lora")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "x-lora").eval()
    # PEFT 0.21 does not restore the classifier, of dense models neither.
    weights = model.base_model.internal_xlora_classifier.state_dict()
    again.base_model.internal_xlora_classifier.load_state_dict(weights)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model.eval()(tokens()).logits)


def test_loftq_as_an_initialization_names_the_function(quantized):
    config = peft.LoraConfig(target_modules=["q_proj"])
    config.init_lora_weights = "loftq"  # given at once, it wants bitsandbytes and scipy
    with pytest.raises(VQBackendError, match="replace_lora_weights_loftq"):
        peft.get_peft_model(LOAD(quantized()), config)


ROWS = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]
STEPS = {"max_steps": 3, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
         "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}  # fmt: skip


def losses(trainer):
    """Losses of the steps; codes must be the same after them."""
    codes = {n: m.weight.clone() for n, m in vq_modules(trainer.model).items()}
    assert len(codes) == 14 or len(codes) == 28
    trainer.train()
    assert all(torch.equal(m.weight, codes[n]) for n, m in vq_modules(trainer.model).items())
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer(quantized, tmp_path):
    from transformers import Trainer, TrainingArguments  # peft comes first, with its warnings

    model = peft.get_peft_model(LOAD(quantized()), peft.LoraConfig(target_modules="all-linear"))
    trainer = Trainer(model, TrainingArguments(tmp_path, **STEPS), train_dataset=ROWS)
    found = losses(trainer)
    assert len(found) == 3 and found[-1] < found[0]
    trainer.save_model(tmp_path / "adapter")
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.fixture
def quantized_tinybooks(tinybooks, tmp_path):
    """The embedded model with its tokenizer, quantized."""
    config = VQConfig(activations=None)
    AutoModelForCausalLM.from_pretrained(tinybooks, quantization_config=config).save_pretrained(
        tmp_path / "base"
    )
    tokenizer = AutoTokenizer.from_pretrained(tinybooks)
    tokenizer.pad_token = tokenizer.eos_token
    return str(tmp_path / "base"), tokenizer


def test_sft_trainer_of_trl(quantized_tinybooks, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    base, tokenizer = quantized_tinybooks
    trainer = trl.SFTTrainer(
        base,
        trl.SFTConfig(tmp_path / "out", max_length=16, bf16=False, **STEPS),
        train_dataset=datasets.Dataset.from_list([{"text": "It was a dark and stormy night."}] * 8),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"]),
    )
    found = losses(trainer)
    assert len(found) == 3 and found[-1] < found[0]


def test_grpo_trainer_of_trl(quantized_tinybooks, tmp_path):
    """Completions are generated by the codes, whose adapter is then trained."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    base, tokenizer = quantized_tinybooks
    options = {"num_generations": 2, "max_completion_length": 6, "bf16": False, "beta": 0.1}
    trainer = trl.GRPOTrainer(
        base,
        reward_funcs=lambda completions, **kwargs: [float(text.count("e")) for text in completions],
        args=trl.GRPOConfig(tmp_path / "out", **options, **STEPS),
        train_dataset=datasets.Dataset.from_list([{"prompt": "It was a"}] * 8),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"]),
    )
    assert len(losses(trainer)) == 3
    lora_b = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
    assert any(p.abs().sum() > 0 for p in lora_b), "it begins at zero"


def test_dpo_trainer_of_trl(quantized_tinybooks, tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    base, tokenizer = quantized_tinybooks
    row = {"prompt": "It was a", "chosen": " dark night.", "rejected": " green apple."}
    trainer = trl.DPOTrainer(
        base,
        args=trl.DPOConfig(tmp_path / "out", max_length=16, bf16=False, **STEPS),
        train_dataset=datasets.Dataset.from_list([row] * 8),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"]),
    )
    found = losses(trainer)
    assert len(found) == 3 and found[-1] < found[0]
