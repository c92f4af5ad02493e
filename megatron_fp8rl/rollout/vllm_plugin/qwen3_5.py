"""Qwen3.5's text models in an engine: vLLM's classes of the language models inside its models that see images.

Imports vLLM's models, so that vLLM loads this module only for such an engine.
"""

from __future__ import annotations

from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="vLLM 0.26 registers Qwen3.5 with a vision tower only, and its classes of text models name no sizes of states",
    remove_when="vLLM registers Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM",
    optional=True,
)
class WithStates(IsHybrid):
    """What vLLM asks a class with gated delta nets: the sizes of their states, which are Qwen3-Next's."""

    get_mamba_state_dtype_from_config = Qwen3NextForCausalLM.get_mamba_state_dtype_from_config
    get_mamba_state_shape_from_config = Qwen3NextForCausalLM.get_mamba_state_shape_from_config
    get_mamba_state_copy_func = Qwen3NextForCausalLM.get_mamba_state_copy_func


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, WithStates):
    """The dense text model."""


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM, WithStates):
    """The text model with experts."""
