"""Small models for tests."""

from dataclasses import replace

from megatron_fp8rl.config import MlaConfig, ModelConfig, RouterConfig


def small_model(
    shape: tuple[int, int, int, int, int, int],
    *,
    ffn: int = 0,
    experts: tuple[int, int, int] = (0, 0, 0),
    family: str = "",
    **fields,
) -> ModelConfig:
    """A model of the family ``qwen3``, or ``qwen3_moe`` if it has experts.

    Args:
        shape: layers, hidden size, query heads, key-value heads, head dimension, vocabulary.
        ffn: width of dense feed-forward layers.
        experts: number of experts, experts per token, width of an expert.
        fields: further fields of ``ModelConfig``.
    """
    layers, hidden, heads, groups, head_dim, vocab = shape
    return ModelConfig(
        family=family or ("qwen3_moe" if experts[0] else "qwen3"),
        **dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=groups),
        **dict(head_dim=head_dim, vocab_size=vocab, ffn_hidden_size=ffn),
        **dict(num_experts=experts[0], experts_per_token=experts[1], moe_ffn_hidden_size=experts[2]),
        **fields,
    )


def latent(moe: ModelConfig) -> ModelConfig:
    """DeepSeek-V3 from a mixture. Its kv_a_proj_with_mqa has 192 rows: the last block is cut short."""
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    router = RouterConfig(score="sigmoid", correction_bias=True)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 192, "mla": mla}
    experts = {"num_shared_experts": 1, "first_dense_layers": 1, "ffn_hidden_size": 256, "router": router}
    return replace(moe, family="deepseek_v3", **heads, **experts)
