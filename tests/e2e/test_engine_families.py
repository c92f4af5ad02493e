"""Engines of every family that vLLM runs on a CPU: what they hold after an online update, and what they compute."""

import json
from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of

from megatron_fp8rl.config import ModelConfig, PrecisionConfig, RopeScaling, RunConfig, WeightSyncConfig
from megatron_fp8rl.data.fused_tensors import fusion_of
from megatron_fp8rl.names import registry
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.family_configs import (
    DEEPSEEK,
    GEMMA3,
    GLM,
    GLM_LITE,
    GPT_OSS,
    LLAMA,
    MINIMAX,
    MIXTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    PHI3_LONG,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from tests.tolerances import ENGINE_FP8_LOGPROB_MEDIAN, ENGINE_LOGPROB_MAX, ENGINE_LOGPROB_MEAN

LINEAR = RopeScaling(kind="linear", factor=3.0, original_max_position_embeddings=LLAMA.max_position_embeddings)
YARN = RopeScaling(kind="yarn", factor=8.0, original_max_position_embeddings=16, attention_factor=1.4, truncate=False)
MODELS = {
    "llama": LLAMA,
    "mistral": replace(LLAMA, family="mistral", rope_scaling=LINEAR, tie_embeddings=True),
    # vLLM's Qwen2 does not read head_dim.
    "qwen2": replace(LLAMA, family="qwen2", hidden_size=256, rope_scaling=YARN, qkv_bias=True),
    "mixtral": MIXTRAL,
    "glm4_moe": GLM,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": GLM_LITE,
    "minimax_m2": MINIMAX,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma3_text": GEMMA3,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "gpt_oss": GPT_OSS,
    "phi3": PHI3,
    "phi3_long": PHI3_LONG,
}
FP8_FAMILIES = """
    qwen2 mixtral glm4_moe deepseek_v3 glm4_moe_lite minimax_m2 olmo2 gemma3_text qwen3_next qwen3_5_text
    qwen3_5_moe_text gpt_oss phi3
""".split()
CASES = [(family, "bf16") for family in MODELS] + [(family, "blockwise") for family in FP8_FAMILIES]


def random_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, of sizes that leave nothing without effect on the logits."""
    generator = torch.Generator().manual_seed(1)
    of_norms = 0.0 if registry.FAMILIES[model.family].zero_centred_norms else 1.0
    dtypes = {part: w.dtype for w in registry.weights(model).values() for part, _ in w.parts}
    tensors = {}
    for name, shape in registry.hf_tensors(model).items():
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.2
        is_added = of_norms == 0 and "linear_attn" not in name  # to 1
        tensor = torch.randn(shape, generator=generator) * scale + float("norm" in name and not is_added)
        tensors[name] = tensor.to(getattr(torch, dtypes[name]))
    return tensors


def update_and_score(family: str, rollout: str, folder: Path) -> dict:
    """Publish random weights to an engine, which verifies them; its log-probabilities after that."""
    precision = PrecisionConfig(trainer="bf16", rollout=rollout)
    weight_sync = WeightSyncConfig(bucket_bytes=100_000)
    cfg = RunConfig(name=family, model=MODELS[family], precision=precision, weight_sync=weight_sync)
    weights = random_weights(cfg.model)
    inprocess.write_checkpoint(cfg, weights, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    exporter = WeightExporter(policy_of(cfg, weights), inprocess.InProcessFleet(llm), PlanInputs.of(cfg))
    result = {"report": exporter.publish(1)}
    exporter.close()
    result["online"] = inprocess.prompt_logprobs(llm)
    result["held"] = sorted(llm.collective_rpc("weight_digests")[0]["digests"])
    result["sent"] = sorted(t.name for transfer in exporter.plan.transfers for t in transfer.wire_tensors())
    del llm, exporter
    inprocess.free_engines()
    result["fresh"] = inprocess.prompt_logprobs(inprocess.build_engine(cfg, folder, load_format="auto"))
    return result


def reference_logprobs(model: ModelConfig, folder: Path) -> torch.Tensor:
    """The same by transformers, which loads the weights from a checkpoint."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    weights = fusion_of(model.family).fuse(random_weights(model))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(registry.to_hf_config(model)))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    if registry.FAMILIES[model.family].fp32_router:  # transformers rounds the logits of MiniMax-M2's to BF16
        for layer in reference.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.float()
    scored = []
    for prompt in inprocess.PROMPTS:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0, :-1].float()
        scored.append(logits.log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(scored)


@pytest.mark.parametrize(("family", "rollout"), CASES)
def test_engine_holds_and_computes_what_was_published(family, rollout, tmp_path):
    result = inprocess.call(update_and_score, family, rollout, tmp_path / "engine")
    assert result["held"] == result["sent"]  # under the checkpoint's names, each verified by its digest
    assert torch.equal(result["online"], result["fresh"])
    assert (result["report"].num_fp8_tensors > 0) == (rollout == "blockwise")
    reference = reference_logprobs(MODELS[family], tmp_path / "reference")
    assert reference.std() > 0.5
    difference = (result["online"] - reference).abs()
    if rollout == "bf16":
        assert difference.mean() < ENGINE_LOGPROB_MEAN and difference.max() < ENGINE_LOGPROB_MAX
    else:
        assert difference.median() < ENGINE_FP8_LOGPROB_MEDIAN
