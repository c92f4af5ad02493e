"""Models and layouts of the tests of publications, and what save_hf writes: a checkpoint that is the policy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.config import (
    MlaConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
)
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names import registry as names
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.types import PublishReport
from megatron_fp8rl.weight_sync.digest import combine, digests, widened
from tests.helpers.dist import run_ranks
from tests.helpers.training import full_weights, weight_pieces

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
        family="deepseek_v3", ffn_hidden_size=256, num_experts=4, experts_per_token=2, moe_ffn_hidden_size=128,
        num_shared_experts=2, first_dense_layers=1, head_dim=64, **_COMMON | dict(num_layers=3, num_key_value_heads=4),
        mla=MlaConfig(q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
        router=RouterConfig(score="sigmoid", correction_bias=True),
    ),
}
ENGINE_TENSOR = {"dense": 1, "tied": 1, "moe": 2, "latent": 1}
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
    """Edge layers in BF16; more than one round."""
    return RunConfig(
        name="export",
        model=MODELS[kind],
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(bf16_last_layers=1),
        rollout=RolloutConfig(tensor=ENGINE_TENSOR[kind], bucket_bytes=200_000, update_deadline_s=60.0),
    )


def digests_of(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """As an engine worker takes them."""
    return dict(zip(held, digests(map(widened, held.values()))))


def report_of(rank: int, version: int | None, held: dict[str, str]) -> dict:
    """Of an engine worker."""
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
    return replace(report, seconds=0, pause_s=0, pack_s=0, send_s=0, load_s=0, verify_s=0)


def expected_wire(cfg: RunConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What full Megatron weights have to become on the wire, tensor by tensor."""
    table = LayerTable.build(cfg.model, cfg.precision)
    wire = {}
    for name in names.weights(cfg.model):
        for hf_name, tensor in names.to_hf(name, weights[name], cfg.model):
            if table.rollout_fp8(hf_name):
                wire[hf_name], wire[f"{hf_name}_scale_inv"] = quantize_weight(tensor, cfg.precision.scales)
            else:
                wire[hf_name] = tensor
    return wire


def save(kind: str, layout: dict[str, int], folder: Path, tokenizer: Path):
    """Runs on a rank: save twice over, in shards and whole; this rank's pieces of the weights."""
    from megatron_fp8rl.weight_sync.save_hf import save_hf

    policy = build(config(kind, layout))
    save_hf(policy, folder / "sharded", tokenizer, max_shard_bytes=300_000)
    for _ in range(2):  # the second replaces the first
        save_hf(policy, folder / "whole", tokenizer)
    return weight_pieces(policy)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", dict(world_size=2, pipeline=2)), ("moe", dict(world_size=2, tensor=2, expert=2))],
    ids=layout_name,
)
def test_saved_checkpoint_is_the_policy(kind, layout, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_fp8rl.data.tokenizer import character_tokenizer

    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    ranks = run_ranks(2, save, kind, layout, tmp_path, tmp_path / "tokenizer")
    model = MODELS[kind]
    weights = full_weights(model, ranks) if kind == "moe" else None
    logits = []
    for name in ("sharded", "whole"):
        folder = tmp_path / name
        assert names.from_hf_config(json.loads((folder / "config.json").read_text())) == replace(model, hf_path=None)
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            logits.append(loaded(torch.arange(3, 40)[None]).logits)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("12+3", add_special_tokens=False)) == "12+3"
        assert loaded.config.eos_token_id == tokenizer.eos_token_id
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 1
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    assert torch.equal(*logits) and logits[0].isfinite().all()
    assert not list(tmp_path.glob(".*"))  # nothing partial is left
    if weights is not None:
        down = loaded.model.layers[2].mlp.experts.down_proj[3]
        assert torch.equal(down, weights["decoder.layers.2.mlp.experts.3.linear_fc2.weight"])
        gate_up = loaded.model.layers[2].mlp.experts.gate_up_proj[3]
        assert torch.equal(gate_up, weights["decoder.layers.2.mlp.experts.3.linear_fc1.weight"])
