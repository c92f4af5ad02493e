"""From shard to shard between GPUs: several trainer layouts, engines with and without expert parallelism, NCCL and IPC.

Trainer ranks have the first GPUs, engines of both kinds those behind them. For every layout three publications are
proven by digest, the first of them against vLLM's own loaders; the log-probabilities after the last equal those after a
reload of the same weights and a comparison with it, by way of files. Run with -s for the reports.
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_fp8rl.config import ParallelConfig, RunConfig
from tests.helpers.dist import run_ranks
from tests.helpers.fields import set_fields
from tests.helpers.sampling import sample_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]

PROMPTS = [list(range(20, 20 + n)) for n in (5, 17, 24)]
LAYOUTS = {
    1: [dict()],
    2: [
        dict(tensor=2),
        dict(tensor=2, expert=2),
        dict(tensor=2, expert_tensor=2),
        dict(expert=2),
        dict(pipeline=2),
        dict(),  # data parallel: the two share the work
    ],
}
SAME_LOGPROB = 1e-5  # tensor-parallel sums of the same numbers


def _cfg(num_trainers: int, engine: dict[str, int]) -> RunConfig:
    from model_configs import tiny

    cfg = tiny.tiny_qwen3_moe()
    cfg = replace(cfg, precision=replace(cfg.precision, exact=False))
    model = replace(
        cfg.model,
        hidden_size=512,
        head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_ffn_hidden_size=512,
        max_position_embeddings=512,
    )
    cfg = set_fields(
        cfg,
        max_prompt_tokens=64,
        max_completion_tokens=32,
        max_num_sequences=8,
        graphs="plain",
        kv_cache_bytes=256 << 20,
        gpu_memory_utilization=0.2,
        deadline_scale=0.2,
        bucket_bytes=2 << 20,
        placement="separate",
        record_routed_experts=False,
        **engine,
    )
    name = f"publish_ep{engine.get('expert', 1)}"
    return replace(cfg, name=name, model=model, parallel=ParallelConfig(world_size=num_trainers))


def _place(layout: dict[str, int], rank: int, world_size: int) -> SimpleNamespace:
    """This rank in a layout, in Megatron's rank order, as the exporter needs it."""
    parallel = ParallelConfig(world_size=world_size, **layout)
    local = rank % (world_size // parallel.pipeline)
    return SimpleNamespace(
        rank=rank,
        world_size=world_size,
        device=torch.device("cuda", rank),
        pp_rank=rank // (world_size // parallel.pipeline),
        tp_size=parallel.tensor,
        tp_rank=local % parallel.tensor,
        etp_size=parallel.expert_tensor,
        etp_rank=local % parallel.expert_tensor,
        ep_rank=local // parallel.expert_tensor % parallel.expert,
    )


def _publish_all(num_trainers: int, engines: list[dict[str, int]]) -> list[str]:
    """Runs on a trainer rank: a line for each combination."""
    from benchmarks.light_policy import light_policy
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.weight_sync.publish import WeightExporter
    from tests.e2e.engine_weights import write_hf_dir

    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(num_trainers)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    configs = [_cfg(num_trainers, engine) for engine in engines]
    fleets = [None] * len(configs)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            if rank == 0:
                for i, cfg in enumerate(configs):
                    run = Path(folder) / str(i)
                    fleets[i] = Fleet.start(cfg, write_hf_dir(cfg, run / "hf"), run, wait=False)
                for fleet in fleets:
                    fleet.wait_until_ready()
            dist.barrier()
            for base, fleet in zip(configs, fleets):
                for layout in LAYOUTS[num_trainers]:
                    for transport in ("nccl", "ipc"):
                        cfg = replace(
                            base,
                            parallel=ParallelConfig(world_size=num_trainers, **layout),
                            weight_sync=replace(base.weight_sync, transport=transport),
                        )
                        policy = light_policy(cfg, _place(layout, rank, num_trainers))
                        lines.append(_compare(cfg, policy, fleet, layout, WeightExporter))
        finally:
            for fleet in fleets:
                if fleet is not None:
                    fleet.shutdown()
    return lines


def _compare(cfg: RunConfig, policy, fleet, layout, exporter_class) -> str:
    started = time.monotonic()
    exporter = exporter_class(policy, fleet, cfg)
    for version in (1, 2, 3):
        torch._foreach_mul_(list(policy.tensors.values()), -0.93)
        report = exporter.publish(version)
    exporter.close()
    direct = sample_prompts(fleet, PROMPTS) if fleet is not None else []
    by_host = replace(cfg, weight_sync=replace(cfg.weight_sync, transport="gloo"))  # reloads and compares first
    exporter = exporter_class(policy, fleet, by_host)
    expected = exporter.publish(4)
    exporter.close()
    assert report.checksum == expected.checksum
    worst = 0.0
    for a, b in zip(direct, sample_prompts(fleet, PROMPTS) if fleet is not None else [], strict=True):
        assert a.token_ids == b.token_ids, (cfg.weight_sync.transport, layout)
        worst = max([worst, *(abs(x - y) for x, y in zip(a.rollout_logprobs, b.rollout_logprobs, strict=True))])
    assert worst <= SAME_LOGPROB, (cfg.weight_sync.transport, layout, worst)
    return (
        f"{cfg.weight_sync.transport} {layout} -> engine tensor {cfg.engine.tensor} expert {cfg.engine.expert}: max "
        f"difference {worst:.1e}, {time.monotonic() - started:.1f} s, publication {report.seconds:.3f} s"
    )


def test_one_trainer_to_one_engine():
    lines = run_ranks(1, _publish_all, 1, [dict(tensor=1)], deadline_s=115)[0]
    print("\n" + "\n".join(lines))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
def test_two_trainers_to_engines_of_two():
    lines = run_ranks(2, _publish_all, 2, [dict(tensor=2), dict(tensor=2, expert=2)], deadline_s=240)[0]
    print("\n" + "\n".join(lines))
