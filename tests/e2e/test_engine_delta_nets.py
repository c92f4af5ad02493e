"""The states of gated delta nets in an engine: chunks of prompts, decoded tokens and preempted requests."""

from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
import torch

from megatron_fp8rl.config import ModelConfig, PrecisionConfig, RunConfig, SamplingConfig
from tests.helpers.family_configs import QWEN3_5_MOE, QWEN3_NEXT

PROMPT_TOKENS, NEW_TOKENS = 110, 30  # together more than a block of the cache


def decode_and_score(model: ModelConfig, folder: Path) -> tuple[int, list[list[float]], list[list[float]]]:
    """(number of preemptions, log-probabilities of decoded tokens, of the same tokens as parts of prompts)"""
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    model = replace(model, max_position_embeddings=256)
    cfg = RunConfig(
        name="states",
        model=model,
        precision=PrecisionConfig(trainer="blockwise", rollout="blockwise"),
        sampling=SamplingConfig(max_prompt_tokens=160, max_completion_tokens=64),
    )
    weights = {name: tensor * 4 for name, tensor in inprocess.random_weights(cfg, seed=2).items()}
    inprocess.write_checkpoint(cfg, weights, folder)
    num_preempted, preempt = 0, Scheduler._preempt_request

    def counted(*args, **kwargs):
        nonlocal num_preempted
        num_preempted += 1
        return preempt(*args, **kwargs)

    Scheduler._preempt_request = counted
    options = dict(max_num_batched_tokens=48, num_gpu_blocks_override=10, enable_prefix_caching=False)
    llm = inprocess.build_engine(cfg, folder, load_format="auto", **options)
    prompts = [[(7 * i + j * j) % 90 for j in range(PROMPT_TOKENS + i)] for i in range(6)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    decoded = [[step[t].logprob for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)] for o in outputs]
    whole = [ids + list(o.outputs[0].token_ids) for ids, o in zip(prompts, outputs, strict=True)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
    as_prompts = [
        [step[t].logprob for t, step in zip(ids[-NEW_TOKENS:], o.prompt_logprobs[-NEW_TOKENS:], strict=True)]
        for ids, o in zip(whole, scored, strict=True)
    ]
    return num_preempted, decoded, as_prompts


@pytest.mark.parametrize("model", [QWEN3_NEXT, QWEN3_5_MOE], ids=lambda model: model.family)
def test_decoded_tokens_have_the_bits_of_prompts(model, tmp_path):
    num_preempted, decoded, as_prompts = inprocess.call(decode_and_score, model, tmp_path)
    assert num_preempted > 0
    assert torch.tensor(decoded).std() > 0.5
    assert decoded == as_prompts
