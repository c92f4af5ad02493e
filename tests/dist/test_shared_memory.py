"""FP8 linears whose BF16 weights lie in the memory of their gradients: no bit of training changes, and nothing reads
the one for the other."""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.matmul_shapes import fits_deep_gemm
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches
from megatron_fp8rl.trainer.optimizer import shared_memory
from megatron_fp8rl.trainer.optimizer.optimizer import NonFiniteError
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, continue_training, make_batch, make_loss, run_config, weight_pieces

MODEL = replace(MOE, num_layers=2, hidden_size=128, moe_ffn_hidden_size=256)
TIED = replace(DENSE, hidden_size=128, ffn_hidden_size=256, head_dim=32, tie_embeddings=True)
EXPERTS, ALL = (
    PrecisionConfig(kernels={"experts": "deep_gemm"}),
    PrecisionConfig(kernels={"experts": "deep_gemm", "linears": "deep_gemm"}),
)
EDGE = {"bf16_last_layers": 1}
LAYOUTS = {
    "alone": (MODEL, {}, EXPERTS, {}),
    "dp2_mixed": (MODEL, dict(world_size=2), replace(ALL, **EDGE), {"overlap_grad_reduce": True}),
    "ep2_gather": (MODEL, dict(world_size=2, expert=2, dispatch="gather"), EXPERTS, {"recompute": "full"}),
    "pp2_vp2": (replace(MODEL, num_layers=4), dict(world_size=2, pipeline=2, virtual_stages=2), ALL, {}),
    "tp2_ep2_dp2": (MODEL, dict(world_size=4, tensor=2, expert=2), ALL, {"overlap_grad_reduce": True}),
    "dense_pp2_dp2": (TIED, dict(world_size=4, pipeline=2), replace(ALL, **EDGE), {"recompute": "selective"}),
}
PARTS = ("params", "gradients", "optimizer")


def _config(layout: str, **optim):
    model, parallel, precision, settings = LAYOUTS[layout]
    settings = OptimConfig(**{"lr": 2e-3, "eps": 1e-2, "weight_decay": 0.1} | settings | optim)
    return replace(run_config(model=model, optim=settings, max_tokens=96, **parallel), precision=precision)


def _policy(cfg):
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def _buffers(policy) -> list:
    return [buffer for chunk in policy.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _shared(policy) -> set[str]:
    """Names of the weights that lie in the memory of their gradients."""
    return {
        name
        for name, parameter in policy.named_parameters()
        if parameter.untyped_storage().data_ptr() == parameter.main_grad.untyped_storage().data_ptr()
    }


def _require_all_that_are_copied(policy) -> None:
    """Exactly the weights of FP8 linears on DeepGEMM share memory."""
    cfg, shared = policy.cfg, _shared(policy)
    table = LayerTable.build(cfg.model, cfg.precision)
    for name, parameter in policy.named_parameters():
        is_fp8 = table.trainer_format(registry.weight(name, cfg.model).parts[0][0]).is_quantized
        is_on_deep_gemm = ".experts." in name or cfg.precision.kernel("linears") == "deep_gemm"
        assert (name in shared) == (is_fp8 and is_on_deep_gemm and fits_deep_gemm(*parameter.shape)), name


def _train(cfg, folder, shares: bool):
    """Metrics and weights of four updates; after the second a checkpoint is saved."""
    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setattr(shared_memory.SharedMemory, "_share", lambda *unused: None)
        policy = _policy(cfg)
    assert bool(_shared(policy)) == shares
    if shares:
        _require_all_that_are_copied(policy)
    metrics = []
    for step in range(4):
        metrics += continue_training(policy, 1)[0]
        if cfg.optim.offload:
            policy.offload.release(*PARTS)
            assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in _buffers(policy))
        if step == 1 and folder is not None:
            checkpoint.save(folder, step, policy, {})
        policy.offload.restore("params", "gradients")  # an update fetches the optimizer's state
    return metrics, weight_pieces(policy), {name: tensor.clone() for name, tensor in policy.named_tensors()}


def _resume(cfg, folder):
    policy = _policy(cfg)
    checkpoint.restore(checkpoint.latest(folder), policy)
    return continue_training(policy, 2)[0], weight_pieces(policy)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "alone"])
