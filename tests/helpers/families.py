"""A small model of every family, with sizes that nothing has in common."""

from dataclasses import replace

from megatron_fp8rl.config import GdnConfig, MlaConfig, ModelConfig, RopeScaling, RouterConfig
from megatron_fp8rl.names import registry

# Three layers, an odd vocabulary, heads unrelated to the hidden size.
_COMMON = dict(
    num_layers=3,
    hidden_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=20,
    vocab_size=131,
    ffn_hidden_size=56,
    max_position_embeddings=64,
)
_WINDOWS = dict(sliding_window=6, layer_types=("sliding_attention", "full_attention"))
_DELTA_NETS: dict = dict(  # gated delta nets beside gated attention
    qk_norm=True,
    rotary_fraction=0.4,
    gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=12, value_head_dim=10),
    layer_types=("linear_attention", "full_attention"),
)
_MOE = dict(num_experts=6, experts_per_token=3, moe_ffn_hidden_size=24)
_DEEPSEEK = _COMMON | _MOE | dict(family="deepseek_v3", num_key_value_heads=4, num_shared_experts=2)


def fits(model: ModelConfig, layout: dict) -> bool:
    """Whether a layout of the trainer divides the model; ranks that divide an expert cannot share its bias."""
    degrees = {"expert", "expert_tensor"} & set(layout)
    if model.has("gdn") and "context" in layout:
        return False
    return not degrees or (model.is_moe and not ("expert_tensor" in degrees and registry.has_biases(model)))


_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3)
_LONGROPE = RopeScaling(
    kind="longrope",
    factor=2.0,
    original_max_position_embeddings=4096,
    short_factor=(1.0, 1.1, 1.2, 1.4, 1.7, 2.0),
    long_factor=(1.0, 1.5, 3.0, 5.0, 8.0, 16.0),
)
MODELS = {
    "llama": ModelConfig(
        family="llama",
        rope_theta=1e4,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16),
        **_COMMON | dict(num_key_value_heads=1, tie_embeddings=True),
    ),
    # Sequences are longer than the 16 or 8 original positions.
    "mistral": ModelConfig(
        family="mistral",
        rope_theta=1e4,
        sliding_window=12,
        rope_scaling=RopeScaling(kind="linear", factor=4.0, original_max_position_embeddings=16),
        **_COMMON | dict(max_position_embeddings=16),
    ),
    "qwen2": ModelConfig(
        family="qwen2",
        qkv_bias=True,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16),
        **_COMMON | dict(max_position_embeddings=20),
    ),
    "qwen2-one-group": ModelConfig(
        family="qwen2",
        qkv_bias=True,
        rope_theta=1e4,
        rope_scaling=RopeScaling(
            kind="yarn", factor=8.0, original_max_position_embeddings=8, attention_factor=1.4, truncate=False
        ),
        **_COMMON | dict(num_key_value_heads=1),
    ),
    "mixtral": ModelConfig(family="mixtral", **_COMMON | _MOE | dict(ffn_hidden_size=0)),
    "glm4_moe": ModelConfig(
        family="glm4_moe",
        qkv_bias=True,
        qk_norm=True,
        rotary_fraction=0.5,
        num_shared_experts=1,
        first_dense_layers=1,
        router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=1.7),
        **_COMMON | _MOE,
    ),
    "olmo2": ModelConfig(family="olmo2", **_COMMON),
    # Only layers without a window scale positions.
    "olmo3": ModelConfig(
        family="olmo3",
        rope_theta=1e4,
        local_rope_theta=5e5,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2),
        **_WINDOWS,
        **_COMMON,
    ),
    "gemma3_text": ModelConfig(
        family="gemma3_text",
        rope_theta=1e6,
        local_rope_theta=1e4,
        query_pre_attn_scalar=24,
        rope_scaling=RopeScaling(kind="linear", factor=4.0, original_max_position_embeddings=64),
        **_WINDOWS,
        **_COMMON | dict(tie_embeddings=True, hidden_size=64),  # its root needs no rounding to BF16
    ),
    # The trainer takes the list that transformers takes for each sequence: runs here have at most 4096 tokens.
    "phi3": ModelConfig(
        family="phi3",
        rotary_fraction=0.6,
        rope_theta=1e4,
        rope_scaling=_LONGROPE,
        sliding_window=12,
        **_COMMON | dict(hidden_size=80, num_key_value_heads=1, max_position_embeddings=8192),
    ),
    "phi3-long": ModelConfig(
        family="phi3",
        rotary_fraction=0.6,
        rope_theta=1e4,
        rope_scaling=replace(_LONGROPE, factor=4096.0, original_max_position_embeddings=2, attention_factor=1.3),
        **_COMMON | dict(hidden_size=80, tie_embeddings=True, max_position_embeddings=64),
    ),
    "minimax_m2": ModelConfig(
        family="minimax_m2",
        qk_norm=True,
        rotary_fraction=0.4,
        router=RouterConfig(score="sigmoid", correction_bias=True),
        **_COMMON | _MOE | dict(ffn_hidden_size=0),
    ),
    "gpt_oss": ModelConfig(
        family="gpt_oss",
        qkv_bias=True,
        norm_eps=1e-5,
        sliding_window=9,
        layer_types=("sliding_attention", "full_attention"),
        rope_theta=1e4,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        **_COMMON | _MOE | dict(ffn_hidden_size=0),
    ),
    "glm4_moe_lite": ModelConfig(
        mla=MlaConfig(q_lora_rank=28, kv_lora_rank=36, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=22),
        first_dense_layers=2,
        router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=1.8),
        **_DEEPSEEK | dict(family="glm4_moe_lite", head_dim=20),
    ),
    "qwen3_next": ModelConfig(
        family="qwen3_next",
        num_shared_experts=2,
        **_COMMON | _DELTA_NETS | _MOE,
    ),
    "qwen3_5_moe": ModelConfig(
        family="qwen3_5_moe_text",
        num_shared_experts=2,
        **_COMMON | _DELTA_NETS | _MOE | dict(ffn_hidden_size=0),
    ),
    "qwen3_5": ModelConfig(
        family="qwen3_5_text",
        **_COMMON | _DELTA_NETS | dict(tie_embeddings=True),
    ),
    # Yarn, latent queries, values larger than keys, and groups of which two are chosen for three experts.
    "deepseek_v3": ModelConfig(
        rope_scaling=_YARN,
        rope_theta=1e4,
        mla=MlaConfig(q_lora_rank=28, kv_lora_rank=36, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=22),
        first_dense_layers=1,
        router=RouterConfig(
            score="sigmoid", correction_bias=True, num_groups=3, groups_per_token=2, scaling_factor=2.5
        ),
        **_DEEPSEEK | dict(head_dim=20),
    ),
    "deepseek_v3-direct-queries": ModelConfig(
        rope_theta=1e4,
        mla=MlaConfig(q_lora_rank=None, kv_lora_rank=18, qk_nope_head_dim=6, qk_rope_head_dim=10, v_head_dim=14),
        first_dense_layers=2,
        router=RouterConfig(score="sigmoid", correction_bias=True, normalize=False),
        **_DEEPSEEK | dict(head_dim=16, tie_embeddings=True),
    ),
}
