"""An FP8 checkpoint of the tools in vLLM: it loads, and computes what an engine does after an online update."""

from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of
from test_online_update import DENSE, MOE

from megatron_fp8rl.config import PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.family_configs import DEEPSEEK, MIXTRAL

EDGES = PrecisionConfig(bf16_first_layers=1)
CASES = {
    "qwen3": (DENSE, PrecisionConfig(scales="fp32")),
    "qwen3_moe": (MOE, EDGES),
    "mixtral": (MIXTRAL, EDGES),
    "deepseek_v3": (DEEPSEEK, EDGES),
    "qwen3_moe mxfp8": (MOE, PrecisionConfig(rollout="mxfp8", bf16_first_layers=1)),
}


def load_and_update(case: str, folder: Path) -> dict:
    """Log-probabilities of an engine that loads the tools' folder, and of the same engine after an online update."""
    from checkpoint_tools import hf_to_fp8
    from checkpoint_tools.hf_folder import HfFolder
    from tests.helpers.checkpoints import write_folder

    model, precision = CASES[case]
    sampling = SamplingConfig(max_prompt_tokens=64, max_completion_tokens=64)
    cfg = RunConfig(name=case, model=model, precision=precision, sampling=sampling)
    weights = inprocess.random_weights(cfg, 3)
    source = write_folder(folder / "hf", weights, registry.to_hf_config(model))
    options = hf_to_fp8.Options(
        source=source,
        target=folder / "fp8",
        workers=1,
        format=precision.rollout,
        scales=precision.scales,
        bf16_first_layers=precision.bf16_first_layers,
        shard_gb=0.0003,
    )
    hf_to_fp8.convert(HfFolder.open(source), options.target, options)
    llm = inprocess.build_engine(cfg, options.target, load_format="auto")
    loaded = inprocess.prompt_logprobs(llm)
    held = llm.collective_rpc("weight_digests")[0]["digests"]
    exporter = WeightExporter(policy_of(cfg, weights), inprocess.InProcessFleet(llm), PlanInputs.of(cfg))
    exporter.publish(1)
    exporter.close()
    again = llm.collective_rpc("weight_digests")[0]["digests"]
    return {"loaded": loaded, "online": inprocess.prompt_logprobs(llm), "held": held, "again": again}


@pytest.mark.parametrize("case", CASES)
def test_an_fp8_checkpoint_is_what_an_online_update_brings(case, tmp_path):
    result = inprocess.call(load_and_update, case, tmp_path)
    assert torch.equal(result["loaded"], result["online"])
    assert result["loaded"].std() > 0.01
    assert result["held"] == result["again"] and len(result["held"]) > 20