def test_training_is_the_same_to_the_bit(layout, tmp_path):
    cfg, world = _config(layout), LAYOUTS[layout][1].get("world_size", 1)
    apart = run_ranks(world, _train, cfg, tmp_path / "apart", False)
    shared = run_ranks(world, _train, _config(layout, offload=PARTS), tmp_path / "shared", True)
    resumed = run_ranks(world, _resume, cfg, tmp_path / "shared")
    for (metrics, weights, published), (same_metrics, same_weights, same_published), (rest, end) in zip(
        apart, shared, resumed, strict=True
    ):
        assert metrics == same_metrics and metrics[2:] == rest
        for name, (_, weight) in weights.items():
            assert torch.equal(weight, same_weights[name][1]) and torch.equal(weight, end[name][1]), name
        assert all(torch.equal(tensor, same_published[name]) for name, tensor in published.items())


def _num_gathers(policy, update) -> set[int]:
    """How often the parameters of a bucket are gathered in an update."""
    counts = []
    for chunk in policy.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            counts.append(Mock(side_effect=group.start_param_sync))
            group.start_param_sync = counts[-1]
    update()
    return {count.call_count for count in counts}


def _without_a_step(cfg):
    policy, loss = _policy(cfg), make_loss(cfg)
    assert _shared(policy)
    batch = policy.with_old_logprobs(make_batch(cfg, policy.parallel.dp_rank))
    assert _num_gathers(policy, lambda: policy.update(batch, loss)) == {1}, "parameters are gathered more than once"
    before = weight_pieces(policy)
    batch = policy.with_old_logprobs(batch)
    old = [mb.old_logprobs_T for mb in batch.microbatches]
    policy.accumulate_gradients(batch, loss)
    again = policy.with_old_logprobs(batch)  # of the copies
    assert all(map(torch.equal, old, [mb.old_logprobs_T for mb in again.microbatches]))
    for reads in (policy.named_tensors, lambda: checkpoint.save("unused", 1, policy, {})):
        with pytest.raises(RuntimeError, match="gradients have replaced the weights"):
            reads()
    clear_weight_caches()
    with pytest.raises(RuntimeError, match=r"weights were changed .*rebuild_parameters"):
        policy.with_old_logprobs(batch)
    policy.optimizer.rebuild_parameters()
    again = policy.with_old_logprobs(batch)
    assert all(map(torch.equal, old, [mb.old_logprobs_T for mb in again.microbatches]))

    def broken(inputs):
        value, metrics = loss(inputs)
        return value * float("nan"), metrics

    policy.offload.release("optimizer")
    with pytest.raises(NonFiniteError):
        policy.update(batch, broken)
    assert policy.offload.offloaded == ("optimizer",)
    assert all(torch.equal(piece, before[name][1]) for name, (_, piece) in weight_pieces(policy).items())
    policy.parallel.barrier("done")


@pytest.mark.parametrize("layout", ["dp2_mixed", "ep2_gather"])
def test_weights_are_never_read_from_gradients(layout):
    run_ranks(2, _without_a_step, _config(layout, offload=("optimizer",)))


def _in_any_order(cfg):
    """Gradients leave without the weights in their memory; parts move in any order."""
    policy = _policy(cfg)
    before = weight_pieces(policy)
    (dense,), (experts,) = policy.chunks[0].buffers, policy.chunks[0].expert_parallel_buffers

    def sizes() -> list[int]:
        return [buffer.grad_data.untyped_storage().nbytes() for buffer in (dense, experts)]

    def require_weights() -> None:
        assert all(torch.equal(piece, before[name][1]) for name, (_, piece) in weight_pieces(policy).items())

    whole = sizes()
    for first, second in itertools.permutations(("params", "gradients")):
        policy.offload.release("gradients")
        assert sizes() == [0, experts.param_data.nbytes]
        require_weights()
        policy.offload.restore()
        for released, restored in itertools.product(((first, second), (second, first)), repeat=2):
            policy.offload.release(released[0])
            policy.offload.release(released[1])
            assert sizes() == [0, 0]
            policy.offload.restore(restored[0])
            policy.offload.restore(restored[1])
            assert sizes() == whole and policy.offload.offloaded == ()
            require_weights()
    return continue_training(policy, 1)[0], weight_pieces(policy)


def test_offloaded_gradients_do_not_take_weights_along():
    (actual,) = run_ranks(1, _in_any_order, _config("alone", offload=("params", "gradients")))
    ((metrics, _, _),) = run_ranks(1, _train, _config("alone"), None, True)
    assert actual[0] == metrics[:1]


def _shares(cfg) -> bool:
    return bool(_shared(_policy(cfg)))


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionConfig(trainer="bf16", rollout="bf16", kernels={"experts": "deep_gemm"}),
        PrecisionConfig(kernels={"experts": "te"}),
    ],
)
def test_weights_that_are_multiplied_in_bf16_or_elsewhere_stay(precision):
    assert run_ranks(1, _shares, replace(_config("alone"), precision=precision)) == [False]
