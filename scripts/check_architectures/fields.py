"""Parts of tiny configs: sizes by the names of fields, and more that single configs need."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "embed_dims",
         "embedding_size", "projection_dim", "emb_dim", "width", "out_hidden_size", "model_dim",
         "lru_width", "d_embed", "word_embed_proj_dim", "rnn_hidden_size", "embedding_dim",
         "encoder_hidden_size", "decoder_hidden_size", "text_hidden_size", "qformer_hidden_size",
         "bottleneck_features", "attention_hidden_size", "d_inner", "hidden_size_per_layer_input",
         "projection_size", "encoder_hidden_dim", "backbone_hidden_size", "hidden_size_global",
         "cross_hidden_size", "projector_hidden_size", "upsample_groups"),
        64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim",
         "n_inner", "ffn_hidden_size", "feed_forward_proj_dim", "dff", "feedforward_dim",
         "shared_expert_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size",
         "mlp_hidden_size", "dim_feedforward", "encoder_intermediate_size",
         "decoder_intermediate_size", "block_ff_dim"),
        96),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers",
         "n_layers", "num_encoder_layers", "num_decoder_layers", "depth", "vision_layers",
         "num_block", "encoder_num_layers", "decoder_num_layers", "encoder_num_hidden_layers",
         "decoder_num_hidden_layers", "num_self_attends_per_block", "num_layers_per_stack",
         "layers"),
        2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads",
         "decoder_attention_heads", "attention_heads", "num_encoder_attention_heads",
         "num_decoder_attention_heads", "encoder_num_attention_heads",
         "decoder_num_attention_heads", "num_linear_attention_heads"),
        4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "encoder_num_key_value_heads",
         "decoder_num_key_value_heads", "cross_num_key_value_heads"),
        2),
    **dict.fromkeys(
        ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_head_dim",
         "d_kv", "kv_channels", "global_head_dim", "d_head", "rotary_dim"),
        16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 32),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_dim", "expert_ffn_hidden_size",
                     "moe_expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "entity_vocab_size",
                     "vocab_size_per_layer_input", "tgt_vocab_size", "src_vocab_size"), 160),
    **dict.fromkeys(("num_queries", "two_stage_num_proposals"), 8),
    **dict.fromkeys(
        ("chunk_size", "mamba_chunk_size", "mamba_head_dim", "mamba_d_state", "ssm_state_size",
         "state_size"),
        16),
    "mamba_num_heads": 8,
    "base_channels": 32,
    "codebook_size": 128,
    "image_size": 64,
    "patch_size": 16,
    "mm_tokens_per_image": 4,
    "max_position_embeddings": 256,
    "max_target_positions": 256,
    "n_positions": 256,
    "n_ctx": 256,
}  # fmt: skip
"""The largest value of a field of this name."""

UNSET = ("vocab_size", "head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Fields that get their value of SIZES where a default config leaves them None."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    """Rotary embeddings in sections, which together are half as long as a head."""
    return {"rope_parameters": {**_ROPE, "mrope_section": [*sizes], **more}}


def _each(names: tuple[str, ...], fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same fields for several classes."""
    return {name: fields for name in names}


