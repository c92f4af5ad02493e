"""Tiny runs of the families with latent attention, for the command line."""

from dataclasses import replace

from megatron_fp8rl.config import MlaConfig, RunConfig
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.family_configs import DEEPSEEK, GLM_LITE

# Projections tile over two ranks. The one into the latent space has 192 rows: its last block is half a block.
_LATENT = MlaConfig(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)


def _run(family, **fields) -> RunConfig:
    sizes = dict(vocab_size=128, num_experts=8, moe_ffn_hidden_size=256, head_dim=128, mla=_LATENT)
    run = tiny_qwen3_moe()
    return replace(run, model=replace(family, **sizes, **fields))


def deepseek() -> RunConfig:
    return _run(DEEPSEEK, router=replace(DEEPSEEK.router, num_groups=2))


def glm_lite() -> RunConfig:
    return _run(GLM_LITE, norm_eps=1e-5)
