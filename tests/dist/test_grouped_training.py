"""Training with grouped experts, as a CPU computes them: in Megatron-Core's buffers, layouts and checkpoints."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.model import experts
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import (
    MOE,
    assert_equal_gradients,
    assert_same_training,
    continue_training,
    first_gradients,
    full_weights,
    run_config,
    weight_pieces,
)

MODEL = replace(MOE, num_layers=2, hidden_size=128, moe_ffn_hidden_size=256)
PRECISIONS = {"bf16": PrecisionConfig(trainer="bf16", rollout="bf16"), "fp8": PrecisionConfig(bf16_last_layers=1)}


def _config(name: str, layout: dict, **optim):
    settings = OptimConfig(**{"lr": 2e-3, "eps": 1e-2, "weight_decay": 0.1} | optim)
    cfg = run_config(model=MODEL, optim=settings, max_tokens=96, **layout)
    return replace(cfg, precision=PRECISIONS[name])


def _train_twice(cfg) -> list:
    """Runs on a rank: (metrics, old log-probabilities, weights) with the linears' kernels, and with grouped ones."""
    parallel, runs, views, edges = Parallel.init(cfg.parallel, deadline_s=60), [], [], []
    with pytest.MonkeyPatch.context() as patch:
        real, real_edges = experts.stacked, experts._edges
        patch.setattr(experts, "stacked", lambda tensors: views.append(real(tensors)) or views[-1])
        patch.setattr(experts, "_edges", lambda *halves: edges.append(real_edges(*halves)) or edges[-1])
        for kind in ("te", "deep_gemm"):
            policy = Policy.build(replace(cfg, precision=replace(cfg.precision, kernels={"experts": kind})), parallel)
            metrics, old = continue_training(policy, 3)
            runs.append((metrics, old, weight_pieces(policy)))
    parallel.barrier("done")
    return [*runs, len(views), sum(view is None for view in views), {len(seen) for seen in edges}]


@pytest.mark.parametrize(
    "name, layout, optim",
    [
        ("bf16", {}, {"overlap_grad_reduce": True}),
        ("fp8", {"world_size": 2, "expert": 2}, {"recompute": "full"}),
        ("fp8", {"world_size": 2, "tensor": 2, "expert_tensor": 2}, {"overlap_grad_reduce": True}),
        ("fp8", {}, {"recompute": "selective"}),
    ],
    ids=["bf16-overlap", "fp8-ep2-recompute", "fp8-etp2-overlap", "fp8-moe-recompute"],
)
def test_training_is_that_of_the_linears(name, layout, optim):
    ranks = run_ranks(layout.get("world_size", 1), _train_twice, _config(name, layout, **optim))
    for plain, ours, num_views, num_copies, num_edges in ranks:
        assert num_views and not num_copies, "weights and gradients of experts lie apart"
        assert num_edges == {2}, "autograd sees more than a weight of each linear"
        assert_same_training(plain, ours)
        for key, (_, weight) in plain[2].items():
            assert (ours[2][key][1] - weight).float().norm() < 1e-2 * weight.float().norm(), key


@pytest.mark.parametrize("name, layout", [("bf16", {}), ("fp8", {"world_size": 2, "tensor": 2, "expert": 2})])
def test_recompute_changes_no_bit_of_a_gradient(name, layout):
    ranks = []
    for recompute in ("none", "selective"):
        cfg = _config(name, layout, recompute=recompute)
        cfg = replace(cfg, precision=replace(cfg.precision, kernels={"experts": "deep_gemm"}))
        ranks.append(run_ranks(cfg.parallel.world_size, first_gradients, cfg))
    assert_equal_gradients(*ranks)


def _save(cfg, folder):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    continue_training(policy, 1)
    checkpoint.save(folder, 1, policy, {})
    return weight_pieces(policy), _moments(policy)


def _restore(cfg, folder):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    checkpoint.restore(checkpoint.latest(folder), policy)
    return weight_pieces(policy), _moments(policy)


def _moments(policy) -> float:
    """Sum of squares of Adam's moments on this rank; independent of the layout."""
    parts = policy.optimizer.megatron.chained_optimizers
    states = [state for part in parts for state in part.optimizer.state.values()]
    return sum(float(state["exp_avg"].double().square().sum()) for state in states)


@pytest.mark.parametrize("saved_by", ["deep_gemm", "te"])
def test_checkpoints_are_the_same_for_both(saved_by, tmp_path):
    loaded_by = {"deep_gemm": "te", "te": "deep_gemm"}[saved_by]
    cfg = _config("fp8", {"world_size": 2, "expert": 2})
    saved = run_ranks(
        2, _save, replace(cfg, precision=replace(cfg.precision, kernels={"experts": saved_by})), str(tmp_path)
    )
    one = _config("fp8", {})
    actual = run_ranks(
        1, _restore, replace(one, precision=replace(one.precision, kernels={"experts": loaded_by})), str(tmp_path)
    )
    weights, again = (full_weights(MODEL, [pieces for pieces, _ in ranks]) for ranks in (saved, actual))
    assert weights.keys() == again.keys()
    for key, weight in weights.items():
        assert torch.equal(again[key], weight), key
    assert sum(moments for _, moments in saved) == pytest.approx(sum(moments for _, moments in actual), rel=1e-9)
