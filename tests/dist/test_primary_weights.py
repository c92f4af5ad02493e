"""FP8 primary weights in Megatron-Core's buffers, optimizer and checkpoints, with a stand-in for Transformer Engine.

With power-of-two scales a run must not change by a bit: what is multiplied are the bytes of the BF16 parameters that
are not kept.
"""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.kernels.blockwise import dequantize_weight, quantize_weight
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, is_fp8
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.model import build as model
from megatron_fp8rl.trainer.model.build import named_linears
from megatron_fp8rl.trainer.optimizer import fp8_params
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.models import latent, small_model
from tests.helpers.training import continue_training, run_config

MOE = small_model((3, 256, 2, 1, 128, 62), experts=(4, 2, 128), max_position_embeddings=128, initializer_range=0.08)
DENSE = small_model((3, 256, 4, 2, 128, 62), ffn=256, max_position_embeddings=128, initializer_range=0.08)
LATENT = latent(MOE)
# Nothing is clipped: the order in which the norm is summed depends on the buffers that parameters lie in.
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, clip_grad_norm=0.0)
PRECISION = PrecisionConfig(trainer="blockwise", bf16_last_layers=1, kernels={"linears": "te", "experts": "te"})


def _config(model, params="fp8", *, scales="pow2", overlap=False, offload=(), **layout):
    optim = replace(OPTIM, overlap_grad_reduce=overlap, offload=offload)
    cfg = run_config(model=model, optim=optim, max_tokens=48, **layout)
    return replace(cfg, precision=replace(PRECISION, params=params, scales=scales))


class _StandIns:
    """Emulated Transformer Engine kernels and tensors on this rank, and policies that use them."""

    def __init__(self, cfg):
        from tests.helpers import fake_fp8_tensor, fake_te

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(fp8_params, "_MASTERS_AT_A_TIME", 2**17)  # two groups or more, as of a large model
        fake_te.install(self.patch)
        fake_fp8_tensor.install(self.patch)
        self.patch.setattr(model, "local_hardware", lambda: Hardware("hopper"))
        self.parallel = Parallel.init(cfg.parallel, deadline_s=60)

    def policy(self, cfg):
        return Policy.build(cfg, self.parallel)


def _values(policy) -> dict[str, torch.Tensor]:
    """Operands of this rank's products: values of FP8 weights, otherwise parameters."""
    result = {name: None if is_fp8(p) else p.detach().clone() for name, p in policy.named_parameters()}
    for names, linear in named_linears(policy.models, policy.parallel):
        if linear.recipe is None:
            continue
        matrices = [p for p in linear.parameters() if p.ndim == 2]
        matrices = matrices[::-1] if len(names) > 1 else matrices
        for name, matrix in zip(names, matrices, strict=True):
            scales = policy.cfg.precision.scales
            held = fp8_weight(matrix) if is_fp8(matrix) else quantize_weight(matrix.detach(), scales)
            result[name] = dequantize_weight(*held)
    return result


def _masters(policy) -> list[torch.Tensor]:
    megatron = policy.optimizer.megatron
    parts = getattr(megatron, "chained_optimizers", [megatron])
    return [p.detach().clone() for part in parts for group in part.optimizer.param_groups for p in group["params"]]


def _train_both(cfg, num_updates):
    """On a rank: (metrics, values, bytes of parameters) with FP8 and with BF16 parameters, and the calls."""
    from tests.helpers import fake_fp8_tensor

    stand_ins, runs = _StandIns(cfg), []
    for params in ("fp8", "bf16"):
        policy = stand_ins.policy(replace(cfg, precision=replace(cfg.precision, params=params)))
        metrics, _ = continue_training(policy, num_updates)
        buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        runs.append((metrics, _values(policy), sum(b.param_data.nbytes for b in buffers)))
    stand_ins.parallel.barrier("done")
    return *runs, dict(fake_fp8_tensor.calls)


@pytest.mark.parametrize(
    "model, layout",
    [
        (DENSE, {}),
        (DENSE, {"world_size": 2}),
        (DENSE, {"world_size": 2, "overlap": True}),
        (DENSE, {"world_size": 2, "tensor": 2}),
        (replace(DENSE, num_layers=4), {"world_size": 2, "pipeline": 2}),
        (DENSE, {"world_size": 2, "context": 2}),
        (MOE, {}),
        (MOE, {"world_size": 2, "expert": 2}),
        (LATENT, {}),
    ],
    ids=lambda value: "_".join(map(str, value)) or "one" if isinstance(value, dict) else value.family,
)
def test_training_does_not_change_by_a_bit(model, layout):
    cfg = _config(model, **layout)
    for fp8, bf16, calls in run_ranks(cfg.parallel.world_size, _train_both, cfg, 3):
        assert calls["cast"] >= 6 and calls["gathered"] >= 3
        _assert_same_metrics(fp8[0], bf16[0])
        assert fp8[1].keys() == bf16[1].keys()
        for name, values in bf16[1].items():
            assert torch.equal(fp8[1][name], values), name
        assert fp8[2] < 0.8 * bf16[2]  # embedding, head and one layer stay BF16


