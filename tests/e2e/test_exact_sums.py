"""Engines of four and eight ranks give sampled tokens the log-probabilities of trainers of any degree, bit for bit."""

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import inprocess
import pytest
import torch
from test_engine_families import MODELS

from megatron_fp8rl.config import EngineConfig, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_support import forbids_exact
from tests.helpers.dist import run_ranks
from tests.helpers.exact_sums import DENSE, GLM_MOE, MOE, WINDOW, random_weights, tokens_logprobs
from tests.helpers.family_configs import GEMMA3, GPT_OSS, OLMO2, PHI3


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


QWEN3 = {"qwen3": DENSE, "qwen3_moe": MOE}


def refusal(model: ModelConfig) -> str:
    """Why runs of a model are not exact on a CPU; empty if they are by default."""
    problem = forbids_exact(RunConfig(name="sums", model=model), Hardware("cpu"))
    return problem.problem.removeprefix("precision.exact: ") if problem else ""


@pytest.mark.slow
def test_every_family_that_is_exact_by_default_is(tmp_path):
    """In FP8, for sampled tokens; docs/models.md says it of these families."""
    exact = {family: model for family, model in {**QWEN3, **MODELS}.items() if not refusal(model)}
    assert {"llama", "qwen3_moe"} < set(exact)
    for family, model in exact.items():
        cfg = RunConfig(name="sums", model=model, precision=PrecisionConfig(exact=True))
        weights = random_weights(model)
        (folder := tmp_path / family).mkdir()
        inprocess.write_checkpoint(cfg, weights, folder)
        answers = inprocess.call(sample, cfg, folder)
        scored = run_ranks(1, tokens_logprobs, cfg, weights, [tokens for tokens, _ in answers])[0]
        for index, (_, expected) in enumerate(answers):
            assert torch.equal(scored[index], expected), (family, (scored[index] - expected).abs().max())


@pytest.mark.parametrize(
    ("model", "engine", "trainers"),
    [
        (MOE, EngineConfig(tensor=4, expert=4), (1, 2, 4)),
        (GLM_MOE, EngineConfig(tensor=2, expert=2), (1, 2)),
        (WINDOW, EngineConfig(tensor=2), (1, 2)),
        (GEMMA3, EngineConfig(), (1,)),
        (replace(OLMO2, ffn_hidden_size=512), EngineConfig(tensor=2), (2,)),
        (GPT_OSS, EngineConfig(), (1,)),
        (replace(PHI3, num_key_value_heads=4, ffn_hidden_size=512), EngineConfig(tensor=2), (1, 2)),
        pytest.param(DENSE, EngineConfig(tensor=8), (1, 8), marks=pytest.mark.slow),
        pytest.param(MOE, EngineConfig(tensor=2, expert=2), (1, 4), marks=pytest.mark.slow),
    ],
    ids="tp4_ep4 shared_tp2_ep2 window_tp2 gemma3 olmo2_tp2 gpt_oss phi3_tp2 tp8 finer_trainer".split(),
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
