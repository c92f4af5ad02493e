"""Runs, one file per model family: functions that return a RunConfig.

The command line names a run by its function (``tiny_qwen3_moe``, or ``package.module:function`` for a user's run) and
overrides fields. ``dataclasses.replace`` makes variants. ``doctor`` shows what a run needs.
"""

from model_configs.deepseek import grpo_deepseek_v3
from model_configs.llama import grpo_llama31_8b
from model_configs.mixtral import grpo_mixtral_8x7b
from model_configs.qwen3 import (
    grpo_qwen3_8b,
    grpo_qwen3_8b_colocated,
    grpo_qwen3_30b_a3b,
    grpo_qwen3_30b_a3b_16gpu,
    grpo_qwen3_30b_a3b_colocated,
    grpo_qwen3_235b_a22b,
)
from model_configs.tiny import tiny_qwen3, tiny_qwen3_moe

__all__ = [
    "grpo_deepseek_v3",
    "grpo_llama31_8b",
    "grpo_mixtral_8x7b",
    "grpo_qwen3_8b",
    "grpo_qwen3_8b_colocated",
    "grpo_qwen3_30b_a3b",
    "grpo_qwen3_30b_a3b_16gpu",
    "grpo_qwen3_30b_a3b_colocated",
    "grpo_qwen3_235b_a22b",
    "tiny_qwen3",
    "tiny_qwen3_moe",
]