def _assert_same_metrics(actual, expected):
    """Bit-equal, except the norm, whose sum has another order."""
    norm = "train/grad_norm/max"
    for a, b in zip(actual, expected, strict=True):
        assert a[norm] == pytest.approx(b[norm], rel=1e-5)
        assert a | {norm: 0} == b | {norm: 0}


def test_masters_are_rounded_some_at_a_time(monkeypatch):
    monkeypatch.setattr(fp8_params, "_MASTERS_AT_A_TIME", 8)
    groups = [list(range(10))[some] for some in fp8_params.consecutive([3, 5, 1, 20, 8, 2, 2, 4, 1, 1])]
    assert groups == [[0, 1], [2], [3], [4], [5, 6, 7], [8, 9]]
    assert not list(fp8_params.consecutive([]))


def _checkpoints(cfg, folder):
    """On a rank: values and masters when saved, after loading into each kind of parameters, and two updates later."""
    stand_ins, result = _StandIns(cfg), {}
    for saved in ("fp8", "bf16"):
        first = stand_ins.policy(replace(cfg, precision=replace(cfg.precision, params=saved)))
        continue_training(first, 2)
        path = checkpoint.save(f"{folder}/{saved}", 2, first, {})
        result[saved] = _values(first), _masters(first), continue_training(first, 2)[0]
        for loaded in ("fp8", "bf16"):
            other = replace(cfg, seed=7, precision=replace(cfg.precision, params=loaded))
            second = stand_ins.policy(other)
            checkpoint.restore(path, second)
            result[saved, loaded] = _values(second), _masters(second), continue_training(second, 2)[0]
    stand_ins.parallel.barrier("done")
    return result


@pytest.mark.parametrize(
    "cfg",
    [_config(DENSE, world_size=2), _config(MOE, world_size=2, expert=2), _config(DENSE, world_size=2, tensor=2)],
    ids=["dp2", "moe_ep2", "tp2"],
)
def test_checkpoints_go_both_ways_and_resume_exactly(cfg, tmp_path):
    for actual in run_ranks(2, _checkpoints, cfg, str(tmp_path)):
        for saved in ("fp8", "bf16"):
            values, masters, metrics = actual[saved]
            for loaded in ("fp8", "bf16"):
                other_values, other_masters, other_metrics = actual[saved, loaded]
                for name, value in values.items():
                    assert torch.equal(other_values[name], value), (saved, loaded, name)
                # FP8 and BF16 parameters lie in different buffers, so that ranks hold other parts of the masters.
                if saved == loaded:
                    assert all(map(torch.equal, other_masters, masters))
                _assert_same_metrics(other_metrics, metrics)


def _go_away_and_come_back(cfg):
    stand_ins = _StandIns(cfg)
    policy, other = stand_ins.policy(cfg), stand_ins.policy(replace(cfg, optim=replace(cfg.optim, offload=())))
    for each in (policy, other):
        continue_training(each, 1)
    policy.offload.release("params", "gradients", "optimizer")
    held = [p for p in policy.models[0].parameters() if is_fp8(p)]
    left = sum(p._rowwise_data.untyped_storage().nbytes() + (p._columnwise_data is not None) for p in held)
    policy.offload.restore()
    return left, continue_training(policy, 2)[0] == continue_training(other, 2)[0]


def test_bytes_wait_in_host_memory_while_engines_sample():
    cfg = _config(DENSE, offload=("params", "gradients", "optimizer"))
    assert run_ranks(1, _go_away_and_come_back, cfg) == [(0, True)]


def _build(cfg):
    _StandIns(cfg).policy(cfg)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"model": replace(DENSE, head_dim=64)}, "heads of 64 rows do not fill blocks of 128"),
        ({"precision": replace(PRECISION, params="fp8", trainer="tensorwise")}, "one scale per weight"),
    ],
)
def test_a_linear_that_cannot_is_named(change, problem):
    with pytest.raises(RankError, match=problem):
        run_ranks(1, _build, replace(_config(DENSE), **change))
