"""A model that was read from a GGUF file is quantized as any other one in memory."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_vq
from hf_vq import VQConfig, VQConfigError
from hf_vq.hf.in_memory.quantize import _check
from hf_vq.nn.replace import vq_modules
from tests.fixtures.checkpoints import LOAD, assert_same_state, logits

gguf = pytest.importorskip("gguf")
quantizer_gguf = pytest.importorskip("transformers.quantizers.quantizer_gguf")

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.layers": "blk", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_gguf(model, path):
    """A Llama as llama.cpp stores it, in float32."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in model.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "attn_q" in name or "attn_k" in name:  # halves of a head take turns there
            heads = tensor.shape[0] // config.head_dim
            halves = tensor.reshape(heads, 2, config.head_dim // 2, -1)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_of_a_gguf_file(dense, tmp_path):
    original = LOAD(dense("llama"))
    write_gguf(original, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    torch.testing.assert_close(logits(model), logits(original))
    config = VQConfig(activations=None)
    hf_vq.quantize_model(model, config)
    assert len(vq_modules(model)) == 14
    assert_same_state(model, LOAD(dense("llama"), quantization_config=config))
    model.save_pretrained(tmp_path / "vq")
    assert_same_state(model, LOAD(tmp_path / "vq"))


@pytest.mark.parametrize(("packed", "kind"), [({}, "dense"), ({"q": 1}, "packed")])
def test_what_stays_in_blocks_names_the_cure(packed, kind):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    model.hf_quantizer = quantizer_gguf.GgufHfQuantizer(
        quantizer_gguf.GgufConfig(gguf_file="model.gguf")
    )
    model.hf_quantizer.packed_modules = packed
    if kind == "dense":
        _check(model)
    else:
        with pytest.raises(VQConfigError, match=r"by gguf: load it with .*dequantize=True"):
            _check(model)
