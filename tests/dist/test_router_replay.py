"""Router replay: given experts are used in every layout, and the own experts, replayed, change no bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.data.packing import build_for, divide_for, pack_for
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import (
    MOE,
    SMOOTH_ADAM,
    full_weights,
    make_batch,
    make_loss,
    make_samples,
    run_config,
    token_values,
    train,
)
from tests.tolerances import LAYOUT_FLOAT32, LAYOUT_WEIGHTS

RECOMPUTE = {name: replace(SMOOTH_ADAM, recompute=name, recompute_modules=("moe",)) for name in ("full", "selective")}
LAYOUTS = {
    "small_microbatches": dict(max_tokens=32),
    "recompute_full": dict(max_tokens=32, optim=RECOMPUTE["full"]),
    "recompute_moe": dict(max_tokens=32, optim=RECOMPUTE["selective"]),
    "ep2": dict(world_size=2, expert=2),
    "tp2": dict(world_size=2, tensor=2),
    "pp2_recompute": dict(world_size=2, pipeline=2, max_tokens=32, optim=RECOMPUTE["full"]),
    "pp2_vpp2_recompute_moe": dict(
        world_size=2, pipeline=2, virtual_stages=2, max_tokens=32, optim=RECOMPUTE["selective"]
    ),
    "cp2": dict(world_size=2, context=2),
    "dp2": dict(world_size=2),
    "tp2_cp2_ep2": dict(world_size=4, tensor=2, context=2, expert=2, optim=RECOMPUTE["full"]),
}


def _config(mode: str, **layout):
    return run_config(algo=AlgoConfig(entropy_coef=0.01, loss="grpo", router_replay=mode), **layout)


def _random_experts():
    """Samples with random experts; every fifth token has no record, as zeros or as -1."""
    random = np.random.default_rng(3)
    samples = []
    for sample in make_samples():
        shape = (len(sample.token_ids) - 1, MOE.num_layers, MOE.num_experts)
        experts = random.random(shape).argsort(axis=-1)[..., : MOE.experts_per_token].astype(np.int16)
        experts[::10], experts[5::10] = 0, -1
        samples.append(replace(sample, routed_experts=experts))
    return samples


@pytest.fixture(scope="module")
def one_rank():
    """Training with random experts on one rank, in one microbatch after another."""
    (trained,) = run_ranks(1, train, _config("rollout"), 2, _random_experts())
    return trained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_experts_are_used_in_every_layout(layout, one_rank):
    cfg = _config("rollout", **LAYOUTS[layout])
    ranks = run_ranks(cfg.parallel.world_size, train, cfg, 2, _random_experts())
    for result in ranks:
        for name, values in result.old_logprobs.items():
            torch.testing.assert_close(values, one_rank.old_logprobs[name], **LAYOUT_FLOAT32, msg=name)
    for got, want in zip(ranks[0].metrics, one_rank.metrics, strict=True):
        for key in ("train/loss/mean", "train/grad_norm/max", "loss/update_ratio/max"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
    wanted = full_weights(MOE, [one_rank.pieces])
    for name, weight in full_weights(MOE, [result.pieces for result in ranks]).items():
        torch.testing.assert_close(weight, wanted[name], **LAYOUT_WEIGHTS, msg=name)


def test_other_experts_change_logprobs(one_rank):
    (own,) = run_ranks(1, train, _config("off"), 1, _random_experts())
    for name, values in one_rank.old_logprobs.items():
        assert (own.old_logprobs[name] - values).abs().max() > 1e-3, name


def _passes(cfg, samples):
    """On a rank: log-probabilities and experts by sequence, gradients by parameter, agreement with the record."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank, samples))
    logprobs = token_values(batch, [mb.old_logprobs_T for mb in batch.microbatches])
    policy.optimizer.zero_gradients()
    Forward(cfg, parallel).gradients(policy.chunks, batch, make_loss(cfg))
    gradients = {name: parameter.main_grad.clone() for name, parameter in policy.named_parameters()}
    return logprobs, gradients, _experts(batch), policy.router_metrics()


def _experts(batch):
    """int16 [padded L, layers, K] by sequence."""
    return {
        name: mb.routed_experts_T[mb.sequence_ids_T == index].numpy()
        for mb in batch.microbatches
        if mb.routed_experts_T is not None
        for index, name in enumerate(mb.names)
        if name
    }


