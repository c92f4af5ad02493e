"""Adapters against full training, other layouts, a formula and a resume."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import MegatronFolder
from megatron_fp8rl.config import AlgoConfig, LoraConfig, ParallelConfig, RunConfig
from megatron_fp8rl.trainer import checkpoint, distributed_weights
from megatron_fp8rl.trainer.model.lora import adapted_linears, base_digest, merge_adapters, merged
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.weight_sync.save_adapter import adapter_tensors, save_adapter
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.hf_parts import to_hf
from tests.helpers.training import MOE, SMOOTH_ADAM, continue_training, make_batch, make_loss, run_config

LORA = LoraConfig(rank=4, alpha=12.0)
UNMERGED = replace(LORA, merge=False)
_LAYOUTS = ({"tensor": 2, "expert_tensor": 2}, {"pipeline": 2}, {"context": 2, "expert": 2})
SHARED = replace(MOE, family="glm4_moe", num_shared_experts=1, first_dense_layers=1, ffn_hidden_size=96)
WITH_KL = AlgoConfig(entropy_coef=0.01, loss="grpo", kl_coef=0.1)


def adapted(model=MOE, lora: LoraConfig = LORA, **settings) -> RunConfig:
    return replace(run_config(model=model, **settings), lora=lora)


def build(cfg: RunConfig) -> Policy:
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def hf_weights(policy: Policy) -> dict[str, Tensor]:
    """The weights of a policy on one rank, by their Hugging Face names."""
    named = ((name, tensor.detach()) for name, tensor in policy.named_tensors())
    return {hf: part.clone() for name, tensor in named for hf, part in to_hf(name, tensor, policy.cfg.model)}


def _train(cfg: RunConfig):
    policy = build(cfg)
    start = policy.base_digest
    metrics, _ = continue_training(policy, 3)
    linears = [*adapted_linears(policy.models)]
    base = [
        part for linear in linears for part in (linear.weights if linear.adapter.base is None else linear.adapter.base)
    ]
    assert policy.base_digest == start and all(not part.requires_grad for part in base)
    assert cfg.lora.merge or base_digest(policy.models, policy.parallel) == start
    return [(line["train/loss/mean"], line["train/grad_norm/max"]) for line in metrics], adapter_tensors(policy), start


def test_every_layout_trains_the_adapters_of_one_rank():
    cfg = adapted(SHARED, algo=WITH_KL)
    ((metrics, adapters, digest),) = run_ranks(1, _train, cfg)
    assert len(adapters) == 2 * (4 * 4 + 3 + 3 * (3 + 4 * 3))  # q k v o, one dense layer, shared and four experts
    for merge, degrees in itertools.product((True, False), _LAYOUTS):
        parallel = ParallelConfig(world_size=2, **degrees)
        first, _ = run_ranks(2, _train, replace(cfg, parallel=parallel, lora=replace(LORA, merge=merge)))
        assert first[2] == digest, degrees
        for ours, theirs in zip(first[0], metrics, strict=True):  # in FP32, merged or not
            assert ours == pytest.approx(theirs, rel=1e-5), (merge, degrees)
        for name, tensor in adapters.items():
            text = f"{merge}, {degrees}: {name}"
            torch.testing.assert_close(first[1][name], tensor, rtol=1e-3, atol=1e-5, msg=text)


def _gradients_and_full_ones(cfg: RunConfig):
    """On a rank: gradients of random A and B, and those of all weights of a model with the merged weights."""
    policy = build(cfg)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for linear in adapted_linears(policy.models):
            b = linear.adapter.b
            b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
        merge_adapters(policy.models)
    adapters, merged = adapter_tensors(policy), dict(policy.named_tensors())
    full = Policy.build(replace(cfg, lora=LoraConfig()), policy.parallel)
    with torch.no_grad():
        for name, tensor in full.named_tensors():
            tensor.copy_(merged[name])
    for each in (policy, full):
        batch = each.with_old_logprobs(make_batch(cfg, 0))
        each.accumulate_gradients(batch, make_loss(cfg))
    for linear in adapted_linears(policy.models):  # to name them
        linear.adapter.a.data, linear.adapter.b.data = linear.adapter.a.main_grad, linear.adapter.b.main_grad
    gradients = adapter_tensors(policy)
    of_weights = {name: p.main_grad.clone() for name, p in full.named_parameters()}
    return adapters, gradients, of_weights


@pytest.mark.core
def test_gradients_are_those_of_full_training_times_the_other_matrix():
    cfg = adapted(MOE)
    ((adapters, gradients, of_weights),) = run_ranks(1, _gradients_and_full_ones, cfg)
    scale, checked = LORA.alpha / LORA.rank, 0
    for name, gradient in of_weights.items():
        if ".linear_" not in name:
            continue
        parts = to_hf(name, gradient, cfg.model)
        keys = [f"base_model.model.{part.removesuffix('.weight')}.lora_" for part, _ in parts]
        for key, (_, dw) in zip(keys, parts, strict=True):
            expected = scale * dw @ adapters[f"{key}A.weight"].T
            torch.testing.assert_close(gradients[f"{key}B.weight"], expected, rtol=1e-3, atol=1e-6)
        # Stacked linears share A, so its gradient is the sum over the parts.
        expected = sum(scale * adapters[f"{key}B.weight"].T @ dw for key, (_, dw) in zip(keys, parts, strict=True))
        torch.testing.assert_close(gradients[f"{keys[0]}A.weight"], expected, rtol=1e-3, atol=1e-6)
        checked += 1
    assert checked == 4 * (2 + 4 * 2)


def _train_and_save(cfg: RunConfig, folder: str):
    policy = build(cfg)
    base = hf_weights(policy)
    first = policy.with_old_logprobs(make_batch(cfg, 0))
    continue_training(policy, 3)
    save_adapter(policy, folder)
    later = policy.with_old_logprobs(make_batch(cfg, 0))
    for before, after in zip(first.microbatches, later.microbatches, strict=True):
        assert torch.equal(before.ref_logprobs_T, before.old_logprobs_T)
        assert torch.equal(after.ref_logprobs_T, before.old_logprobs_T), "the reference is the base"
        assert not torch.equal(after.old_logprobs_T, before.old_logprobs_T)
    return base, hf_weights(policy)


def assert_base_and_adapters(base: dict, adapters: dict, actual: dict) -> None:
    """W = W0 + alpha / rank * B A is every adapted weight; all others are the base's bits."""
    adapters, moved = dict(adapters), 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        expected = weight
        if (b := adapters.pop(f"{key}B.weight", None)) is not None:
            delta = b.double() @ adapters.pop(f"{key}A.weight").double()
            expected = (weight.double() + 12.0 / 4 * delta).to(torch.bfloat16)
            moved += not torch.equal(expected, weight)
        assert torch.equal(actual[name], expected), name
    assert not adapters and moved == 4 * (4 + 4 * 3)


