"""Engines with latent attention give tokens the trainer's log-probabilities, bit for bit, on every path."""

import os
from pathlib import Path

import inprocess
import pytest
import torch

from megatron_fp8rl.config import EngineConfig, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig, SamplingConfig
from tests.helpers.dist import run_ranks
from tests.helpers.exact_sums import random_weights, tokens_logprobs
from tests.helpers.latent_runs import deepseek, glm_lite

NUM_SAMPLED = 30
SCALES = (1.0, 2.0**-5, 2.0**-2)  # of an FP8 cache: queries are not rounded, and values have the keys' scale
# Blocks of 16 tokens; parts of prompts; too few blocks for all sequences at the end.
NARROW = dict(block_size=16, max_num_batched_tokens=24, enable_chunked_prefill=True, num_gpu_blocks_override=9)


def config(model: ModelConfig, recipe: str, cache: str, degree: int) -> RunConfig:
    return RunConfig(
        name="latent",
        model=model,
        parallel=ParallelConfig(world_size=degree, tensor=degree),
        engine=EngineConfig(kv_cache_dtype=cache),
        precision=PrecisionConfig(trainer=recipe, rollout=recipe, exact=True),
        sampling=SamplingConfig(max_prompt_tokens=64, max_completion_tokens=64),
    )


def sample(cfg: RunConfig, folder: Path, more: dict) -> dict:
    """In the engine's process: tokens and log-probabilities of completions, sampled twice."""
    from vllm import SamplingParams

    from megatron_fp8rl.precision.kernel_support import engine_parts
    from megatron_fp8rl.rollout.vllm_plugin.plugin import PARTS_VARIABLE

    os.environ[PARTS_VARIABLE] = str(engine_parts(cfg))
    llm = inprocess.build_engine(cfg, folder, load_format="auto", enable_prefix_caching=True, **more)
    if cfg.engine.kv_cache_dtype == "fp8":
        llm.collective_rpc(
            "set_kv_scales", kwargs={"scales": dict.fromkeys(map(str, range(cfg.model.num_layers)), SCALES)}
        )
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request, *args):
        preempted.append(request.num_output_tokens)
        return preempt(request, *args)

    scheduler._preempt_request = counted
    how = SamplingParams(max_tokens=NUM_SAMPLED, temperature=1.0, seed=7, ignore_eos=True, logprobs=0)
    found = {"completions": [], "cached": []}
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in inprocess.PROMPTS], how, use_tqdm=False)
        for (completion,) in [output.outputs for output in outputs]:
            values = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            found["completions"].append(([*completion.token_ids], torch.tensor(values)))
        found["cached"].append([output.num_cached_tokens for output in outputs])
    caches = {(layer.attn.kv_cache.dtype.itemsize, *layer.attn.kv_cache.shape[1:]) for layer in find_attention(llm)}
    return found | {"preempted": preempted, "caches": caches}


def find_attention(llm) -> list:
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize(
    ("model", "recipe", "cache", "degree"),
    [(glm_lite().model, "blockwise", "auto", 2), (deepseek().model, "bf16", "fp8", 1)],
    ids=["glm_lite", "deepseek_fp8_cache"],
)
def test_decoded_chunked_cached_and_preempted_tokens_have_the_trainers_bits(model, recipe, cache, degree, tmp_path):
    """Also of a trainer with tensor parallelism and an engine without, and over an FP8 cache."""
    cfg, weights = config(model, recipe, cache, degree), random_weights(model)
    inprocess.write_checkpoint(cfg, weights, tmp_path)
    whole = inprocess.call(sample, cfg, tmp_path, {})
    narrow = inprocess.call(sample, cfg, tmp_path, NARROW)
    assert not whole["preempted"] and any(narrow["preempted"]), "a sequence lost its cache while it was decoded"
    assert narrow["cached"][1][2] >= 16, "the second answer read a block of the first"
    size = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim
    assert narrow["caches"] == {(1 if cache == "fp8" else 2, 1, 16, size)}, "neither keys nor values of heads"
    sequences = [[*p, *tokens] for p, (tokens, _) in zip(inprocess.PROMPTS, whole["completions"])]
    scales = dict.fromkeys(range(model.num_layers), SCALES) if cache == "fp8" else None
    trained = run_ranks(degree, tokens_logprobs, cfg, weights, sequences, scales)[0]
    for found in (whole, narrow):
        for (tokens, values), (first, _), expected in zip(
            found["completions"], 2 * whole["completions"][:3], 2 * trained, strict=True
        ):
            assert tokens == first
            assert torch.equal(values, expected[-NUM_SAMPLED:]), (values - expected[-NUM_SAMPLED:]).abs().max()
