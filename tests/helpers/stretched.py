"""A configuration with YaRN whose sequences are longer than the original positions."""

from dataclasses import replace

from megatron_fp8rl.config import RopeScaling, RunConfig
from model_configs.tiny import tiny_qwen3_moe


def run() -> RunConfig:
    scaling = RopeScaling(
        kind="yarn", factor=32.0, original_max_position_embeddings=4, attention_factor=1.3, truncate=False
    )
    cfg = tiny_qwen3_moe()
    return replace(cfg, model=replace(cfg.model, rope_scaling=scaling))
