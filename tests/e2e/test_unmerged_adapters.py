"""Engines that keep the base and load adapters: what is sent, verified, computed and cached."""

from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of
from safetensors.torch import load_file, save_file
from test_engine_families import MODELS
from torch import Tensor

from megatron_fp8rl.config import LoraConfig, ModelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.names import adapted, registry
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.publish_adapter import AdapterFolders
from megatron_fp8rl.weight_sync.verify import WeightMismatch
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.fields import set_fields

LORA = LoraConfig(rank=4, alpha=12.0, targets=("attention",), merge=False)


class Folders(AdapterFolders):
    """Folders of given adapters, without a trainer."""

    def gather(self) -> dict[str, Tensor]:
        return self.tensors


def config(folder: Path) -> RunConfig:
    cfg = set_fields(tiny_qwen3_moe(), max_prompt_tokens=200)
    return replace(cfg, lora=LORA, output_dir=str(folder / "run"))


def adapters(cfg: RunConfig, seed: int) -> dict[str, Tensor]:
    """A, and B with its scale, of all attention linears, by name in peft's format."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for weight in registry.weights(cfg.model).values():
        if adapted.is_adapted(weight.name, cfg.lora):
            for name, _ in weight.parts:
                rows, columns = registry.hf_tensors(cfg.model)[name]
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                for matrix, shape in (("A", (cfg.lora.rank, columns)), ("B", (rows, cfg.lora.rank))):
                    result[f"{key}{matrix}.weight"] = (torch.randn(shape, generator=generator) * 0.2).bfloat16()
    return result


def exporter_of(cfg: RunConfig, fleet) -> tuple[WeightExporter, Folders]:
    policy = policy_of(cfg, inprocess.random_weights(cfg, 1))
    folders = Folders(policy, padded_rank=8)
    return WeightExporter(policy, fleet, PlanInputs.of(cfg), folders), folders


def _engine(cfg: RunConfig, folder: Path):
    return inprocess.build_engine(
        cfg, inprocess.write_checkpoint(cfg, inprocess.random_weights(cfg, 0), folder), load_format="dummy"
    )


def _publications(folder: str):
    from megatron_fp8rl.rollout.vllm_plugin.patches_adapters import adapter_request

    cfg = config(Path(folder))
    llm = _engine(cfg, Path(folder) / "model")
    fleet = inprocess.InProcessFleet(llm)
    exporter, folders = exporter_of(cfg, fleet)
    reports, seen = [], []
    for version, seed in enumerate((1, 2, 1)):
        folders.tensors = adapters(cfg, seed)
        reports.append(exporter.publish(version))
        seen.append(inprocess.prompt_logprobs(llm, adapter_request(version)))
    base = inprocess.prompt_logprobs(llm)

    # a replica that starts in place of the first gets the base, and then the adapter
    other = _engine(cfg, Path(folder) / "model")
    fleet.clients = (inprocess.Client(other),)
    reports.append(exporter.publish(3))
    seen.append(inprocess.prompt_logprobs(other, adapter_request(3)))

    # a byte changes on the way
    load = fleet.clients[0].load_adapter

    async def load_damaged(path: str, version: int):
        file = Path(path) / "adapter_model.safetensors"
        content = load_file(file)
        content["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"][0, 0] *= 2
        save_file(content, file)
        return await load(path, version)

    fleet.clients[0].load_adapter = load_damaged
    try:
        exporter.publish(4)
    except WeightMismatch as error:
        failure = str(error)
    exporter.close()
    left = (Path(folder) / "run" / "published_adapter").exists()
    return reports, seen, base, failure, left


def test_adapters_are_published_and_verified_without_the_base(tmp_path: Path):
    reports, (first, second, third, new), base, failure, left = inprocess.call(_publications, str(tmp_path))
    cfg = config(tmp_path)
    sent = adapters(cfg, 1)
    assert reports[0].num_bytes == PlanInputs.of(cfg).plan.num_bytes + sum(tensor.nbytes for tensor in sent.values())
    assert [r.num_bytes for r in reports[1:3]] == [sum(tensor.nbytes for tensor in sent.values())] * 2
    assert reports[1].num_tensors == len(sent) == 2 * 2 * 4 and reports[1].num_fp8_tensors == 0
    assert reports[3].num_bytes == reports[0].num_bytes, "a new replica needs the base"
    assert reports[0].checksum == reports[2].checksum == reports[3].checksum != reports[1].checksum
    assert torch.equal(first, third) and torch.equal(first, new)
    assert (first - second).abs().max() > 0.01 < (first - base).abs().max()
    assert "model.layers.1.self_attn.k_proj.lora_A in replica 0 rank 0: corrupted" in failure
    assert failure.count("corrupted") == 1 and not left


def _cached(folder: str) -> list[int]:
    from vllm import SamplingParams

    from megatron_fp8rl.rollout.vllm_plugin.patches_adapters import adapter_request

    cfg = config(Path(folder))
    llm = _engine(cfg, Path(folder) / "model")
    fleet = inprocess.InProcessFleet(llm)
    llm.reset_prefix_cache = lambda: None  # what a pause does besides
    exporter, folders = exporter_of(cfg, fleet)
    prompt = [{"prompt_token_ids": [3 + i % 40 for i in range(190)]}]
    counts: list[int] = []
    for version, requests in ((0, 2), (1, 2)):
        folders.tensors = adapters(cfg, version)
        exporter.publish(version)
        for _ in range(requests):
            how = SamplingParams(max_tokens=1, temperature=0.0)
            (output,) = llm.generate(prompt, how, use_tqdm=False, lora_request=adapter_request(version))
            counts.append(output.num_cached_tokens)
    return counts


def test_the_prefix_cache_of_an_adapter_is_not_read_with_the_next(tmp_path: Path):
    first, again, changed, again_changed = inprocess.call(_cached, str(tmp_path))
    assert first == changed == 0 and again == again_changed > 0


def _family(folder: str, model: ModelConfig) -> tuple[int, Tensor, Tensor, Tensor]:
    from megatron_fp8rl.rollout.vllm_plugin.patches_adapters import adapter_request

    precision = PrecisionConfig(trainer="blockwise", rollout="blockwise")
    lora = replace(LORA, targets=("attention", "dense"))
    cfg = RunConfig(name="family", model=model, precision=precision, lora=lora, output_dir=f"{folder}/run")
    llm = _engine(cfg, Path(folder) / "model")
    exporter, folders = exporter_of(cfg, inprocess.InProcessFleet(llm))
    seen = []
    for version in range(2):
        folders.tensors = adapters(cfg, version)
        report = exporter.publish(version)  # verifies the adapter of every linear
        seen.append(inprocess.prompt_logprobs(llm, adapter_request(version)))
    exporter.close()
    return report.num_tensors, *seen, inprocess.prompt_logprobs(llm)


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_biases_dense_layers_and_shared_experts_have_adapters(family: str, tmp_path: Path):
    number, first, second, base = inprocess.call(_family, str(tmp_path), MODELS[family])
    assert number == 2 * 7 * MODELS[family].num_layers  # attention, and a dense MLP or a shared expert in each layer
    assert (first - second).abs().max() > 0.1 < (first - base).abs().max()
