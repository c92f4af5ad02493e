"""Engines with n-gram drafts sample the tokens, log-probabilities, kept entries and experts of engines without them."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import inprocess
import numpy as np
import pytest

from megatron_fp8rl import upstream
from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig, SamplingConfig
from tests.helpers.models import small_model

pytestmark = pytest.mark.skipif(not upstream.applies("verify_in_order"), reason="refused with this version of vLLM")
ROOT = Path(__file__).resolve().parents[2]
MODEL = dataclasses.replace(
    small_model((2, 128, 4, 2, 64, 24), ffn=0, initializer_range=0.05),
    family="qwen3_moe",
    ffn_hidden_size=0,
    num_experts=4,
    experts_per_token=2,
    moe_ffn_hidden_size=128,
)
SAMPLINGS = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.1),
    dict(temperature=0.2, top_p=0.8, top_k=9),
]


def config(speculation: str) -> RunConfig:
    return RunConfig(
        name="speculation",
        model=MODEL,
        precision=PrecisionConfig(trainer="bf16", rollout="blockwise"),
        engine=EngineConfig(
            speculation=speculation, lookup_min=1, lookup_max=3, kv_cache_dtype="fp8", record_routed_experts=True
        ),
        sampling=SamplingConfig(top_p=0.9),  # engines of runs that truncate return kept entries
    )


def sample_twice(folder: str) -> dict[str, list]:
    """Runs in a process of its own: the completions of both engines, which read the same checkpoint."""
    from vllm import SamplingParams

    from megatron_fp8rl.precision.hardware import Hardware
    from megatron_fp8rl.precision.kernel_choice import choose
    from megatron_fp8rl.rollout.vllm_args import engine_environment
    from megatron_fp8rl.rollout.vllm_plugin import plugin
    from megatron_fp8rl.rollout.vllm_plugin.drafts import counts_of_drafts
    from megatron_fp8rl.rollout.vllm_plugin.patches_kept import kept_entries_of

    environment = engine_environment(config("ngram"), choose(config("ngram"), Hardware("cpu")))
    os.environ |= {name: environment[name] for name in (plugin.KEPT_VARIABLE, plugin.SPECULATION_VARIABLE)}
    found: dict[str, list] = {}
    prompts = [{"prompt_token_ids": [3 + i % n for i in range(2 * n)]} for n in (3, 5, 9)]
    for name in ("none", "ngram"):
        more = "speculative-config logprobs-mode enable-return-routed-experts"
        llm = inprocess.build_engine(config(name), Path(folder), load_format="auto", more=more)
        found[name] = []
        for how in SAMPLINGS:
            shared = dict(max_tokens=24, logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True)
            params = [SamplingParams(seed=seed, **shared, **how) for seed in range(3)]
            for answer in llm.generate(prompts, params, use_tqdm=False):
                (output,) = answer.outputs
                kept = kept_entries_of(output.logprobs)
                found[name].append(
                    (
                        list(output.token_ids),
                        list(output.logprobs.logprobs),
                        None if kept is None else kept.to_bytes(),
                        np.asarray(output.routed_experts),
                        counts_of_drafts(output.logprobs.ranks),
                    )
                )
        del llm
        inprocess.free_engines()
    return found


def test_drafts_change_no_token_and_no_bit(tmp_path):
    cfg = config("none")
    folder = inprocess.write_checkpoint(cfg, inprocess.random_weights(cfg, seed=1), tmp_path / "model")
    found = inprocess.call(sample_twice, str(folder))
    for plain, drafted in zip(found["none"], found["ngram"], strict=True):
        assert plain[:3] == drafted[:3] and plain[2] is not None
        assert plain[3].shape == drafted[3].shape and (plain[3] == drafted[3]).all()
        assert plain[4] == (0, 0)
    counts = [np.sum([row[4] for row in found["ngram"][i : i + 3]], axis=0) for i in range(0, 12, 3)]
    assert all(0 < accepted < drafts for drafts, accepted in counts)
    assert counts[0][1] > 20  # a greedy model without training repeats itself


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["ngram", "mtp"])
def test_the_page_of_speculation_runs_as_written(number, tmp_path):
    commands = re.findall(r"<!-- run -->\n```sh\n(.*?)```", (ROOT / "docs/speculation.md").read_text(), re.DOTALL)
    assert len(commands) == 2
    args = shlex.split(commands[number].replace("\\\n", " "))[1:]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = (tmp_path / args[args.index("--output_dir") + 1] / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["step"] == 1 + number and last["mismatch/abs_logprob_diff/max"] == 0
    assert last["speculation/acceptance/mean"] > 0 and last["speculation/tokens_per_step/mean"] > 1
