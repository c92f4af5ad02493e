"""Adam with moments in BF16 or FP8: values against FP32 arithmetic, bytes against the estimate, exact resumes."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.preflight.memory import GPUS
from megatron_fp8rl.preflight.rules import check
from megatron_fp8rl.preflight.trainer_memory import worst_rank
from megatron_fp8rl.trainer.optimizer.states import decoded, encoded
from tests.dist.test_checkpoint import _build, _save_and_go_on, assert_a_resume_changes_no_bit
from tests.helpers.configs import make
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, SMOOTH_ADAM, continue_training, run_config

STATES = ("fp32", "bf16", "fp8")


def _cfg(states: str, **fields):
    return run_config(params="bf16", optim=replace(SMOOTH_ADAM, states=states), **fields)


def _moments(policy) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(master weight, first and second moment in FP32) of all parameters on this rank."""
    with policy.optimizer.states.expanded():
        return [
            (parameter.clone(), state["exp_avg"].float().clone(), state["exp_avg_sq"].float().clone())
            for part in policy.optimizer._parts
            for parameter, state in part.optimizer.state.items()
        ]


def _bytes_of_states(policy) -> int:
    tensors = [
        tensor
        for part in policy.optimizer._parts
        for parameter, state in part.optimizer.state.items()
        for tensor in (parameter, *(value for name, value in state.items() if name != "step"))
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _trained(cfg):
    """On a rank: (moments after one update, losses of five, bytes of the states)."""
    policy = _build(cfg)
    metrics, _ = continue_training(policy, 1)
    first = _moments(policy)
    metrics += continue_training(policy, 4)[0]
    return first, [step["train/loss/mean"] for step in metrics], _bytes_of_states(policy)


def test_codes_are_the_nearest_values_and_are_kept_when_encoded_again():
    generator = torch.Generator().manual_seed(1)
    for size in (1, 127, 128, 1000):
        values = torch.randn(size, generator=generator) * torch.exp(4 * torch.randn(size, generator=generator)) * 1e-6
        values[: size // 3] = 0
        values = values.bfloat16()
        codes, scales = encoded(values)
        assert codes.abs().float().max() <= 448 and torch.equal(
            torch.frexp(scales.float())[0], scales.float() * 0 + 0.5
        )
        once = decoded(codes, scales, size)
        step = scales.float().repeat_interleave(128, dim=1).flatten()[:size]
        exponent = torch.frexp(values.float() / step)[1].clamp(min=-5)  # 2**-9 is the least E4M3 value
        half = torch.ldexp(step, exponent - 5)
        assert ((once.float() - values.float()).abs() <= half).all()
        assert torch.equal(decoded(*encoded(once), size), once)


@pytest.fixture(scope="module")
def runs():
    return {states: run_ranks(1, _trained, _cfg(states))[0] for states in STATES}


def test_one_update_rounds_the_moments_and_changes_no_weight(runs):
    """Adam computes in FP32; the first update reads moments of zero, so reduced states do not change it."""
    for states in ("bf16", "fp8"):
        for (weight, m, v), (weight32, m32, v32) in zip(runs[states][0], runs["fp32"][0], strict=True):
            assert torch.equal(weight, weight32)
            assert torch.equal(v, v32.bfloat16().float())
            m_bf16 = m32.bfloat16()
            assert torch.equal(m, m_bf16.float() if states == "bf16" else decoded(*encoded(m_bf16), len(m)).float())


def test_losses_stay_close_and_are_not_equal(runs):
    for states in ("bf16", "fp8"):
        assert runs[states][1] == pytest.approx(runs["fp32"][1], abs=2e-2)
        assert runs[states][1] != runs["fp32"][1]


def test_estimated_bytes_are_those_of_the_tensors(runs):
    """Blocks of small parameters are padded, which the estimate leaves out."""
    for states in STATES:
        estimate = worst_rank(_cfg(states), GPUS["h200"], 1 << 37).part("optimizer states").num_bytes
        assert runs[states][2] == pytest.approx(estimate, rel=0.03 if states == "fp8" else 1e-3)
    assert runs["bf16"][2] * 12 == runs["fp32"][2] * 8


@pytest.mark.parametrize(
    ("states", "layout"), [("bf16", dict(world_size=2, expert=2)), ("fp8", dict(world_size=2))], ids=["bf16", "fp8"]
)
def test_a_resume_changes_no_bit(states, layout, tmp_path):
    cfg = _cfg(states, model=DENSE if states == "fp8" else run_config().model, **layout)
    assert_a_resume_changes_no_bit(cfg, tmp_path)


def _restored_moments(cfg, folder):
    from megatron_fp8rl.trainer import checkpoint

    policy, said = _build(cfg), []
    checkpoint.resume(folder, policy, said.append)
    return _moments(policy), said


def test_a_resume_with_other_states_rounds_and_says_so(tmp_path):
    fp32 = _cfg("fp32", model=DENSE)
    run_ranks(1, _save_and_go_on, fp32, str(tmp_path))
    ((saved, _),) = run_ranks(1, _restored_moments, fp32, str(tmp_path))
    ((restored, said),) = run_ranks(1, _restored_moments, _cfg("bf16", model=DENSE), str(tmp_path))
    for (weight, m, v), (weight32, m32, v32) in zip(restored, saved, strict=True):
        assert torch.equal(weight, weight32)
        assert torch.equal(m, m32.bfloat16().float()) and torch.equal(v, v32.bfloat16().float())
    (line,) = [line for line in said if "optim.states" in line]
    assert line == (
        "changed since then: optim.states was 'fp32', now 'bf16'; moments of the checkpoint are rounded to it"
    )


def test_what_would_never_decay_is_refused():
    (refused,) = check(make(optim__states="bf16", optim__beta2=0.999), accelerator="cpu")
    assert str(refused).startswith("--optim.beta2 = 0.999: is so near 1 that a moment in BF16 never decays")
    assert str(refused).endswith("Set less than 0.9961, or --optim.states fp32.")
    (refused,) = check(make(optim__states="fp8", optim__beta1=0.95), accelerator="cpu")
    assert str(refused).startswith("--optim.beta1 = 0.95: is so near 1 that a moment in FP8 never decays")
    (refused,) = check(make(optim__states="bf16", optim__optimizer="muon"), accelerator="cpu")
    assert str(refused).startswith("--optim.states = 'bf16': reduces Adam's moments")
    assert check(make(optim__states="fp8"), accelerator="cpu") == []
    for decay, kind in ((0.996, torch.bfloat16), (0.93, torch.float8_e4m3fn)):  # the limits are where rounding is
        values = torch.arange(128, 256).to(torch.bfloat16) if kind == torch.bfloat16 else torch.arange(8.0, 16).to(kind)
        assert ((values.float() * decay).to(kind).float() < values.float()).all()
        stuck = (values.float() * (1 - (1 - decay) / 3)).to(kind).float() == values.float()
        assert stuck.any()
