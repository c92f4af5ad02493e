"""An engine without optional patches: vLLM's scheduler, its start of processes and its inspection of models."""

from dataclasses import replace

import psutil
from engine_weights import publish, random_weights, write_hf_dir

from megatron_fp8rl import upstream
from megatron_fp8rl.rollout.fleet import Fleet

PROMPT = list(range(20, 44))
SKIPPED = "fork_engine_core,inspect_classes_in_forks,leave_out_warm_up,BufferingScheduler"


def sampled(fleet: Fleet, weights) -> list[tuple]:
    if fleet.clients[0].version != 1:
        publish(fleet, weights, 1)
    sampling = replace(fleet.clients[0].sampling, stop_token_ids=(), max_tokens=48)
    completions = fleet.sync(fleet.clients[0].generate(PROMPT, 4, 7, sampling=sampling), 240.0)
    return [(list(completion.token_ids), list(completion.rollout_logprobs)) for completion in completions]


def test_an_engine_without_optional_patches_samples_the_same(fleet, engine_cfg, tmp_path, monkeypatch):
    weights = random_weights(engine_cfg, seed=1)
    expected = sampled(fleet, weights)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    monkeypatch.setenv(upstream.SKIP, SKIPPED)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))  # or the model would have been inspected before
    cfg = replace(engine_cfg, engine=replace(engine_cfg.engine, record_routed_experts=False))
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path / "run") as stock:
        children = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        commands = [" ".join(process.cmdline()) for process in children]
        assert any("resource_tracker" in command for command in commands), "the engine core was forked, not spawned"
        assert sampled(stock, weights) == expected
