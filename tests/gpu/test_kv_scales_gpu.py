"""An engine with an FP8 KV cache on one GPU, CUDA graphs and all, under scales that are set while it runs.

Log-probabilities of sampled tokens against transformers in BF16 on the same tokens. The weights are such that scales
matter: values are a thousandth of their usual size, which the output projection makes up for, so that a scale of 1
leaves them below E4M3's normal numbers.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.config import EngineConfig, PrecisionConfig, RunConfig, SamplingConfig, WeightSyncConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.types import Completion, KVScales
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from model_configs.tiny import tiny_qwen3
from tests.e2e.engine_weights import policy_of, random_weights, write_hf_dir
from tests.helpers.measured_attention import measure_attention
from tests.tolerances import ENGINE_LOGPROB_MEAN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHRINK = 2.0**-10
PROMPTS = [list(range(3 + i, 33 + 2 * i)) for i in range(24)]
MAX_TOKENS = 40


def _cfg(attention: str) -> RunConfig:
    cfg = tiny_qwen3()
    engine = EngineConfig(
        kv_cache_dtype="fp8",
        graphs="plain",
        sleep_level=1,
        max_num_sequences=32,
        gpu_memory_utilization=0.2,
        deadline_scale=0.2,
    )
    weight_sync = WeightSyncConfig(transport="gloo")
    sampling = SamplingConfig(max_prompt_tokens=128, max_completion_tokens=128)
    precision = PrecisionConfig(trainer="bf16", rollout="bf16", kernels={"engine_attention": attention}, exact=False)
    return replace(
        cfg, name="kv_scales", engine=engine, weight_sync=weight_sync, sampling=sampling, precision=precision
    )


def _weights(cfg: RunConfig) -> dict[str, Tensor]:
    weights = random_weights(cfg, 1)
    for layer in range(cfg.model.num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        weights[f"{prefix}.v_proj.weight"] *= SHRINK
        weights[f"{prefix}.o_proj.weight"] /= SHRINK  # powers of two: the same function
    return weights


class _Reference:
    """transformers in BF16 on the GPU without an FP8 cache."""

    def __init__(self, cfg: RunConfig, weights: dict[str, Tensor]):
        import transformers

        config = transformers.AutoConfig.for_model(**registry.to_hf_config(cfg.model))
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self._model.load_state_dict(weights, strict=not cfg.model.tie_embeddings)
        self._model.cuda()
        self.amax = measure_attention(self._model, cfg.model.num_layers)

    @torch.no_grad()
    def error(self, prompts: list[list[int]], completions: list[Completion]) -> float:
        """Mean |engine - transformers| over the sampled tokens, in nats."""
        errors = []
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
            logits = self._model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            own = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            errors.append((own - torch.tensor(completion.rollout_logprobs, device="cuda")).abs())
        return float(torch.cat(errors).mean())


def _sample(fleet: Fleet) -> list[Completion]:
    import asyncio

    client = fleet.clients[0]
    sampling = replace(client.sampling, max_tokens=MAX_TOKENS, stop_token_ids=(), temperature=1.0)

    async def all_prompts():
        return await asyncio.gather(*(client.generate(p, 1, 7, sampling=sampling) for p in PROMPTS))

    return [completion for (completion,) in fleet.sync(all_prompts(), 60.0)]


def _scales(amax: Tensor, factor: float = 1.0) -> KVScales:
    """The trainer's scales: twice the measured maximum over the largest E4M3 number."""
    return {layer: tuple(row) for layer, row in enumerate((amax * (2.0 * factor / 448.0)).tolist())}


@pytest.mark.parametrize("attention", ["FP8_CACHE", "FLASH_ATTN"])
def test_scales_reach_the_kernels(attention, tmp_path):
    cfg = _cfg(attention)
    weights = _weights(cfg)
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path), tmp_path) as fleet:
        exporter = WeightExporter(policy_of(cfg, weights), fleet, PlanInputs.of(cfg))
        reference = _Reference(cfg, weights)
        errors = {}
        exporter.publish(1)
        completions = _sample(fleet)
        errors["ones"] = reference.error(PROMPTS, completions)  # and measures
        amax = reference.amax.clone()
        assert amax[:, 2].max() < 0.05  # values are small
        rounds = [("measured", 1.0), ("too_large", 2.0**15), ("measured_again", 1.0)]
        for version, (name, factor) in enumerate(rounds, 2):
            exporter.publish(version, _scales(amax, factor))
            errors[name] = reference.error(PROMPTS, _sample(fleet))
        fleet.sleep()
        fleet.wake()  # vLLM sets the scales to 1 here; the client sends them again
        errors["awake"] = reference.error(PROMPTS, _sample(fleet))
        (held,) = fleet.sync(fleet.clients[0].set_kv_scales(_scales(amax)), 30.0)
        assert {int(layer): tuple(row) for layer, row in held["scales"].items()} == _scales(amax)
        exporter.close()
        print(
            f"\nmean |engine - transformers| in nats, {fleet.kernels()}:", {k: round(v, 4) for k, v in errors.items()}
        )
    for name in ("measured", "measured_again", "awake"):
        assert errors[name] < ENGINE_LOGPROB_MEAN, errors
        assert errors[name] < 0.5 * min(errors["ones"], errors["too_large"]), errors
