"""vLLM's gpt-oss with experts that are published one by one, each with its gate before its up projection.

vLLM's model reads experts of a whole layer whose gate and up rows alternate. An FP8 block of such rows would contain
both matrices, and the trainer's blocks do not. The GPU kernels of the other order are not measured yet.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.models.utils import WeightsMapper

from megatron_fp8rl.data.fused_experts import split
from megatron_fp8rl.rollout.vllm_plugin.patches import local_expert
from megatron_fp8rl.upstream import patches

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_SHARDS = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
_QKV = {f".{name}_proj.": name for name in "qkv"}


@patches(
    "vllm",
    why="replaces the loader and the order of rows of GptOssModel's experts: it reads no single experts, and no FP8 "
    "blocks but MXFP4",
    remove_when="GptOssModel reads experts one by one in block FP8",
)
def read_single_experts() -> None:
    """Make vLLM's gpt-oss read the names and layouts of a publication, and those of a checkpoint."""
    gpt_oss.GptOssForCausalLM.hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".self_attn.": ".attn."}, orig_to_new_suffix={".embed_tokens.weight": ".embedding.weight"}
    )
    gpt_oss.GptOssModel.load_weights = _load
    gpt_oss.FusedMoE = _experts
    gpt_oss.RMSNorm, gpt_oss.get_rope = _norm, _rope


def _norm(size: int, eps: float) -> nn.Module:
    """A norm with the epsilon of config.json; vLLM's model has 1e-5."""
    return RMSNorm(size, get_current_vllm_config().model_config.hf_config.rms_norm_eps)


def _rope(*args: Any, dtype: Any, rope_parameters: Any, **options: Any) -> nn.Module:
    """All of config.json's rotary embedding, with cosines in the dtype of the model, as in OpenAI's and transformers'
    code; vLLM's are FP32."""
    written = get_current_vllm_config().model_config.hf_config.rope_parameters
    return get_rope(*args, rope_parameters=written, **options)


def _experts(**options: Any) -> nn.Module:
    clamped = {"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    experts = FusedMoE(**options | clamped)
    for module in experts.modules():
        for name in ("w13_bias", "w2_bias"):
            if isinstance(bias := getattr(module, name, None), nn.Parameter):
                bias.weight_loader = _bias_loader(module)
    return experts


def _bias_loader(experts: nn.Module) -> Callable[..., None]:
    def load_bias(param: nn.Parameter, bias: Tensor, name: str, shard: str, expert: int) -> None:
        # vLLM's reload replaces the argument that is called ``param``.
        local = local_expert(experts, expert)
        if local >= 0:
            param.data[local].narrow(0, len(bias) if shard == "w3" else 0, len(bias)).copy_(bias)

    return load_bias


def _load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    parameters, loaded = dict(model.named_parameters()), set()
    for name, tensor in (part for stored in weights for part in split(*stored)):
        if match := _EXPERT.fullmatch(name):
            parent, expert, part, kind = match.groups()
            stack, shard = _SHARDS[part]
            name = f"{parent}.routed_experts.{stack}_{kind}"
            arguments: tuple[Any, ...] = (name, shard, int(expert))
        elif name.endswith(".sinks"):
            count = len(parameters[name])
            tensor, arguments = tensor.narrow(0, get_tensor_model_parallel_rank() * count, count), ()
        else:
            fused = next((part for part in _QKV if part in name), "")
            name, arguments = name.replace(fused, ".qkv_proj.") if fused else name, (_QKV[fused],) if fused else ()
        parameter = parameters[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *arguments)
        loaded.add(name)
    return loaded
