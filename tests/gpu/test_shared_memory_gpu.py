"""Weights in the memory of their gradients on a GPU: what it frees, and that no forward pass reads one for the other.

Run with -s for sizes.
"""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from tests.gpu.test_offload_gpu import BIG, BIG_MOE
from tests.helpers.dist import run_ranks
from tests.helpers.training import make_batch, make_loss, run_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FP8 = PrecisionConfig(kernels={"linears": "deep_gemm", "experts": "deep_gemm"}, exact=False)


def _play(cfg, shares: bool) -> tuple[int, int, float]:
    """Runs on a rank: (bytes after an update, weights in the memory of gradients, loss of the first update)."""
    from megatron_fp8rl.trainer.optimizer import shared_memory
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    with pytest.MonkeyPatch.context() as patch:
        if not shares:
            patch.setattr(shared_memory.SharedMemory, "_share", lambda *unused: None)
        policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    batch, loss, metrics = make_batch(cfg, 0), make_loss(cfg), []

    def logprobs() -> torch.Tensor:
        return torch.cat([mb.old_logprobs_T for mb in policy.with_old_logprobs(batch).microbatches]).cpu()

    for _ in range(2):
        before = logprobs()
        policy.accumulate_gradients(policy.with_old_logprobs(batch), loss)
        assert torch.equal(logprobs(), before), "the copies are not those of the weights"
        policy.optimizer.rebuild_parameters()
        assert torch.equal(logprobs(), before), "masters do not give the weights again"
        metrics.append(policy.update(policy.with_old_logprobs(batch), loss))
        assert not torch.equal(logprobs(), before), "the update changed nothing"
    after = logprobs()
    policy.optimizer.rebuild_parameters()
    assert torch.equal(logprobs(), after), "a step left other weights than its masters'"
    torch.cuda.empty_cache()
    shared = [
        parameter.numel()
        for _, parameter in policy.named_parameters()
        if parameter.untyped_storage().data_ptr() == parameter.main_grad.untyped_storage().data_ptr()
    ]
    return torch.cuda.memory_allocated(), sum(shared), metrics[0]["train/loss/mean"]


@pytest.mark.parametrize("model", [BIG, BIG_MOE], ids=["dense", "moe"])
def test_weights_take_no_memory_of_their_own(model):
    cfg = replace(run_config(model=model), precision=FP8)
    ((apart, none, expected),) = run_ranks(1, _play, cfg, False, deadline_s=100)
    ((shared, num, loss),) = run_ranks(1, _play, cfg, True, deadline_s=100)
    mib = f"{apart / 2**20:.0f} MiB, then {shared / 2**20:.0f}"
    print(f"\n{model.family}: {num / 1e6:.0f} M weights in the memory of gradients; {mib}")
    assert not none and num > 10_000_000 and loss == expected
    assert apart - shared == pytest.approx(2 * num, rel=0.03)
