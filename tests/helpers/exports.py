"""Policies of several layouts and in-memory engines that receive their weights."""

import asyncio
from dataclasses import replace

import torch

from megatron_fp8rl.config import (
    EngineConfig,
    MlaConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    WeightSyncConfig,
)
from megatron_fp8rl.names import registry as names
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.quantizers import quantize
from megatron_fp8rl.types import PublishReport
from megatron_fp8rl.weight_sync.digest import combine, digests, widened
from tests.helpers.hf_parts import to_hf

_COMMON = dict(num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=62)
# Tensor parallel 2 leaves a rank of the dense models 128 query rows (quantized there), 64 key rows and 192 feed-forward
# rows (gathered first). The MoE model goes to an engine that is tensor parallel itself, so its parts fill blocks.
MODELS = {
    "dense": ModelConfig(family="qwen3", ffn_hidden_size=384, head_dim=64, **_COMMON),
    "tied": ModelConfig(family="qwen3", ffn_hidden_size=384, head_dim=64, tie_embeddings=True, **_COMMON),
    "moe": ModelConfig(
        family="qwen3_moe", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=256, head_dim=128, **_COMMON
    ),
    # 96 rows of kv_a_proj_with_mqa fill a part of a block; tensor parallel 2 leaves 64 columns of o_proj.
    "latent": ModelConfig(
        family="deepseek_v3",
        ffn_hidden_size=256,
        num_experts=4,
        experts_per_token=2,
        moe_ffn_hidden_size=128,
        num_shared_experts=2,
        first_dense_layers=1,
        head_dim=64,
        **_COMMON | dict(num_layers=3, num_key_value_heads=4),
        mla=MlaConfig(q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
        router=RouterConfig(score="sigmoid", correction_bias=True),
    ),
}
# Sizes that blocks of 128 do not tile; tensor parallel 2 leaves 32 columns of down_proj.
MODELS["mxfp8"] = replace(MODELS["moe"], hidden_size=96, moe_ffn_hidden_size=64, head_dim=32)
ENGINE_TENSOR = {"dense": 1, "tied": 1, "moe": 2, "latent": 1, "mxfp8": 2}
LAYOUTS = [
    ("dense", dict(world_size=2, tensor=2)),
    ("dense", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("tied", dict(world_size=2, pipeline=2)),
    ("tied", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=2, expert=2)),
    ("moe", dict(world_size=2, tensor=2, expert_tensor=2)),
    ("moe", dict(world_size=2, pipeline=2)),
    ("moe", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("moe", dict(world_size=2, context=2)),
    ("moe", dict(world_size=2)),
    ("moe", dict(world_size=2, tensor=2, expert=2)),
    ("moe", dict(world_size=4, tensor=2, pipeline=2, expert=2)),
    ("latent", dict(world_size=2, pipeline=2)),
    ("latent", dict(world_size=2, tensor=2, expert=2)),
]


def config(kind: str, layout: dict[str, int]) -> RunConfig:
    """BF16 in the last layer; more than one round."""
    return RunConfig(
        name="export",
        model=MODELS[kind],
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(
            bf16_last_layers=1, **dict.fromkeys(("trainer", "rollout"), "mxfp8" if kind == "mxfp8" else "blockwise")
        ),
        engine=EngineConfig(tensor=ENGINE_TENSOR[kind], deadline_scale=0.2),
        weight_sync=WeightSyncConfig(bucket_bytes=200_000),
    )


def digests_of(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests as an engine worker computes them."""
    return dict(zip(held, digests(map(widened, held.values()))))


def report_of(rank: int, version: int | None, held: dict[str, str]) -> dict:
    return {"rank": rank, "version": version, "combined": combine(held), "digests": held}


class Fleet:
    def __init__(self, *replicas):
        self.clients = replicas

    def begin_update(self):
        return self.clients

    def has_lost_replica(self, clients):
        return False

    def sync(self, coroutine, deadline_s):
        return asyncio.run(asyncio.wait_for(coroutine, deadline_s))


def build(cfg: RunConfig):
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def layout_name(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{key}{n}" for key, n in value.items())


def timeless(report: PublishReport) -> PublishReport:
    return replace(report, seconds=0, pause_s=0, connect_s=0, prepare_s=0, pack_s=0, send_s=0, load_s=0, verify_s=0)


def expected_wire(cfg: RunConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The expected wire tensors of full Megatron weights."""
    table = LayerTable.build(cfg.model, cfg.precision)
    wire = {}
    for name in names.weights(cfg.model):
        for hf_name, tensor in to_hf(name, weights[name], cfg.model):
            fmt = table.rollout_format(hf_name)
            if fmt.is_quantized:
                wire[hf_name], wire[fmt.scale_name(hf_name)] = quantize(tensor, fmt)
            else:
                wire[hf_name] = tensor
    return wire
