"""Adam's moments in BF16 and FP8 on Transformer Engine's FusedAdam: bytes, losses, resumes; -s shows them."""

import gc
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.precision.hardware import installed_packages
from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.preflight.trainer_memory import worst_rank
from tests.helpers.models import small_model
from tests.helpers.training import SMOOTH_ADAM, alone, continue_training, run_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]

BIG = small_model((2, 2048, 16, 4, 128, 62), ffn=8192, max_position_embeddings=128, initializer_range=0.02)
SMALL = small_model((2, 256, 4, 2, 128, 62), ffn=512, max_position_embeddings=128, initializer_range=0.08)
STATES = ("fp32", "bf16", "fp8")
PRECISIONS = {
    "bf16": PrecisionConfig(trainer="bf16", exact=False),
    "FP8 parameters": PrecisionConfig(
        trainer="blockwise", params="fp8", kernels={"linears": "te", "experts": "te"}, exact=False
    ),
    "FP32 parameters": PrecisionConfig(trainer="bf16", params="fp32", exact=False),
    "weights in the memory of gradients": PrecisionConfig(
        trainer="blockwise", kernels={"linears": "deep_gemm", "experts": "deep_gemm"}, exact=False
    ),
}


def _cfg(model, states: str, precision: str = "bf16") -> RunConfig:
    cfg = run_config(model=model, optim=replace(SMOOTH_ADAM, lr=1e-3, states=states, offload=("optimizer",)))
    return replace(cfg, precision=PRECISIONS[precision])


def _policy(cfg: RunConfig, parallel):
    from megatron_fp8rl.trainer.policy import Policy

    gc.collect()
    torch.cuda.empty_cache()
    return Policy.build(cfg, parallel)


def _step(policy, seed: int) -> None:
    """An update with random gradients: backward passes may sum in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with policy.offload.resident("optimizer"):
        policy.optimizer.zero_gradients()
        for _, parameter in policy.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.main_grad.copy_(gradient * 1e-3)
        policy.optimizer.step(1e-3)


def _state(policy) -> list[torch.Tensor]:
    """Master weights, moments and weights, on the host."""
    with policy.offload.resident("optimizer"), policy.optimizer.states.expanded():
        inner = [part.optimizer for part in policy.optimizer._parts if not part.is_stub_optimizer]
        state = [
            tensor.float().cpu()
            for optimizer in inner
            for group in optimizer.param_groups
            for master in group["params"]
            for tensor in (master.detach(), *(optimizer.state[master][key] for key in ("exp_avg", "exp_avg_sq")))
        ]
    return state + [parameter.detach().float().cpu() for _, parameter in policy.named_parameters()]


def test_states_take_the_estimated_bytes_and_losses_stay_close():
    losses, bytes_of, weights = {}, {}, {}
    with alone(_cfg(BIG, "fp32")) as parallel:
        for states in STATES:
            cfg = _cfg(BIG, states)
            policy = _policy(cfg, parallel)
            metrics, _ = continue_training(policy, 8)
            policy.offload.restore()
            before = torch.cuda.memory_allocated()
            policy.offload.release("optimizer")
            bytes_of[states] = before - torch.cuda.memory_allocated()
            estimate = worst_rank(cfg, GPUS["h200"], 1 << 37).part("optimizer states").num_bytes
            losses[states] = [step["train/loss/mean"] for step in metrics]
            print(
                f"\nADAM {states:5s} {bytes_of[states] / 2**20:8.1f} MiB allocated, estimated {estimate / 2**20:8.1f}; "
                f"losses {[round(loss, 4) for loss in losses[states]]}"
            )
            assert bytes_of[states] == pytest.approx(estimate, rel=0.01)
            del policy
        for states in STATES:
            policy = _policy(_cfg(SMALL, states), parallel)
            _step(policy, 1)
            weights[states] = [parameter.detach().clone() for _, parameter in policy.named_parameters()]
            del policy
    for states in ("bf16", "fp8"):
        assert losses[states][:1] == losses["fp32"][:1]
        assert losses[states] == pytest.approx(losses["fp32"], abs=0.05)
        pairs = zip(weights[states], weights["fp32"], strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs), f"{states}: the first update reads no moments"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("states", ["bf16", "fp8"])
def test_a_resume_changes_no_bit(states, precision, tmp_path):
    from megatron_fp8rl.trainer import checkpoint

    cfg = _cfg(SMALL, states, precision)
    with alone(cfg) as parallel:
        policies = [_policy(cfg, parallel) for _ in range(2)]
        continue_training(policies[0], 2)
        _step(policies[0], 1)
        checkpoint.restore(checkpoint.save(str(tmp_path), 1, policies[0], {}), policies[1])
        for seed in (None, 2, 3):
            if seed:
                for policy in policies:
                    _step(policy, seed)
            straight, resumed = map(_state, policies)
            assert all(torch.isfinite(tensor).all() for tensor in straight)
            differing = sum(not torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
            print(f"\nADAM resume {states} {precision}: {differing} of {len(straight)} tensors differ, seed {seed}")
            assert not differing


def test_unused_parameters_keep_zeros_and_not_nan():
    """FusedAdam's own FP8 moments: a scale of zero makes NaN. That is why they are not used."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.ones(256, device="cuda"))
    adam = FusedAdam([weight], exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.bfloat16)
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        adam.step()
    print(f"\nADAM FusedAdam with FP8 moments after two gradients of zero: {weight[0].item()}")
    with alone(_cfg(SMALL, "fp8")) as parallel:
        policy = _policy(_cfg(SMALL, "fp8"), parallel)
        for _ in range(2):
            with policy.offload.resident("optimizer"):
                policy.optimizer.zero_gradients()
                policy.optimizer.step(1e-3)
        assert all(torch.isfinite(tensor).all() for tensor in _state(policy))
