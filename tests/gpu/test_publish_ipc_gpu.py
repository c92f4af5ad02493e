"""Direct publications over CUDA IPC on one GPU, colocated and with CUDA graphs, against an engine that reloads.

Two engines hold the same weights all the time: one gets them from shard to shard, written into the memory that its
captured graphs read; the other by way of a file and vLLM's own loaders. Run with -s for seconds.
"""

import time
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ParallelConfig, RunConfig
from megatron_fp8rl.rollout.fleet import Fleet
from tests.e2e.engine_weights import write_hf_dir
from tests.helpers.sampling import sample_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [list(range(20, 20 + n)) for n in (5, 17, 24)]
NUM_UPDATES = 5
SAME_LOGPROB = 1e-6  # the same kernels on the same bytes in the same batches


def _cfg(kind: str, how: str) -> RunConfig:
    from model_configs import tiny

    cfg = {"dense": tiny.tiny_qwen3, "moe": tiny.tiny_qwen3_moe}[kind]()
    cfg = replace(cfg, precision=replace(cfg.precision, exact=False))
    model = replace(cfg.model, hidden_size=512, head_dim=128, max_position_embeddings=512)
    sampling = replace(cfg.sampling, max_prompt_tokens=64, max_completion_tokens=32)
    engine = replace(
        cfg.engine,
        max_num_sequences=8,
        graphs="plain",
        kv_cache_bytes=256 << 20,
        gpu_memory_utilization=0.2,
        deadline_scale=0.2,
    )
    weight_sync = replace(cfg.weight_sync, bucket_bytes=1 << 20, transport="ipc" if how == "direct" else "gloo")
    return replace(
        cfg, name=f"publish_{kind}_{how}", model=model, sampling=sampling, engine=engine, weight_sync=weight_sync
    )


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_direct_updates_equal_reloads(kind, tmp_path):
    from benchmarks.light_policy import light_policy
    from megatron_fp8rl.kernels.compat import expand_segments
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    started = time.monotonic()
    expand_segments()  # as in a trainer that offloads: memory that cannot be opened in every container
    parallel = Parallel.init(ParallelConfig())
    fleets, exporters = [], []
    try:
        for how in ("direct", "reload"):
            cfg = _cfg(kind, how)
            hf_dir = write_hf_dir(cfg, tmp_path / f"hf_{how}")
            fleets.append(Fleet.start(cfg, hf_dir, tmp_path / f"run_{how}", wait=False))
        policy = light_policy(fleets[0].cfg, parallel)
        for fleet in fleets:
            fleet.wait_until_ready()
        exporters.append(WeightExporter(policy, fleets[0], PlanInputs.of(fleets[0].cfg)))
        print(f"\n{kind}: engines after {time.monotonic() - started:.1f} s")
        seen = []
        for version in range(1, NUM_UPDATES + 1):
            # A new exporter knows no engine: it goes through vLLM's loaders first, here over gloo and the host.
            exporters.append(WeightExporter(policy, fleets[1], PlanInputs.of(fleets[1].cfg)))
            reports = [exporters[0].publish(version), exporters[-1].publish(version)]
            exporters.pop().close()
            assert reports[0].checksum == reports[1].checksum
            direct, reload = (sample_prompts(fleet, PROMPTS, temperature=1.0) for fleet in fleets)
            for a, b in zip(direct, reload, strict=True):
                assert a.token_ids == b.token_ids and a.version_spans == ((0, version),)
                pairs = zip(a.rollout_logprobs, b.rollout_logprobs, strict=True)
                assert max(abs(x - y) for x, y in pairs) <= SAME_LOGPROB
            seen.append(direct[2].rollout_logprobs)
            print(f"  {version}: {reports[0]}")
            torch._foreach_mul_(list(policy.tensors.values()), -0.93)
        assert len(set(seen)) == NUM_UPDATES, "every publication changed what is sampled"
    finally:
        for exporter in exporters:
            exporter.close()
        for fleet in fleets:
            fleet.shutdown()
        parallel.close()
