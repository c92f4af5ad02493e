"""Weights for engine tests, published without a trainer, and the model that they describe.

The reference is transformers' own model. Where the layer table says FP8, its matrices multiply by ``blockwise.linear``;
its experts run one after another.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.registry import hf_tensors, to_hf_config
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.types import Completion, Prompt
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter

PROMPT = list(range(20, 40))
# vLLM 0.32 records routed experts in its V2 runner only, which needs Triton with a CPU backend.
RECORDS_EXPERTS = not (
    Path(importlib.util.find_spec("vllm").origin).parent / "distributed/aux_output_connector"
).exists()


def recorded(completion: Completion) -> np.ndarray:
    """The routed experts of a completion. Skips the rest of the test if this vLLM cannot record them on a CPU."""
    if not RECORDS_EXPERTS:
        pytest.skip("this version of vLLM records no routed experts on a CPU")
    return completion.routed_experts


def write_hf_dir(cfg: RunConfig, path: Path) -> Path:
    character_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps(to_hf_config(cfg.model)))
    return path


def random_weights(cfg: RunConfig, seed: int) -> dict[str, Tensor]:
    """BF16 checkpoint tensors, large enough that tokens differ clearly in probability."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in hf_tensors(cfg.model).items():
        if len(shape) == 1:
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return {name: weight.bfloat16() for name, weight in weights.items()}


def policy_of(cfg: RunConfig, tensors: Mapping[str, Tensor]) -> SimpleNamespace:
    """A single-rank policy for the exporter, with copies of the weights."""
    parameters = {n: registry.from_hf(n, tensors.__getitem__, cfg.model).clone() for n in registry.weights(cfg.model)}
    parallel = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    return SimpleNamespace(cfg=cfg, parallel=parallel, named_tensors=lambda: iter(parameters.items()))


def publish(fleet: Fleet, weights: dict[str, Tensor], version: int) -> None:
    exporter = WeightExporter(policy_of(fleet.cfg, weights), fleet, PlanInputs.of(fleet.cfg))
    try:
        exporter.publish(version)
    finally:
        exporter.close()


class Reference:
    """transformers' Qwen3-MoE on the same weights and in the same precision."""

    def __init__(self, cfg: RunConfig, weights: dict[str, Tensor]):
        self.cfg = cfg
        self._table = LayerTable.build(cfg.model, cfg.precision)
        self._weights = weights
        # By layer, of the last call: the reference's own choice [tokens, top_k], and the router logits that it chose
        # by.
        self.own_experts: list[Tensor] = []
        self.router_logits: list[Tensor] = []
        config = Qwen3MoeConfig(**to_hf_config(cfg.model))
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        named = {f"{name}.weight": module for name, module in self._model.named_modules()}
        for name, weight in weights.items():
            if ".experts." in name:
                continue
            module = named[name]
            module.weight.data.copy_(weight)
            if self._table.rollout_format(name).is_quantized:
                module.forward = lambda x, n=name: self._multiply(x, n)
        for index, layer in enumerate(self._model.model.layers):
            layer.mlp.gate.forward = lambda x, i=index, w=layer.mlp.gate.weight: self._route(i, x, w)
            layer.mlp.experts.forward = lambda x, ids, p, i=index: self._experts(i, x, ids, p)

    def logprobs(self, token_ids: list[int], temperature: float, routed_experts: np.ndarray | None) -> Tensor:
        """[L - 1] log-probability of each token after the first.

        ``routed_experts`` [L - 1, num_layers, top_k] are used where they are not negative, the model's own elsewhere.
        Skips the rest of the test for None, without which near ties may choose other experts than the engine.
        """
        if routed_experts is None:
            pytest.skip("this version of vLLM records no routed experts on a CPU")
        self.own_experts, self.router_logits = [], []
        self._replayed = torch.from_numpy(routed_experts.astype(np.int64))
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids[:-1]]), use_cache=False).logits[0].float() / temperature
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[name]
        if not self._table.rollout_format(name).is_quantized:
            return F.linear(x, weight)
        scales = self.cfg.precision.scales
        return blockwise.linear(x, *blockwise.quantize_weight(weight, scales), scales)

    def _route(self, layer: int, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The engine's experts with this model's weights: a last bit of a router logit decides near ties."""
        logits = F.linear(x, weight)
        probabilities = logits.float().softmax(-1)
        replayed = self._replayed[:, layer]
        own = probabilities.topk(replayed.shape[1]).indices
        self.own_experts.append(own)
        self.router_logits.append(logits)
        expert_ids = torch.where(replayed < 0, own, replayed)
        chosen = probabilities.gather(-1, expert_ids)
        return logits, chosen / chosen.sum(-1, keepdim=True), expert_ids

    def _experts(self, layer: int, x: Tensor, expert_ids: Tensor, probabilities: Tensor) -> Tensor:
        result = torch.zeros(x.shape, dtype=torch.float32)
        for expert in expert_ids.unique().tolist():
            token, slot = (expert_ids == expert).nonzero(as_tuple=True)
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            rows = x[token]
            gate, up = (self._multiply(rows, f"{prefix}.{part}_proj.weight") for part in ("gate", "up"))
            product = self._multiply(F.silu(gate) * up, f"{prefix}.down_proj.weight")
            result.index_add_(0, token, product.float() * probabilities[token, slot, None])
        return result.to(x.dtype)


def sample(fleet: Fleet) -> Completion:
    """Eight tokens after PROMPT from the first engine."""
    (client,) = fleet.clients[:1]
    sampling = replace(client.sampling, max_tokens=8, stop_token_ids=())
    (completion,) = fleet.sync(client.generate(PROMPT, 1, 3, sampling=sampling), 120.0)
    return completion


class OneRank:
    rank = 0

    def broadcast_object(self, value):
        return value


class DigitShare:
    """Reward: the share of digits in the text."""

    async def score(self, prompt: Prompt, text: str) -> Score:
        return Score(sum(c.isdigit() for c in text) / max(1, len(text)), "scored")
