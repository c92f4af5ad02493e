"""Dense models on one GPU and on one node. Dimensions are those of the published config.json files.

Trainer and engines alternate on the same GPUs. The state of larger models waits in host memory.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import ModelConfig, OptimConfig, ParallelConfig, RopeScaling, RunConfig
from model_configs import base
from model_configs.qwen3 import qwen3_8b

_FIVE_WINDOWS_OF_SIX = ("sliding_attention",) * 5 + ("full_attention",)


def qwen3_0_6b() -> ModelConfig:
    """Qwen/Qwen3-0.6B."""
    return replace(qwen3_1_7b(), hidden_size=1024, ffn_hidden_size=3072)


def qwen3_1_7b() -> ModelConfig:
    """Qwen/Qwen3-1.7B."""
    return replace(
        qwen3_8b(), num_layers=28, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=6144, tie_embeddings=True
    )


def qwen3_4b() -> ModelConfig:
    """Qwen/Qwen3-4B."""
    return replace(qwen3_8b(), hidden_size=2560, ffn_hidden_size=9728, tie_embeddings=True)


def qwen3_14b() -> ModelConfig:
    """Qwen/Qwen3-14B."""
    return replace(qwen3_8b(), num_layers=40, hidden_size=5120, num_attention_heads=40, ffn_hidden_size=17408)


def qwen3_32b() -> ModelConfig:
    """Qwen/Qwen3-32B."""
    return replace(qwen3_8b(), num_layers=64, hidden_size=5120, num_attention_heads=64, ffn_hidden_size=25600)


def qwen25_7b() -> ModelConfig:
    """Qwen/Qwen2.5-7B."""
    return ModelConfig(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=152064,
        ffn_hidden_size=18944,
        qkv_bias=True,
        max_position_embeddings=131072,
    )


def olmo2_7b() -> ModelConfig:
    """allenai/OLMo-2-1124-7B."""
    return ModelConfig(
        family="olmo2",
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        vocab_size=100352,
        ffn_hidden_size=11008,
        rope_theta=500_000.0,
        max_position_embeddings=4096,
    )


def olmo3_7b() -> ModelConfig:
    """allenai/Olmo-3-1025-7B."""
    return replace(
        olmo2_7b(),
        family="olmo3",
        vocab_size=100278,
        sliding_window=4096,
        layer_types=("sliding_attention",) * 3 + ("full_attention",),
        local_rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            kind="yarn", factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836
        ),
        max_position_embeddings=65536,
    )


def gemma3_1b() -> ModelConfig:
    """google/gemma-3-1b-it."""
    return ModelConfig(
        family="gemma3_text",
        num_layers=26,
        hidden_size=1152,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        ffn_hidden_size=6912,
        sliding_window=512,
        layer_types=_FIVE_WINDOWS_OF_SIX,
        local_rope_theta=10_000.0,
        query_pre_attn_scalar=256,
        tie_embeddings=True,
        max_position_embeddings=32768,
    )


def gemma3_4b() -> ModelConfig:
    """google/gemma-3-4b-it, its text part."""
    return replace(
        gemma3_1b(),
        num_layers=34,
        hidden_size=2560,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=262208,
        ffn_hidden_size=10240,
        sliding_window=1024,
        layer_types=_FIVE_WINDOWS_OF_SIX,
        rope_scaling=RopeScaling(kind="linear", factor=8.0, original_max_position_embeddings=131072),
        max_position_embeddings=131072,
    )


def gemma3_12b() -> ModelConfig:
    """google/gemma-3-12b-it, its text part."""
    return replace(
        gemma3_4b(),
        num_layers=48,
        hidden_size=3840,
        num_attention_heads=16,
        num_key_value_heads=8,
        ffn_hidden_size=15360,
        layer_types=_FIVE_WINDOWS_OF_SIX,
    )


def gemma3_27b() -> ModelConfig:
    """google/gemma-3-27b-it, its text part."""
    return replace(
        gemma3_4b(),
        num_layers=62,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=168,
        ffn_hidden_size=21504,
        layer_types=_FIVE_WINDOWS_OF_SIX,
    )


def phi4_mini() -> ModelConfig:
    """microsoft/Phi-4-mini-instruct."""
    long_factor = [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649]
    long_factor += [2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845]
    long_factor += [5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158]
    long_factor += [11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105]
    long_factor += [25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71]
    long_factor += [32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]
    return ModelConfig(
        family="phi3",
        num_layers=32,
        hidden_size=3072,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=200064,
        ffn_hidden_size=8192,
        rotary_fraction=0.75,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(
            kind="longrope",
            factor=32.0,
            original_max_position_embeddings=4096,
            short_factor=(1.0,) * 48,
            long_factor=tuple(long_factor),
        ),
        norm_eps=1e-5,
        tie_embeddings=True,
        max_position_embeddings=131072,
    )


def _shared(name: str, model: ModelConfig, parallel: ParallelConfig, optim: OptimConfig) -> RunConfig:
    """A run whose GPUs train and sample in turns, with an engine on each."""
    cfg = base.grpo(name, model, parallel=parallel, engine=base.engines(1), optim=optim)
    return base.colocated(cfg, name, parallel=parallel)


def grpo_qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on 1 H100."""
    return _shared("grpo_qwen3_0_6b", qwen3_0_6b(), ParallelConfig(world_size=1), base.optim("none"))