def test_saved_adapters_are_the_difference_of_the_weights(tmp_path: Path):
    cfg = adapted(
        MOE, replace(LORA, targets=("attention", "experts")), params="bf16", trainer="blockwise", algo=WITH_KL
    )
    ((base, trained),) = run_ranks(1, _train_and_save, cfg, str(tmp_path / "adapter"))
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_base_and_adapters(base, adapters, trained)


def _train_unmerged(cfg: RunConfig, folder: str):
    policy = build(cfg)
    base = hf_weights(policy)
    first = policy.with_old_logprobs(make_batch(cfg, 0))
    continue_training(policy, 2)
    checkpoint.save(folder, 2, policy, {})
    later = policy.with_old_logprobs(make_batch(cfg, 0))
    for before, after in zip(first.microbatches, later.microbatches, strict=True):
        assert torch.equal(after.ref_logprobs_T, before.old_logprobs_T), "the reference is the base"
        assert not torch.equal(after.old_logprobs_T, before.old_logprobs_T)
    adapters = adapter_tensors(policy)
    with merged(policy.models):
        exported = hf_weights(policy)
    after = hf_weights(policy)
    assert all(torch.equal(after[name], weight) for name, weight in base.items()), "an update or an export moved W0"
    return base, exported, adapters, [mb.old_logprobs_T for mb in later.microbatches]


def _resume_unmerged(cfg: RunConfig, folder: str):
    policy = build(cfg)
    checkpoint.resume(folder, policy, [].append)
    return [mb.old_logprobs_T for mb in policy.with_old_logprobs(make_batch(cfg, 0)).microbatches]


def test_unmerged_adapters_leave_the_base_are_merged_in_an_export_and_resume(tmp_path: Path):
    cfg = adapted(MOE, UNMERGED, params="bf16", trainer="blockwise", algo=WITH_KL)
    ((base, exported, adapters, logprobs),) = run_ranks(1, _train_unmerged, cfg, str(tmp_path))
    assert_base_and_adapters(base, adapters, exported)
    (again,) = run_ranks(1, _resume_unmerged, cfg, str(tmp_path))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, logprobs, strict=True))


def _save(cfg: RunConfig, folder: str):
    policy = build(cfg)
    continue_training(policy, 2)
    checkpoint.save(folder, 2, policy, {})
    at_save = adapter_tensors(policy)
    return at_save, continue_training(policy, 2)[0], adapter_tensors(policy)


def _resume(cfg: RunConfig, folder: str, num_updates: int):
    policy, said = build(cfg), []
    checkpoint.resume(folder, policy, said.append)
    return continue_training(policy, num_updates)[0], adapter_tensors(policy)


def test_a_resume_is_bit_exact_in_any_layout_and_needs_the_same_base(tmp_path: Path):
    cfg = adapted(MOE, params="bf16", trainer="delayed", optim=SMOOTH_ADAM, world_size=2, expert=2)
    (at_save, metrics, adapters), _ = run_ranks(2, _save, cfg, str(tmp_path))
    (again, adapters_again), _ = run_ranks(2, _resume, cfg, str(tmp_path), 2)
    assert again == metrics
    assert all(torch.equal(adapters_again[name], tensor) for name, tensor in adapters.items())
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    numbers = sum(tensor.numel() for tensor in adapters.values())
    assert written < 20 * numbers + 300_000, "a checkpoint contains the base"

    other = replace(cfg, parallel=ParallelConfig(world_size=2, tensor=2))
    (_, elsewhere), _ = run_ranks(2, _resume, other, str(tmp_path), 0)
    assert all(torch.equal(elsewhere[name], tensor) for name, tensor in at_save.items())
    with pytest.raises(CheckpointError, match="contains adapters only"):
        MegatronFolder.open(tmp_path)
    with pytest.raises(ValueError, match="contains adapters only"):
        distributed_weights._require_model(checkpoint.latest(tmp_path), cfg.model)
    with pytest.raises(RankError, match="adapters of another base model"):
        run_ranks(2, _resume, replace(cfg, seed=9), str(tmp_path), 0)
