"""The loss that balances experts: the same in every layout, and that of the tokens without the padding beside them."""

from dataclasses import replace

import pytest
import torch

from benchmarks.training import random_batch
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.model.router import Router
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model
from tests.helpers.training import (
    MOE,
    SMOOTH_ADAM,
    assert_same_weights,
    make_batch,
    make_loss,
    make_samples,
    run_config,
    train,
)
from tests.tolerances import BALANCING_GRADIENT

AUX = replace(SMOOTH_ADAM, moe_aux_loss_coef=0.1)
BALANCED = [
    dict(world_size=2, tensor=2, expert=2, optim=replace(AUX, recompute="selective")),
    dict(world_size=2, context=2, optim=replace(AUX, recompute="full")),
    dict(world_size=2),  # the second rank has a microbatch of padding alone
    dict(world_size=4, tensor=2, pipeline=2, virtual_stages=2),
]


@pytest.mark.parametrize("layout", BALANCED, ids=["tp2_ep2_moe", "cp2_full", "dp2", "tp2_pp2_vpp2"])
def test_balancing_loss_does_not_depend_on_the_layout(layout):
    """Each microbatch has its own balancing loss, so every microbatch has one sequence. Padding differs."""
    samples = [*make_samples(3, length=21), *make_samples(2, length=26, seed=6)]
    samples = [replace(sample, name=f"sample{index}") for index, sample in enumerate(samples)]
    (expected,) = run_ranks(1, train, run_config(optim=AUX, max_tokens=32), 2, samples)
    (without,) = run_ranks(1, train, run_config(max_tokens=32), 2, samples)
    assert abs(expected.metrics[0]["train/grad_norm/max"] / without.metrics[0]["train/grad_norm/max"] - 1) > 1e-3
    ranks = run_ranks(layout["world_size"], train, run_config(**{"optim": AUX, "max_tokens": 32, **layout}), 2, samples)
    assert_same_weights(MOE, expected, ranks)


def _balancing_gradient(cfg, samples):
    """On a rank: (gradient of the balancing loss in the router, its weight, [tokens, hidden] inputs)."""
    parallel, gradients, seen = Parallel.init(cfg.parallel, deadline_s=60), [], []
    for coefficient in (0.0, AUX.moe_aux_loss_coef):
        run = replace(cfg, optim=replace(cfg.optim, moe_aux_loss_coef=coefficient))
        policy = Policy.build(run, parallel)
        batch = policy.with_old_logprobs(make_batch(run, 0, samples))
        (router,) = (module for module in policy.models[0].modules() if isinstance(module, Router))
        router.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().flatten(0, 1)))
        policy.optimizer.zero_gradients()
        policy._scale_auxiliary_loss(batch.microbatches)
        Forward(run, parallel).gradients(policy.chunks, batch, make_loss(run))
        gradients.append(router.weight.main_grad.clone())
    tokens = []  # in the order of packing: what comes behind a sequence's own tokens is padding
    for mb, hidden in zip(batch.microbatches, seen[-len(batch.microbatches) :], strict=True):
        lengths = {sample.name: len(sample.token_ids) for sample in samples}
        starts = mb.cu_seqlens_S.tolist()
        rows = [i for name, start in zip(mb.names, starts) if name for i in range(start, start + lengths[name])]
        tokens.append((hidden[rows], hidden.shape[0] - len(rows)))
    return gradients[1] - gradients[0], router.weight.detach().clone(), tokens


def test_balancing_loss_is_that_of_the_tokens_without_padding():
    """Switch Transformer's: experts x sum of (share of the choices x mean probability), a mean over microbatches."""
    model = replace(MOE, num_layers=1)  # what other layers' losses add does not reach this one's router
    cfg, samples = run_config(model=model, max_tokens=64), make_samples(5, length=19)
    ((actual, weight, microbatches),) = run_ranks(1, _balancing_gradient, cfg, samples)
    assert [num_padding for _, num_padding in microbatches] == [7, 10]
    weight.requires_grad_()
    loss, total = 0.0, sum(len(hidden) for hidden, _ in microbatches)
    for hidden, _ in microbatches:
        probabilities = (hidden @ weight.T).softmax(dim=-1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(model.experts_per_token).indices, 1.0)
        share = chosen.sum(dim=0) / chosen.sum()
        mean = probabilities.mean(dim=0)
        loss = loss + len(hidden) / total * model.num_experts * (share * mean).sum()
    (AUX.moe_aux_loss_coef * loss).backward()
    assert weight.grad.norm() > 1e-4
    torch.testing.assert_close(actual, weight.grad, **BALANCING_GRADIENT)


def _loads(cfg, embedding_range):
    """On a rank: tokens of each expert of the second layer over the mean, with random weights."""
    parallel, chosen = Parallel.init(cfg.parallel, deadline_s=60), []
    policy = Policy.build(replace(cfg, model=replace(cfg.model, embedding_range=embedding_range)), parallel)
    router = [module for module in policy.models[0].modules() if isinstance(module, Router)][1]
    router.register_forward_hook(lambda module, args, outputs: chosen.append(outputs[1].sum(0).float()))
    policy.with_old_logprobs(random_batch(cfg, 2, 256))
    load = sum(chosen)
    return load / load.mean()


def test_random_experts_of_a_wide_model_are_used_evenly_where_embeddings_are_large():
    """The ledger's mixtures need this: by default layers add larger values than embeddings, alike for all tokens."""
    model = small_model(
        (2, 2048, 16, 2, 128, 1024), experts=(32, 2, 128), initializer_range=0.02, max_position_embeddings=512
    )
    cfg = run_config(model=model, max_tokens=512)
    (small,), (large,) = (run_ranks(1, _loads, cfg, embedding_range) for embedding_range in (None, 1.0))
    assert small.max() > 3 and small.min() < 0.05
    assert large.max() < 2 and large.min() > 0.4