def _with_experts(samples, experts):
    return [replace(s, routed_experts=experts[s.name][: len(s.token_ids) - 1]) for s in samples]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_experts_change_no_bit(layout):
    layout = LAYOUTS[layout]
    size, samples = layout.get("world_size", 1), make_samples()
    expected = run_ranks(size, _passes, _config("off", **layout), samples)
    old = run_ranks(size, _passes, _config("old", **layout), samples)
    experts = {name: values for rank in old for name, values in rank[2].items()}
    rollout = run_ranks(size, _passes, _config("rollout", **layout), _with_experts(samples, experts))
    for actual in (old, rollout):
        for (logprobs, gradients, *_), (want_logprobs, want_gradients, *_) in zip(actual, expected, strict=True):
            assert want_gradients and any(value.any() for value in want_gradients.values())
            assert all(torch.equal(logprobs[name], values) for name, values in want_logprobs.items())
            assert all(torch.equal(gradients[name], values) for name, values in want_gradients.items())
    keys = ("router/agreement/mean", "router/agreement/min", *(f"router/agreement_layer_{i}/mean" for i in range(4)))
    assert [rank[3] for rank in rollout] == [dict.fromkeys(keys, 1.0)] * size
    assert [rank[3] for rank in old] == [{}] * size, "without a record nothing is compared"


@pytest.mark.parametrize("layout", ["small_microbatches", "dp2", "tp2_cp2_ep2", "pp2_vpp2_recompute_moe"])
def test_agreement_is_the_share_of_equal_sets(layout):
    """Without replay: order does not count, a wrong set differs, and a token without a record is ignored."""
    layout = {name: value for name, value in LAYOUTS[layout].items() if name != "optim"}
    (alone,) = run_ranks(1, _passes, _config("old"), make_samples())
    samples = _with_experts(make_samples(), {name: values[:, :, ::-1].copy() for name, values in alone[2].items()})
    num_compared = num_wrong = 0
    for sample in samples:
        experts = sample.routed_experts
        experts[::4] = 0
        experts[1::4, 2] = (experts[1::4, 2].max(axis=-1, keepdims=True) + np.array([1, 2])) % MOE.num_experts
        own = alone[2][sample.name][: len(experts)]
        num_compared += len(experts) - len(experts[::4])
        num_wrong += int((np.sort(experts[1::4, 2]) != np.sort(own[1::4, 2])).any(axis=-1).sum())
    share = 1 - num_wrong / num_compared
    assert 0.3 < share < 0.9
    for *_, metrics in run_ranks(layout.get("world_size", 1), _passes, _config("off", **layout), samples):
        assert metrics["router/agreement/min"] == metrics["router/agreement_layer_2/mean"] == pytest.approx(share)
        assert metrics["router/agreement/mean"] == pytest.approx((3 + share) / 4)
        assert metrics["router/agreement_layer_0/mean"] == metrics["router/agreement_layer_3/mean"] == 1.0


def _trained(overrides: dict) -> bool:
    """Runs on a rank: only rank 0 has samples; every rank builds its batches with the engine's experts."""
    cfg = _config("rollout", **overrides)
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    samples = _random_experts()
    shares = divide_for(cfg, samples, num_updates=2) if parallel.rank == 0 else None
    result = build_for(cfg.parallel, parallel.scatter_over_data(shares))
    expected = pack_for(cfg, samples, data_rank=parallel.dp_rank, num_updates=2)
    return len(result) == len(expected) == 2 and all(
        (a is None and b is None) or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for one, other in zip(result, expected, strict=True)
        for mb, same in zip(one.microbatches, other.microbatches, strict=True)
        for a, b in ((getattr(mb, field), getattr(same, field)) for field in mb.__slots__)
    )


@pytest.mark.parametrize("layout", ["dp2", "pp2_recompute", "tp2_cp2_ep2"])
def test_samples_go_to_the_ranks_that_train_them(layout):
    layout = {name: value for name, value in LAYOUTS[layout].items() if name != "optim"}
    assert all(run_ranks(layout["world_size"], _trained, layout))
