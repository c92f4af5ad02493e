"""Engines whose drafts are of the model's multi-token prediction layer, which the trainer publishes and trains."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import inprocess
import numpy as np
import pytest
from engine_weights import policy_of

from megatron_fp8rl import upstream
from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig, WeightSyncConfig
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.verify import WeightMismatch
from tests.helpers.family_configs import DEEPSEEK, GLM, GLM_LITE

pytestmark = pytest.mark.skipif(
    not upstream.applies("verify_in_order", "show_draft_model"), reason="refused with this version of vLLM"
)
ROOT = Path(__file__).resolve().parents[2]
MODELS = {"glm4_moe": GLM, "deepseek_v3": DEEPSEEK, "glm4_moe_lite": GLM_LITE}
SAMPLINGS = [dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.3, top_p=0.8, top_k=9)]
MORE = "speculative-config logprobs-mode enable-return-routed-experts"
PROMPTS = [{"prompt_token_ids": [3 + i % n for i in range(2 * n)]} for n in (3, 5, 9)]


def config(family: str, speculation: str, *, exact: bool = False) -> RunConfig:
    model = replace(MODELS[family], num_mtp_layers=int(speculation == "mtp"))
    return RunConfig(
        name="drafts",
        model=model,
        precision=PrecisionConfig(rollout="blockwise", exact=exact),
        engine=EngineConfig(
            speculation=speculation,
            draft_tokens=3,
            kv_cache_dtype="fp8" if family == "glm4_moe" else "auto",
            record_routed_experts=family == "glm4_moe",
        ),
        weight_sync=WeightSyncConfig(bucket_bytes=100_000),
    )


def predictable(cfg: RunConfig, seed: int) -> dict:
    """Weights with which both the model and its drafts follow each token by the next in the vocabulary, often."""
    weights = inprocess.random_weights(cfg, seed)
    width, vocab = cfg.model.hidden_size, cfg.model.vocab_size
    embedding = weights["model.embed_tokens.weight"].float()
    embedding = embedding / embedding.norm(dim=1, keepdim=True) * width**0.5
    head = embedding.roll(1, 0) * 0.02  # row t + 1 is the embedding of t
    shared = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    layer = f"model.layers.{cfg.model.num_layers}."
    if cfg.model.num_mtp_layers:
        shared |= {f"{layer}embed_tokens.weight": embedding, f"{layer}shared_head.head.weight": head}
        projection = weights[f"{layer}eh_proj.weight"].float() * 0.1
        projection[:, :width] += np.eye(width)  # of the embedding of the token that was sampled
        shared[f"{layer}eh_proj.weight"] = projection
    assert embedding.shape[0] == vocab
    return weights | {name: tensor.bfloat16() for name, tensor in shared.items()}


def sample(llm) -> list[tuple]:
    from vllm import SamplingParams

    from megatron_fp8rl.rollout.vllm_plugin.drafts import counts_of_drafts

    rows = []
    for how in SAMPLINGS:
        shared = dict(max_tokens=24, logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True)
        params = [SamplingParams(seed=seed, **shared, **how) for seed in range(3)]
        for answer in llm.generate(PROMPTS, params, use_tqdm=False):
            (output,) = answer.outputs
            experts = None if output.routed_experts is None else np.asarray(output.routed_experts).tolist()
            counts = counts_of_drafts(output.logprobs.ranks)
            rows.append((list(output.token_ids), list(output.logprobs.logprobs), experts, counts))
    return rows


def build(cfg: RunConfig, folder: Path, load_format: str):
    from megatron_fp8rl.rollout.vllm_plugin import plugin

    os.environ[plugin.SPECULATION_VARIABLE] = "1"
    return inprocess.build_engine(cfg, folder, load_format=load_format, more=MORE)


def publish_and_sample(family: str, exact: bool, folder: str) -> dict:
    """Runs in a process of its own: what engines without drafts, with published drafts, and with loaded drafts do."""
    found = {}
    for speculation, load_format in (("none", "auto"), ("mtp", "dummy"), ("mtp", "auto")):
        cfg = config(family, speculation, exact=exact)
        with_drafts = predictable(config(family, "mtp"), seed=1)
        tensors = {name: with_drafts[name] for name in predictable(cfg, seed=1)}
        path = inprocess.write_checkpoint(cfg, tensors, Path(folder) / speculation)
        llm = build(cfg, path, load_format)
        if load_format == "dummy":
            fleet = inprocess.InProcessFleet(llm)
            policy = policy_of(cfg, predictable(cfg, seed=2))
            exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
            exporter.publish(1)
            inprocess.set_weights(policy, tensors)
            exporter.publish(2)
            found["held"] = sorted(llm.collective_rpc("weight_digests")[0]["digests"])
            found["sent"] = sorted(t.name for transfer in exporter.plan.transfers for t in transfer.wire_tensors())
            found["sampled"] = sample(llm)
            found["error"] = published_with_a_changed_draft(llm, exporter)
            exporter.close()
        else:
            found[speculation] = sample(llm)
        del llm
        inprocess.free_engines()
    return found


def published_with_a_changed_draft(llm, exporter) -> str:
    """The error of a publication after which a bit of the draft layer's projection flips."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    projection = worker.model_runner.drafter.model.model.layers["2"].eh_proj.weight
    finish = type(worker.weight_transfer_engine).finish_weight_update

    def finish_and_change(self):
        finish(self)
        projection.data[0, 0] += 1

    type(worker.weight_transfer_engine).finish_weight_update = finish_and_change
    try:
        exporter.publish(3)
    except WeightMismatch as error:
        return str(error)
    finally:
        type(worker.weight_transfer_engine).finish_weight_update = finish
    return ""


