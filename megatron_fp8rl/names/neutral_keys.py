"""Keys of config.json that a family does not read: the values without effect, and what other values need.

Authors save the options of other models, of their training program or of an editor there. ``null`` means that an option
is not set. Pure; no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Names, versions, training and loading: no value changes what a forward pass computes.
WITHOUT_EFFECT = frozenset(
    """
    _model_name_or_path _commit_hash _flash_attn_2_enabled _attn_implementation_internal _experts_implementation
    is_llama_config is_mistral_derived model_name model_version base_model base_model_name_or_path license
    use_flash_attn use_flash_attn_2 use_flash_attention use_flash_attention_2 use_sdpa use_fused_rms_norm
    use_fused_rope use_fused_crossentropy use_liger use_liger_kernel use_fused_mlp
    model_max_length max_sequence_length max_seq_len max_seq_length seq_length n_ctx n_positions
    tokenizer_padding_side tokenizer_name tokenizer_name_or_path tokenizer_type training_dtype torch_compile
    gradient_checkpointing use_gradient_checkpointing gradient_checkpointing_use_reentrant keys_to_ignore_at_inference
    attn_dropout attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout ffn_dropout hidden_dropout
    hidden_dropout_prob resid_dropout resid_pdrop residual_dropout input_jitter_noise moe_jitter_noise
    aux_loss_coef aux_loss_weight router_z_loss_coef router_z_loss_weight z_loss_coefficient z_loss_weight
    bias_update_speed moe_router_bias_update_rate mtp_loss_scaling_factor mtp_loss_weight label_smoothing
    load_balance_coeff embedding_initializer_range initializer_factor init_method_std rescale_prenorm_residual
    use_return_dict use_past output_past output_logits num_logits_to_keep logits_to_keep low_cpu_mem_usage
    eod_token_id eos_token bos_token pad_token unk_token sep_token add_bos_token add_eos_token padding_side
    mergekit merge_method deepspeed fsdp bf16 fp16
    """.split()
)
# What another value of a key needs.
NEEDED = {
    "attention_sinks": "attention sinks in trainer and engine",
    "logit_softcapping": "softcapping of logits in trainer and engine",
    "clip_qkv": "clipping of queries, keys and values in trainer and engine",
    "no_rope_layers": "layers without rotary embedding in trainer and engine",
    "swiglu_limit": "a limit of SwiGLU's inputs in trainer and engine",
    "compression_config": "weights that are dequantized first: name the model before quantization",
    "quantization": "weights that are dequantized first: name the model before quantization",
    "index_topk": "sparse attention (DeepSeek-V3.2) in trainer and engine",
}
_BIASES = frozenset("attention_bias attn_bias qkv_bias use_qkv_bias add_qkv_bias attention_qkv_bias".split())
_QK_NORMS = frozenset("qk_norm use_qk_norm qk_layernorm use_qk_layernorm".split())
_OFF = frozenset(
    """
    attention_out_bias attention_output_bias o_bias o_proj_bias out_bias add_bias_linear mlp_bias ffn_bias
    feed_forward_bias lm_head_bias use_bias bias router_bias use_router_bias expert_bias
    rope_interleaved rope_interleave rotary_interleaved is_rope_interleaved alibi use_alibi use_mrope use_dynamic_ntk
    use_logn_attn use_nope no_rope use_xpos use_scaled_rope learned_position_embeddings use_position_embeddings
    use_sliding_window sliding_window_attention use_sliding_window_layers attention_sinks use_sink use_sinks
    attention_sink use_attention_sink add_swa_attention_sink_bias add_full_attention_sink_bias attn_temperature_tuning
    use_bidirectional_attention use_parallel_residual parallel_attn parallel_residual use_post_norm use_post_layernorm
    sandwich_norm use_sandwich_norm apply_residual_connection_post_layernorm normalize_embedding normalize_embeddings
    scale_embedding scale_embeddings mup_enabled use_mup use_mla
    scale_attn_by_inverse_layer_idx new_decoder_architecture multi_query use_peft
    use_lora use_gated_attention attention_gate gated_attention attn_output_gate use_differential_attention use_mamba
    use_layer_scale layer_scale zero_centered_rmsnorm moe_apply_router_weight_on_input
    cross_layer_attention is_quantized quantized
    """.split()
)
_NONE = frozenset(
    """
    no_rope_layers no_rope_layer_interval nope_layer_interval window_size sliding_window_size attention_sink_size
    num_sink_tokens moe_router_logit_softcapping dual_chunk_attention_config mrope_section quantization
    compression_config lora_rank lora_config peft_config adapter_config adapters
    num_experts num_local_experts n_routed_experts moe_num_experts num_shared_experts n_shared_experts
    shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size
    first_k_dense_replace zero_expert_num mlp_only_layers
    num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_predict_layers mtp_num_layers
    q_lora_rank kv_lora_rank cross_attention_layers num_kv_shared_layers
    """.split()
)
_ONE = frozenset(
    """
    residual_multiplier embedding_multiplier logits_scaling logit_scale logits_scale scale_emb embedding_scale
    lm_head_multiplier rope_ratio rope_factor rotary_pct rope_pct rotary_percent rotary_percentage
    moe_layer_freq decoder_sparse_step interleave_moe_layer_step moe_layer_interval expert_layer_period
    n_group topk_group num_expert_group route_scale routed_scaling_factor moe_routed_scaling_factor
    mlp_alpha_factor mlp_beta_factor full_attn_alpha_factor full_attn_beta_factor layernorm_mlp_beta
    layernorm_full_attention_beta layernorm_linear_attention_beta full_attn_mod interpolate_factor
    """.split()
)
_ON = frozenset(
    "no_bias use_glu gated_mlp use_gated_mlp scale_attn_weights use_rope use_rotary use_rotary_embeddings".split()
)
_NAMES = {
    "activation activation_function hidden_activation act_fn ffn_activation": ("silu", "swiglu", "swish"),
    "norm_type normalization normalization_type norm_class layernorm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "position_embedding_type pos_emb_type position_encoding": ("rope", "rotary"),
    "attention_type attn_type": ("full", "full_attention", "causal"),
}
_MOE_FLAGS = frozenset({"use_moe", "is_moe", "moe"})
_EXPERT_KEYS = frozenset(
    "num_experts_per_tok moe_intermediate_size norm_topk_prob scoring_func topk_method moe_k moe_topk".split()
)
_READ_AS_A_VALUE = frozenset({"is_causal", "index_topk"})  # transformers or vLLM reads null as a value of these


@dataclass(frozen=True)
class Traits:
    """What a family computes, where config.json of other families has a key for it."""

    has_experts: bool
    qkv_bias: bool  # of every model of the family
    qk_norm: bool | None  # None: latent attention, whose norms have other names
    routing: Mapping[str, Any]  # keys of other families' routers -> values that mean this family's router


def has_no_effect(key: str, config: Mapping[str, Any], traits: Traits) -> bool:
    """Whether ``key``, which the family does not read, leaves the model of ``config`` as it is."""
    value = config[key]
    if key in WITHOUT_EFFECT or key.startswith("unsloth_"):
        return True
    if value is None:
        return key not in _READ_AS_A_VALUE
    if not traits.has_experts and key in _EXPERT_KEYS:
        return True  # a number of experts is a key of its own
    if key == "sliding_window":
        return config.get("use_sliding_window") is False
    return any(_equal(value, neutral) for neutral in neutral_values(key, config, traits))


def neutral_values(key: str, config: Mapping[str, Any], traits: Traits) -> tuple[Any, ...]:
    """The values of ``key``, beside null, that leave the model of ``config`` as it is; empty if none is known."""
    if key == "attention_bias" and traits.qkv_bias:
        return (True, False)  # transformers and vLLM always build the biases of these families
    if key in _BIASES:
        return (traits.qkv_bias,)
    if key in _QK_NORMS:
        return () if traits.qk_norm is None else (traits.qk_norm,)
    if key in _MOE_FLAGS:
        return (traits.has_experts,)
    if key in traits.routing:
        return (traits.routing[key],)
    if key in _OFF:
        return () if traits.qkv_bias and key in ("use_bias", "bias") else (False,)
    if key in _ON:
        return () if traits.qkv_bias and key == "no_bias" else (True,)
    if key in _NONE:
        return (0, [], {})
    if key in _ONE:
        return (1,)
    other = _other_names(config).get(key)
    if other is not None:
        return (other,)
    return next((values for keys, values in _NAMES.items() if key in keys.split()), ())


def _other_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Other names of what config.json says, with the same value."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    width = config.get("head_dim")
    if width is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        width = hidden // heads
    scale = width**-0.5 if isinstance(width, int) and width > 0 else None
    same = {
        "attention_multiplier": scale,
        "kv_channels head_size attention_head_dim query_pre_attn_scalar": width,
        "norm_eps layer_norm_eps layer_norm_epsilon": config.get("rms_norm_eps"),
        "rope_base rotary_base rotary_emb_base": config.get("rope_theta"),
        "n_layer n_layers num_layers": config.get("num_hidden_layers"),
        "n_head n_heads num_heads": heads,
        "n_embd d_model dim": hidden,
        "num_kv_heads n_kv_heads": config.get("num_key_value_heads"),
        "tie_embeddings share_embeddings tie_lm_head": config.get("tie_word_embeddings", False),
    }
    return {name: value for names, value in same.items() for name in names.split()}


def _equal(value: Any, neutral: Any) -> bool:
    """Whether a value means ``neutral``; false means 0, but true does not mean 1, which may be a number of layers."""
    return value == neutral and (value is False or (value is True) == (neutral is True))
