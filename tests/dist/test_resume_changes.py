"""A resume with changed fields applies each of them, names each of them, or is refused."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.training import DENSE, MOE, SMOOTH_ADAM, continue_training, run_config, weight_pieces

CHANGED = replace(SMOOTH_ADAM, lr=2e-3, min_lr=1e-3, decay="linear", beta1=0.6, beta2=0.7, eps=1e-4, weight_decay=0.3)


def _build(cfg):
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def _save(cfg, folder):
    policy = _build(cfg)
    continue_training(policy, 2)
    checkpoint.save(folder, 2, policy, {})
    return policy


def _save_change_and_go_on(cfg, optim, folder):
    """On a rank: save, change the hyperparameters in place, and train on without a restart."""
    policy = _save(cfg, folder)
    policy.cfg = replace(cfg, optim=optim)
    policy.optimizer._weight_decay = optim.weight_decay
    for part in policy.optimizer._parts:
        for group in part.optimizer.param_groups:
            group["betas"], group["eps"] = (optim.beta1, optim.beta2), optim.eps
    metrics, _ = continue_training(policy, 2)
    return metrics, weight_pieces(policy)


def _resume_and_go_on(cfg, folder):
    policy, said = _build(cfg), []
    checkpoint.resume(folder, policy, said.append)
    metrics, _ = continue_training(policy, 2)
    return metrics, weight_pieces(policy), said


@pytest.mark.core
@pytest.mark.parametrize(
    "cfg",
    [run_config(model=DENSE), run_config(model=MOE, params="bf16", world_size=2, expert=2)],
    ids=["dense", "expert2"],
)
def test_changed_hyperparameters_are_those_of_a_change_without_a_restart(cfg, tmp_path):
    cfg = replace(cfg, num_steps=6)
    optim = replace(CHANGED, max_tokens_per_microbatch=cfg.optim.max_tokens_per_microbatch)
    world_size = cfg.parallel.world_size
    straight = run_ranks(world_size, _save_change_and_go_on, cfg, optim, str(tmp_path))
    resumed = run_ranks(world_size, _resume_and_go_on, replace(cfg, optim=optim), str(tmp_path))
    for (metrics, weights), (metrics_again, weights_again, said) in zip(straight, resumed, strict=True):
        assert metrics_again == metrics
        assert all(torch.equal(weights_again[name][1], weight) for name, (_, weight) in weights.items())
        assert "changed since then: optim.lr was 0.01, now 0.002" in said
        assert "changed since then: optim.beta1 was 0.9, now 0.6" in said
        assert len(said) == 8
    assert metrics[0]["train/lr/mean"] == pytest.approx(1e-3 + 1e-3 * 0.5)  # update 3 of 6


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"trainer": "bf16"}, {"trainer": "delayed"}),
        ({"trainer": "delayed"}, {"trainer": "bf16"}),
        ({"trainer": "delayed", "bf16_first_layers": 1}, {"trainer": "delayed"}),
        ({"trainer": "bf16", "params": "fp32"}, {"trainer": "blockwise", "params": "bf16"}),
    ],
    ids=["to_delayed", "from_delayed", "delayed_layers", "master_weights"],
)
def test_another_precision_continues_with_the_same_weights(before, now, tmp_path):
    cfg = run_config(params="bf16")
    write, read = (replace(cfg, precision=replace(cfg.precision, **fields)) for fields in (before, now))
    run_ranks(1, _saved, write, str(tmp_path))
    ((weights, said),) = run_ranks(1, _restored, read, str(tmp_path))
    ((expected, _),) = run_ranks(1, _restored, write, str(tmp_path))
    for name, (_, weight) in expected.items():
        torch.testing.assert_close(weights[name][1].bfloat16(), weight.bfloat16(), rtol=0, atol=0)
    assert any(line.startswith("changed since then: precision.") for line in said)


def _saved(cfg, folder):
    _save(cfg, folder)


def _restored(cfg, folder):
    policy, said = _build(cfg), []
    checkpoint.resume(folder, policy, said.append)
    weights = weight_pieces(policy)
    continue_training(policy, 1)
    return {name: (rank, piece.clone()) for name, (rank, piece) in weights.items()}, said


def test_another_model_is_refused_by_the_name_of_the_field(tmp_path):
    cfg = run_config(model=DENSE)
    run_ranks(1, _saved, cfg, str(tmp_path))
    other = replace(cfg, model=replace(DENSE, rope_theta=5e5))
    with pytest.raises(RankError, match=r"CheckpointError: .*--model.rope_theta = 500000.0: is 1000000.0 in "):
        run_ranks(1, _resume_and_go_on, other, str(tmp_path))
