"""Small configurations of families that the shared engine is not of."""

from dataclasses import replace

from megatron_fp8rl.config import GdnConfig, MlaConfig, RopeScaling, RouterConfig
from tests.helpers.models import small_model

LLAMA = small_model(
    (2, 128, 4, 2, 64, 97),  # vLLM pads the vocabulary to 128
    ffn=256,
    family="llama",
    rope_theta=10_000.0,
    rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16),
)
MIXTRAL = replace(
    LLAMA,
    family="mixtral",
    rope_scaling=None,
    ffn_hidden_size=0,
    num_experts=6,
    experts_per_token=2,
    moe_ffn_hidden_size=128,
)
OLMO2 = replace(
    LLAMA, family="olmo2", hidden_size=256, num_key_value_heads=4, rope_scaling=None, qk_norm=True, vocab_size=128
)
_WINDOWS = dict(sliding_window=8, layer_types=("sliding_attention", "full_attention"))
OLMO3 = replace(OLMO2, family="olmo3", rope_theta=5e5, local_rope_theta=1e4, **_WINDOWS)
GEMMA3 = replace(
    OLMO3, family="gemma3_text", hidden_size=128, query_pre_attn_scalar=48, tie_embeddings=True, ffn_hidden_size=512
)
GLM = replace(
    MIXTRAL,
    family="glm4_moe",
    ffn_hidden_size=256,
    num_shared_experts=1,
    first_dense_layers=1,
    qkv_bias=True,
    qk_norm=True,
    rotary_fraction=0.5,
    router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=2.5),
)
DEEPSEEK = replace(
    GLM,
    family="deepseek_v3",
    num_key_value_heads=4,
    head_dim=96,
    qkv_bias=False,
    qk_norm=False,
    rotary_fraction=1.0,
    # vLLM takes the product of the first two numbers for the longest sequence.
    rope_scaling=RopeScaling(
        kind="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7
    ),
    mla=MlaConfig(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    router=RouterConfig(score="sigmoid", correction_bias=True, num_groups=3, groups_per_token=1, scaling_factor=2.5),
)
GPT_OSS = replace(
    MIXTRAL,
    family="gpt_oss",
    num_layers=3,
    qkv_bias=True,
    norm_eps=1e-5,
    sliding_window=8,
    layer_types=("sliding_attention", "full_attention"),
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
)
GLM_LITE = replace(
    DEEPSEEK,
    family="glm4_moe_lite",
    rope_scaling=None,
    router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=1.8),
)
MINIMAX = replace(
    MIXTRAL,
    family="minimax_m2",
    qk_norm=True,
    rotary_fraction=0.5,
    experts_per_token=3,
    router=RouterConfig(score="sigmoid", correction_bias=True),
)
PHI3 = replace(
    LLAMA,
    family="phi3",
    hidden_size=256,
    tie_embeddings=True,
    rotary_fraction=0.75,
    max_position_embeddings=8192,
    # Engines and trainers of a run take one list; the lengths of runs here are below 4096.
    rope_scaling=RopeScaling(
        kind="longrope",
        factor=2.0,
        original_max_position_embeddings=4096,
        short_factor=tuple(1 + 0.04 * i for i in range(24)),
        long_factor=tuple(1 + 0.7 * i for i in range(24)),
    ),
)
PHI3_LONG = replace(  # every prompt is longer than the original length, so that transformers takes the long list too
    PHI3, rope_scaling=replace(PHI3.rope_scaling, factor=2048.0, original_max_position_embeddings=4)
)
QWEN3_NEXT = replace(
    MIXTRAL,
    family="qwen3_next",
    experts_per_token=3,
    qk_norm=True,
    rotary_fraction=0.25,
    num_shared_experts=1,
    layer_types=("linear_attention", "full_attention"),
    gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=32),
)
# The engine stacks queries, keys, values and gates, each of whole blocks.
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    family="qwen3_5_moe_text",
    gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=32),
)
QWEN3_5 = replace(
    LLAMA,
    family="qwen3_5_text",
    rope_scaling=None,
    qk_norm=True,
    rotary_fraction=0.25,
    tie_embeddings=True,
    layer_types=QWEN3_NEXT.layer_types,
    gdn=QWEN3_5_MOE.gdn,
)
