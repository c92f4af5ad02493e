"""Engines of four and eight ranks give sampled tokens the log-probabilities of trainers of any degree, bit for bit."""

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import inprocess
import pytest
import torch

from megatron_fp8rl.config import EngineConfig, ParallelConfig, PrecisionConfig, RunConfig
from tests.helpers.dist import run_ranks
from tests.helpers.exact_sums import DENSE, GLM_MOE, MOE, WINDOW, random_weights, tokens_logprobs
from tests.helpers.family_configs import GEMMA3, OLMO2


def sample(cfg: RunConfig, folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    """In the engine's process: (tokens, log-probabilities of all but the first), of prompts and completions."""
    from vllm import SamplingParams
    from vllm.v1.executor import multiproc_executor

    from megatron_fp8rl.precision.kernel_support import engine_parts
    from megatron_fp8rl.rollout.vllm_plugin.plugin import PARTS_VARIABLE

    os.environ[PARTS_VARIABLE] = str(engine_parts(cfg))
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")  # workers with vLLM imported
    llm = inprocess.build_engine(cfg, folder, load_format="auto")
    prompts = [{"prompt_token_ids": ids} for ids in inprocess.PROMPTS]
    how = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    answers = []
    for output in llm.generate(prompts, how, use_tqdm=False):
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        table = [*output.prompt_logprobs[1:], *completion.logprobs]
        values = torch.tensor([row[token].logprob for row, token in zip(table, tokens[1:], strict=True)])
        answers.append((tokens, values))
    return answers


@pytest.mark.parametrize(
    ("model", "engine", "trainers"),
    [
        (MOE, EngineConfig(tensor=4, expert=4), (1, 2, 4)),
        (GLM_MOE, EngineConfig(tensor=2, expert=2), (1, 2)),
        (WINDOW, EngineConfig(tensor=2), (1, 2)),
        (GEMMA3, EngineConfig(), (1,)),
        (replace(OLMO2, ffn_hidden_size=512), EngineConfig(tensor=2), (2,)),
        pytest.param(DENSE, EngineConfig(tensor=8), (1, 8), marks=pytest.mark.slow),
        pytest.param(MOE, EngineConfig(tensor=2, expert=2), (1, 4), marks=pytest.mark.slow),
    ],
    ids=["tp4_ep4", "shared_tp2_ep2", "window_tp2", "gemma3", "olmo2_tp2", "tp8", "finer_trainer"],
)
def test_engines_of_several_ranks_and_trainers_of_any_degree_agree(model, engine, trainers, tmp_path):
    base = RunConfig(name="sums", model=model, engine=engine, precision=PrecisionConfig(exact=True))
    weights = random_weights(model)
    inprocess.write_checkpoint(base, weights, tmp_path)
    known = {}
    for degree in trainers:
        cfg = replace(base, parallel=ParallelConfig(world_size=degree, tensor=degree))
        parts = max(degree, engine.tensor)
        if parts not in known:
            known[parts] = inprocess.call(sample, cfg, tmp_path)
        sequences = [tokens for tokens, _ in known[parts]]
        scored = run_ranks(degree, tokens_logprobs, cfg, weights, sequences)[0]
        for index, (_, expected) in enumerate(known[parts]):
            assert torch.equal(scored[index], expected), (degree, (scored[index] - expected).abs().max())
