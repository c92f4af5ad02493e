"""Adam in pieces on a GPU: streams of both directions change no bit. Run with -s for the speed."""

import time
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.trainer.optimizer import fp8_params
from tests.helpers.adam_states import make_adam, states_of
from tests.helpers.training import MOE, SMOOTH_ADAM, alone, run_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = [100_000_000, 1000] + 40 * [3_145_728, 1_572_864, 2048]  # 3.5 GB with moments


def test_no_bit_changes():
    fused = pytest.importorskip("transformer_engine.pytorch.optimizers").FusedAdam
    plain, _ = make_adam(fused, SIZES, "cuda:0")
    moved, offload = make_adam(fused, SIZES, "cuda:0")
    plain.step()
    moved.step()
    num_bytes = sum(x.nbytes for x in states_of(moved))
    offload.release("optimizer")
    for _ in range(3):
        plain.step()
        torch.cuda.synchronize()
        before, started = torch.cuda.memory_allocated(), time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        with offload.streamed():
            moved.step()
        seconds = time.monotonic() - started
        peak = torch.cuda.max_memory_allocated() - before
        print(f"\n{num_bytes / 1e9:.1f} GB out and back in {seconds:.3f} s, at most {peak / 1e9:.1f} GB at once")
        assert torch.cuda.memory_allocated() == before and peak < 0.9 * num_bytes
    offload.restore()
    assert all(torch.equal(a, b) for a, b in zip(states_of(plain), states_of(moved), strict=True))
    assert [group["step"] for group in plain.param_groups] == [group["step"] for group in moved.param_groups] == [4, 4]


def _after_steps(policy, *, streams: bool) -> list[torch.Tensor]:
    """All training state after four steps with random gradients: backward passes may sum in any order."""
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(4):
        policy.offload.release("optimizer")
        policy.optimizer.zero_gradients()
        for _, parameter in policy.named_parameters():
            parameter.main_grad.copy_(1e-3 * torch.randn(parameter.shape, generator=generator, device="cuda"))
        with policy.offload.streamed() if streams else policy.offload.resident("optimizer"):
            policy.optimizer.step(1e-3)
    policy.offload.restore()
    tensors = (*policy.offload._params(), *policy.offload._states())
    return [tensor.detach().reshape(-1).view(torch.uint8).cpu() for tensor in tensors]


@pytest.mark.parametrize("states", ["fp32", "bf16", "fp8"])
def test_a_policy_reaches_the_same_bits(states, monkeypatch):
    from megatron_fp8rl.trainer.policy import Policy

    monkeypatch.setattr(fp8_params, "_MASTERS_AT_A_TIME", 20_000)
    cfg = run_config(model=MOE, params="bf16", optim=replace(SMOOTH_ADAM, states=states, offload=("optimizer",)))
    with alone(cfg) as parallel:
        resident, streamed = (_after_steps(Policy.build(cfg, parallel), streams=streams) for streams in (False, True))
    assert len(resident) > 10
    assert all(torch.equal(a, b) for a, b in zip(resident, streamed, strict=True))