FIELDS: dict[str, dict[str, Any]] = {
    "AlignConfig": {"projection_dim": 320},
    "BambaConfig": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "Blip2Config": {"image_token_index": 150},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "BltConfig": {"encoder_hash_byte_group_vocab": 500, "num_hidden_layers": 2},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 150}},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaTextConfig": {
        "global_head_dim": 32, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1},
    "Dots3NoteAudioConfig": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "Dots3NoteVisionConfig": {
        "mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 64, "adapter_out_dim": 64,
    },
    "Emu3Config": {"vocabulary_map": {"<image>": 150}},
    "Ernie4_5_VLMoeTextConfig": _sections(3, 3, 2),
    "EsmConfig": {"mask_token_id": 32, "pad_token_id": 1},
    "Florence2VisionConfig": {
        "embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4),
        "num_groups": (2, 2, 4, 4),
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4TextConfig": {"global_head_dim": 32},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 32},
    "Glm4vMoeTextConfig": _sections(1, 1, 2, partial_rotary_factor=0.5),
    "Granite4VisionConfig": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[1, 0]], "spatial_target_layers": [1],
        "image_grid_pinpoints": [[64, 64]],
    },
    "GraniteMoeHybridConfig": {
        "mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "HrmTextConfig": {"num_hidden_layers": 16},
    "HunYuanVLTextConfig": _sections(2, 2, 2, 2),
    "InstructBlipConfig": {"image_token_index": 150},
    "InstructBlipVideoConfig": {"video_token_index": 150},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Kosmos2Config": {"latent_query_num": 4},
    "LayoutLMv3Config": {"coordinate_size": 11, "shape_size": 10, "input_size": 64},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LiltConfig": {"hidden_size": 96},
    "LwDetrConfig": {"projector_scale_factors": [1.0]},
    "Mamba2Config": {"num_heads": 8},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MoonshineConfig": {"decoder_num_key_value_heads": 4, "encoder_num_key_value_heads": 4},
    "MuseSparkAudioConfig": {
        "num_hidden_layers": 4, "hidden_sizes": (16, 16, 32, 32), "depths": (1, 1, 1, 1),
    },
    "Nemotron3DiarizationHeadConfig": {"audio_hidden_size": 64},
    "PPDocLayoutV2ForObjectDetection": {
        "class_thresholds": [0.5] * 25, "class_order": [*range(25)],
    },
    "PerceiverConfig": {"num_latents": 32, "d_latents": 64},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16), "num_buckets": 4,
        "attn_layers": ("local", "lsh"),
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "ShieldGemma2Config": {"yes_token_index": 20, "no_token_index": 21},
    "Step3p7TextConfig": {"sliding_window": 8},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "VipLlavaConfig": {"vision_feature_layers": [-2, -1]},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "xLSTMConfig": {"num_blocks": 2, "qk_dim_factor": 1.0},
    **_each(
        ("Glm4vTextConfig", "GlmOcrTextConfig", "PaddleOCRTextConfig", "Qwen2VLTextConfig",
         "Qwen2_5OmniTextConfig", "Qwen2_5_VLTextConfig"),
        _sections(2, 3, 3)),
    **_each(
        ("LlavaNextConfig", "LlavaNextVideoConfig", "LlavaOnevisionConfig"),
        {"image_grid_pinpoints": [[64, 64]]}),
    **_each(
        ("DFineConfig", "Deimv2Config", "PPDocLayoutV2Config", "PPDocLayoutV3Config",
         "PPDocLayoutV4Config", "RTDetrConfig", "RTDetrV2Config"),
        {"decoder_in_channels": [64, 64, 64]}),
    **_each(
        ("AlignVisionConfig", "EfficientNetConfig"),
        {"num_block_repeats": [1] * 7, "width_coefficient": 1.0, "depth_coefficient": 1.0,
         "hidden_dim": 1280}),
    **_each(
        ("DonutSwinConfig", "SwinConfig", "Swinv2Config"),
        {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "window_size": 2}),
    **_each(
        ("EsmcConfig", "GraniteSpeech5EncoderConfig", "MoonshineStreamingConfig",
         "Nemotron3DiarizationAudioConfig", "Nemotron3_5TranscribeAsrAudioConfig",
         "Nemotron3_5TranscribeWordTimestampConfig"),
        {"num_key_value_heads": 4}),
    **_each(
        ("VibeVoiceAcousticTokenizerConfig", "VibeVoiceAcousticTokenizerEncoderConfig"),
        {"depths": (1,) * 7, "num_filters": 4}),
}  # fmt: skip
"""By the name of a config's or a model's class: fields that SIZES does not know or gets wrong. A
dict is for a config in the config."""