@pytest.mark.parametrize(
    ("family", "exact"),
    [
        pytest.param("glm4_moe", False, marks=pytest.mark.core),
        ("glm4_moe", True),
        ("deepseek_v3", False),
        ("deepseek_v3", True),
        ("glm4_moe_lite", True),
    ],
)
def test_drafts_change_no_token_and_are_published_and_verified(family, exact, tmp_path):
    found = inprocess.call(publish_and_sample, family, exact, str(tmp_path))
    assert found["held"] == found["sent"] and any(".eh_proj." in name for name in found["sent"])
    for plain, drafted, loaded in zip(found["none"], found["sampled"], found["mtp"], strict=True):
        assert plain[:3] == drafted[:3] and plain[3] == (0, 0)
        assert drafted == loaded
    assert (found["none"][0][2] is None) == (family != "glm4_moe")
    counts = [np.sum([row[3] for row in found["sampled"][i : i + 3]], axis=0) for i in range(0, 9, 3)]
    assert all(0 < accepted < drafts for drafts, accepted in counts), counts
    assert "model.layers.2.eh_proj.weight" in found["error"] and "corrupted" in found["error"]


RUN = """
from dataclasses import replace
from megatron_fp8rl.config import EnvironmentConfig, RewardConfig, WarmStartConfig
from model_configs.tiny import tiny_glm4_moe
from tests.helpers.models import latent

def repeating():
    cfg = tiny_glm4_moe()
    rows = EnvironmentConfig(dataset="rows.jsonl", eval="rows.jsonl", rewards=(RewardConfig(function="number"),))
    model = cfg.model if "{family}" == "glm4_moe" else replace(latent(cfg.model), rotary_fraction=1.0, qk_norm=False)
    lengths = dict(max_prompt_tokens=16, max_completion_tokens=16)
    return replace(
        cfg,
        model=model,
        data=replace(cfg.data, environments=(rows,)),
        warm_start=WarmStartConfig(steps=60, batch_size=40, lr=4e-3),
        sampling=replace(cfg.sampling, prompts_per_step=10, completions_per_prompt=4, **lengths),
        num_steps=2,
    )
"""


def run(folder: Path, words: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-m", "megatron_fp8rl", *words.split()]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=500, check=False)


def metrics(folder: Path, key: str) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_trained_layer_drafts_what_is_sampled_and_d_is_zero(family, tmp_path):
    rows = [{"question": f"{digit}=", "answer": str(digit) * 10} for digit in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(RUN.replace("{family}", family))
    shared = "--precision.exact True --algo.zero_variance keep --observe.eval_every 0 --observe.display plain"
    done = run(tmp_path, f"train own:repeating {shared} --output_dir run")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    of_warm_start = metrics(tmp_path / "run/warm_start", "speculation/draft_loss/mean")
    assert of_warm_start[-1] < 0.3 < 2 < of_warm_start[0]
    assert metrics(tmp_path / "run", "mismatch/abs_logprob_diff/max") == [0.0, 0.0]
    assert min(metrics(tmp_path / "run", "speculation/acceptance/mean")) > 0.5
    assert min(metrics(tmp_path / "run", "speculation/tokens_per_step/mean")) > 1.5
    if family == "deepseek_v3":
        return  # dist/test_draft_layer.py reads the layer of both families again

    # The run's checkpoint has the layer, which another run reads only for drafts.
    words = f"grpo --model run/hf --data rows.jsonl --reward number --gpus 0 --num_steps 1 {shared}"
    words += " --sampling.max_prompt_tokens 16 --sampling.max_completion_tokens 16 --sampling.prompts_per_step 8"
    again = run(tmp_path, f"{words} --engine.speculation mtp --output_dir again")
    assert again.returncode == 0, (again.stdout + again.stderr)[-3000:]
    assert metrics(tmp_path / "again", "speculation/acceptance/mean")[0] > 0.5
    assert metrics(tmp_path / "again", "mismatch/abs_logprob_diff/max") == [0.0]
    without = run(tmp_path, f"{words} --dry-run")
    assert without.returncode == 0 and "num_mtp_layers" not in without.stdout
    file = tmp_path / "run/hf/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 0}))
    refused = run(tmp_path, f"{words} --engine.speculation mtp --dry-run")
    assert refused.returncode != 0 and "--engine.speculation" in refused.stderr + refused.stdout
