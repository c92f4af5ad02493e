"""An FP8 KV cache under scales that the trainer measured, against a BF16 cache and against bad scales. On CPUs.

vLLM's CPU kernel attends to what it has written into the cache, prompts included, so that log-probabilities of a prompt
show what the cache does to them. It truncates to E4M3 instead of rounding, which errs by 5 % instead of 2.
"""

import dataclasses
import gc
from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of

from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.precision.hardware import cpu_has_avx512
from megatron_fp8rl.types import KVScales, Prompt
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.verify import KVScaleMismatch
from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model
from tests.tolerances import KV_CACHE_LOGPROB_MEAN

DENSE = small_model((3, 128, 4, 2, 64, 96), ffn=256, initializer_range=0.05)


def config(kv_cache_dtype: str, hf_path: str | None = None) -> RunConfig:
    engine = EngineConfig(kv_cache_dtype=kv_cache_dtype)
    return RunConfig(
        name="kv_cache",
        model=dataclasses.replace(DENSE, hf_path=hf_path),
        precision=PrecisionConfig(trainer="bf16", rollout="bf16"),
        engine=engine,
    )


def measure(folder: str) -> KVScales:
    """Runs on a trainer rank: the scales for the prompts that the engine will read."""
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    cfg = config("fp8", folder)
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    prompts = [
        Prompt(prompt_id=str(len(ids)), environment="test", token_ids=tuple(ids), text="", answer="")
        for ids in inprocess.PROMPTS
    ]
    policy.calibrate_kv(prompts)
    return policy.kv_scales()


def scaled(scales: KVScales, factor: float) -> KVScales:
    return {layer: tuple(value * factor for value in row) for layer, row in scales.items()}


def logprobs_under(folder: str, scales: KVScales) -> dict:
    """Log-probabilities of one engine with a BF16 cache and of one with an FP8 cache under several scales."""
    found = {}
    for dtype in ("auto", "fp8"):
        cfg = config(dtype)
        llm = inprocess.build_engine(cfg, Path(folder), load_format="dummy")
        fleet = inprocess.InProcessFleet(llm)
        exporter = WeightExporter(policy_of(cfg, inprocess.random_weights(cfg, 1)), fleet, PlanInputs.of(cfg))
        if dtype == "auto":
            exporter.publish(1)
            found["bf16"] = inprocess.prompt_logprobs(llm)
            with pytest.raises(RuntimeError, match="layer 0 keeps its KV cache as 'auto'"):
                llm.collective_rpc("set_kv_scales", kwargs={"scales": {str(k): v for k, v in scales.items()}})
        else:
            exporter.publish(1)
            found["ones"] = inprocess.prompt_logprobs(llm)
            for version, (name, factor) in enumerate(
                [("measured", 1.0), ("roomy", 16.0), ("too_large", 2.0**20), ("too_small", 2.0**-6), ("again", 1.0)], 2
            ):
                exporter.publish(version, scaled(scales, factor))
                found[name] = inprocess.prompt_logprobs(llm)
            with pytest.raises(ValueError, match=r"came for layers \[0, 1\], and the engine has \[0, 1, 2\]"):
                llm.collective_rpc("set_kv_scales", kwargs={"scales": {"0": scales[0], "1": scales[1]}})
        exporter.close()
        del llm, fleet, exporter
        gc.collect()
        inprocess.free_engines()
    return {name: values.tolist() for name, values in found.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, torch.Tensor]:
    if not cpu_has_avx512():
        pytest.skip("vLLM keeps an FP8 KV cache on CPUs with AVX-512 alone")
    folder = tmp_path_factory.mktemp("kv_cache")
    inprocess.write_checkpoint(config("auto"), inprocess.random_weights(config("auto"), 1), folder)
    (scales,) = run_ranks(1, measure, str(folder))
    answer = inprocess.call(logprobs_under, str(folder), scales, timeout_s=500.0)
    return {name: torch.tensor(values) for name, values in answer.items()}


def test_measured_scales_keep_the_policy(found):
    error = {name: (values - found["bf16"]).abs().mean().item() for name, values in found.items()}
    assert 0 < error["measured"] < KV_CACHE_LOGPROB_MEAN, error
    # Under the too large ones all numbers are below E4M3's smallest; of numbers above its largest, under the too small
    # ones, vLLM's kernel makes NaN at times.
    for bad in ("too_large", "too_small"):
        assert not error[bad] < 1.2 * error["measured"], (bad, error[bad])
    assert error["roomy"] < 1.2 * error["measured"], error  # what a margin costs


def test_scales_come_and_go_with_publications(found):
    assert torch.equal(found["measured"], found["again"])
    assert not torch.equal(found["measured"], found["ones"])


def test_an_engine_that_holds_other_scales_is_named():
    from megatron_fp8rl.weight_sync.verify import verify_kv_scales

    sent = {0: (1.0, 2.0, 3.0), 1: (4.0, 5.0, 6.0)}
    right = {"rank": 0, "scales": {"0": [1.0, 2.0, 3.0], "1": [4.0, 5.0, 6.0]}}
    verify_kv_scales([[right]], sent, 7)
    wrong = {"rank": 1, "scales": {"0": [1.0, 2.0, 3.0], "1": [4.0, 1.0, 6.0]}}
    named = r"version 7.*\n  layer 1 in replica 0 rank 1: has \(4.0, 1.0, 6.0\), sent"
    with pytest.raises(KVScaleMismatch, match=named):
        verify_kv_scales([[right, wrong]], sent, 7)