def grpo_qwen3_1_7b() -> RunConfig:
    """Qwen3-1.7B on 1 H100."""
    return _shared("grpo_qwen3_1_7b", qwen3_1_7b(), ParallelConfig(world_size=1), base.optim("none"))


def grpo_qwen3_4b_h200() -> RunConfig:
    """Qwen3-4B on 1 H200."""
    return _shared("grpo_qwen3_4b_h200", qwen3_4b(), ParallelConfig(world_size=1), base.optim("none"))


def grpo_qwen3_4b() -> RunConfig:
    """Qwen3-4B on 8 H100."""
    return _shared("grpo_qwen3_4b", qwen3_4b(), ParallelConfig(world_size=8), base.optim("none"))


def grpo_qwen25_7b() -> RunConfig:
    """Qwen2.5-7B on 8 H100 (PP2)."""
    return _shared("grpo_qwen25_7b", qwen25_7b(), ParallelConfig(world_size=8, pipeline=2), base.optim("none"))


def grpo_olmo2_7b() -> RunConfig:
    """OLMo-2-7B on 8 H200 (PP2)."""
    cfg = _shared("grpo_olmo2_7b", olmo2_7b(), ParallelConfig(world_size=8, pipeline=2), base.optim("selective"))
    return replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=3072))


def grpo_olmo3_7b() -> RunConfig:
    """OLMo-3-7B on 8 H200 (PP2)."""
    cfg = _shared("grpo_olmo3_7b", olmo3_7b(), ParallelConfig(world_size=8, pipeline=2), base.optim("selective"))
    return replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=4096))


def grpo_gemma3_1b() -> RunConfig:
    """Gemma-3-1B on 1 H100."""
    return _shared("grpo_gemma3_1b", gemma3_1b(), ParallelConfig(world_size=1), base.optim("none"))


def grpo_gemma3_4b() -> RunConfig:
    """Gemma-3-4B, text, on 1 H200."""
    return _shared("grpo_gemma3_4b", gemma3_4b(), ParallelConfig(world_size=1), base.optim("none"))


def grpo_gemma3_12b() -> RunConfig:
    """Gemma-3-12B, text, on 8 H200 (PP2)."""
    parallel = ParallelConfig(world_size=8, pipeline=2)
    return _shared("grpo_gemma3_12b", gemma3_12b(), parallel, base.optim("selective"))


def grpo_gemma3_27b() -> RunConfig:
    """Gemma-3-27B, text, on 8 H200 (TP2 PP2)."""
    parallel = ParallelConfig(world_size=8, tensor=2, pipeline=2)
    cfg = _shared("grpo_gemma3_27b", gemma3_27b(), parallel, base.optim("full"))
    return replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=4096))


def grpo_phi4_mini() -> RunConfig:
    """Phi-4-mini on 1 H200; 4,096 tokens of a sequence are the most for the short list of longrope."""
    cfg = _shared("grpo_phi4_mini", phi4_mini(), ParallelConfig(world_size=1), base.optim("none"))
    return replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=3072))


def grpo_qwen3_8b_h100() -> RunConfig:
    """Qwen3-8B on 8 H100 (PP2)."""
    return _shared("grpo_qwen3_8b_h100", qwen3_8b(), ParallelConfig(world_size=8, pipeline=2), base.optim("selective"))


def grpo_qwen3_14b() -> RunConfig:
    """Qwen3-14B on 8 H100 (PP4)."""
    return _shared("grpo_qwen3_14b", qwen3_14b(), ParallelConfig(world_size=8, pipeline=4), base.optim("full"))


def grpo_qwen3_32b() -> RunConfig:
    """Qwen3-32B on 8 H200 (PP4)."""
    return _shared("grpo_qwen3_32b", qwen3_32b(), ParallelConfig(world_size=8, pipeline=4), base.optim("full"))
