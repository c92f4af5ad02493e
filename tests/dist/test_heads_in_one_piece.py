"""Attention with fused split, norm and rotation of heads trains like attention with separate steps."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.trainer.model import attention
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, continue_training, run_config, weight_pieces


def in_pieces(mixed_TW, groups, norms, eps, cos, sin):
    """The kernel's result by the functions that it replaces on a CPU."""
    width = 2 * cos.shape[-1]
    heads = mixed_TW.unflatten(1, (groups, -1, width))
    query, key, value = (part.flatten(1, 2) for part in heads.split([heads.shape[2] - 2, 1, 1], dim=2))
    if norms is not None:
        query, key = (float64.rms_norm(x, weight, eps) for x, weight in zip((query, key), norms, strict=True))
    return *(float64.rotate_halves(x, cos, sin) for x in (query, key)), value


def _train(cfg, is_one_piece: bool):
    from megatron_fp8rl.kernels.triton import rotate

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotate, "split_heads", lambda *given: calls.append(1) or in_pieces(*given))
        patch.setattr(attention, "runs_triton", lambda x: is_one_piece)
        policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
        for model in policy.models:
            for module in model.modules():
                if isinstance(module, attention.PackedSelfAttention):
                    module.splits_heads = True
        metrics, _ = continue_training(policy, 2)
    assert bool(calls) == is_one_piece
    return metrics, weight_pieces(policy)


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    [
        pytest.param(MOE, dict(world_size=2, tensor=2), "full", id="tp2"),
        pytest.param(replace(DENSE, num_key_value_heads=4), dict(world_size=2, context=2), "none", id="cp2"),
        pytest.param(
            replace(DENSE, family="llama"), dict(world_size=2, pipeline=2), "selective", id="pp2_without_norms"
        ),
    ],
)
def test_training_is_the_same_to_the_bit(model, layout, recompute):
    cfg = run_config(model=model, params="bf16", **layout)
    cfg = replace(cfg, optim=replace(cfg.optim, recompute=recompute, recompute_modules=("core_attn", "mlp", "moe")))
    apart, one = (run_ranks(2, _train, cfg, is_one_piece) for is_one_piece in (False, True))
    for (metrics, weights), (same_metrics, same_weights) in zip(apart, one, strict=True):
        assert metrics == same_metrics
        assert all(torch.equal(weight, same_weights[name][1]) for name, (_, weight) in weights.items())
