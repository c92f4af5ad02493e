"""Sleeping engines on one GPU: memory goes and comes back, with CUDA graphs, and what they sample stays the same.

Two engines, dense and mixture of experts, start at once; run with -s for sizes and seconds.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ParallelConfig, RunConfig
from megatron_fp8rl.rollout.fleet import Fleet
from tests.e2e.engine_weights import write_hf_dir
from tests.helpers.sampling import sample_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

KV_BYTES = 1 << 30
PROMPTS = [list(range(20, 20 + n)) for n in (5, 17, 24)]
MIB = 1 << 20
SAME_LOGPROB = 2e-3  # a batch may be put together differently the second time


def _cfg(kind: str) -> RunConfig:
    """Wide enough for weights to show beside allocation granularity: about 110 MB in FP8."""
    from model_configs import tiny

    cfg = {"dense": tiny.tiny_qwen3, "moe": tiny.tiny_qwen3_moe}[kind]()
    cfg = replace(cfg, precision=replace(cfg.precision, exact=False))
    wide = {"dense": {"ffn_hidden_size": 8192}, "moe": {"moe_ffn_hidden_size": 1024}}[kind]
    model = replace(
        cfg.model,
        num_layers=4,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        **wide,
    )
    sampling = replace(cfg.sampling, max_prompt_tokens=64, max_completion_tokens=32)
    engine = replace(
        cfg.engine,
        max_num_sequences=8,
        graphs="plain",
        sleep_level=2,
        kv_cache_bytes=KV_BYTES,
        gpu_memory_utilization=0.3,
        deadline_scale=0.2,
    )
    return replace(cfg, name=f"sleep_{kind}", model=model, sampling=sampling, engine=engine)


@pytest.fixture(scope="module")
def fleets(tmp_path_factory) -> Iterator[dict[str, Fleet]]:
    started, running = time.monotonic(), {}
    try:
        for kind in ("dense", "moe"):
            cfg = _cfg(kind)
            hf_dir = write_hf_dir(cfg, tmp_path_factory.mktemp(f"hf_{kind}"))
            running[kind] = Fleet.start(cfg, hf_dir, tmp_path_factory.mktemp(f"run_{kind}"), wait=False)
        for fleet in running.values():
            fleet.wait_until_ready()
        print(f"\nboth engines after {time.monotonic() - started:.1f} s; {[f.kernels() for f in running.values()]}")
        yield running
    finally:
        for fleet in running.values():
            fleet.shutdown()


@pytest.fixture(scope="module")
def parallel():
    from megatron_fp8rl.trainer.parallel import Parallel

    made = Parallel.init(ParallelConfig())
    yield made
    made.close()


def _difference(before: list, after: list) -> float:
    """Largest difference of log-probabilities; infinite where other tokens were sampled."""
    if [c.token_ids for c in before] != [c.token_ids for c in after]:
        return float("inf")
    pairs = zip(before, after, strict=True)
    return max(abs(x - y) for a, b in pairs for x, y in zip(a.rollout_logprobs, b.rollout_logprobs, strict=True))


def _used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _timed(what: str, call) -> None:
    started, before = time.monotonic(), _used()
    call()
    print(f"  {what:32s} {time.monotonic() - started:6.2f} s, {(_used() - before) / MIB:+9.0f} MiB")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_sleeping_changes_memory_and_nothing_else(kind, fleets, parallel):
    from benchmarks.light_policy import light_policy
    from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    fleet = fleets[kind]
    cfg, client = fleet.cfg, fleet.clients[0]
    policy = light_policy(cfg, parallel)
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    version = 1
    print(f"\n{kind}: {fleet.kernels()}")
    try:
        exporter.publish(version)
        first = sample_prompts(fleet, PROMPTS)
        assert _difference(first, sample_prompts(fleet, PROMPTS)) < SAME_LOGPROB
        awake = _used()

        _timed("sleep 1", lambda: fleet.sync(client.sleep(1), 60.0))
        assert awake - _used() > 0.95 * KV_BYTES
        _timed("wake, no publication", fleet.wake)
        assert _difference(first, sample_prompts(fleet, PROMPTS)) < SAME_LOGPROB, "level 1 keeps weights"

        for level in (1, 2, 2):
            _timed(f"sleep {level}", lambda level=level: fleet.sync(client.sleep(level), 60.0))
            asleep = _used()
            assert awake - asleep > 0.95 * KV_BYTES
            _timed("wake weights", lambda: fleet.wake("weights"))
            assert _used() - asleep < 0.5 * KV_BYTES, "the KV cache still sleeps"
            policy.update()
            version += 1
            _timed("publish", lambda version=version: exporter.publish(version))
            _timed("wake KV cache", lambda: fleet.wake("kv_cache"))
            assert abs(_used() - awake) < 512 * MIB
            other = sample_prompts(fleet, PROMPTS)
            assert other[0].version_spans == ((0, version),)
            assert _difference(first, other) > 10 * SAME_LOGPROB, "new weights answer"
            policy.update()  # the first weights again
            version += 1
            exporter.publish(version)
            actual = _difference(first, sample_prompts(fleet, PROMPTS))
            print(f"  log-probabilities after level {level}: largest difference {actual:.2e}")
            assert actual < SAME_LOGPROB
    finally:
        exporter.close()
