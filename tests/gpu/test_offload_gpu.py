"""Offloading of training state on a GPU: how much memory it frees, how fast, and that no bit changes.

Run with -s for sizes and speeds.
"""

import math
import time
from dataclasses import replace

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model
from tests.helpers.training import continue_training, make_batch, run_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PARTS = ("params", "gradients", "optimizer")
BYTES = {"params": 2, "gradients": 4, "optimizer": 12}  # of a parameter in BF16
WORKSPACES = 512 << 20  # of cuBLAS and Transformer Engine, at most
KEPT = 32 << 20
BIG = small_model((2, 2048, 16, 4, 128, 62), ffn=8192, max_position_embeddings=128, initializer_range=0.02)
BIG_MOE = small_model(
    (2, 1024, 8, 4, 128, 62), experts=(16, 2, 1024), max_position_embeddings=128, initializer_range=0.02
)


def _state(policy) -> list[torch.Tensor]:
    """Copies of all training state except gradients."""
    return [tensor.cpu() for tensor in (*policy.offload._params(), *policy.offload._states())]


def _play(cfg, folder) -> list[str]:
    """Runs on a rank: train, offload part by part, restore, save while away, train on. Returns lines to print."""
    from megatron_fp8rl.preflight.host_memory import host_memory
    from megatron_fp8rl.trainer import checkpoint
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel, host_memory(cfg, parallel.device))
    continue_training(policy, 2)
    state = _state(policy)
    batch = make_batch(cfg, 0)

    def logprobs() -> torch.Tensor:
        return torch.cat([mb.old_logprobs_T for mb in policy.with_old_logprobs(batch).microbatches]).cpu()

    expected = logprobs()
    num = sum(parameter.numel() for _, parameter in policy.named_parameters())
    lines = [f"{cfg.model.family}: {num / 1e6:.0f} M parameters"]
    for round_ in range(2):  # the second finds its host memory
        big = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        del big
        kept = torch.empty(KEPT, dtype=torch.uint8, device="cuda")  # noqa: F841  lies where that was, and stays
        torch.cuda.empty_cache()
        for part in ("gradients", "optimizer", "params"):
            used, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            started = time.monotonic()
            policy.offload.release(part)
            seconds = time.monotonic() - started
            freed = used - torch.cuda.memory_allocated()
            to_driver = torch.cuda.mem_get_info()[0] - free
            rate = freed / seconds / 1e9
            lines.append(
                f"  round {round_} release {part:9s} {freed / 2**20:7.0f} MiB, {seconds:.3f} s, {rate:5.1f} GB/s"
            )
            assert freed == pytest.approx(BYTES[part] * num, rel=0.03), part
            assert to_driver > 0.8 * freed, f"{part}: {to_driver} of {freed} bytes went back to the driver"
        left, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert held - left < WORKSPACES, (
            f"the allocator holds {held / 2**20:.0f} MiB for {left / 2**20:.0f} MiB of tensors"
        )
        left -= KEPT
        assert left < 0.1 * 18 * num + WORKSPACES, f"{left / 2**20:.0f} MiB are left"
        with pytest.raises(RuntimeError, match="are offloaded"):
            policy.with_old_logprobs(batch)
        if round_ == 0:
            checkpoint.save(folder, 1, policy, {})
            assert set(policy.offload.offloaded) == set(PARTS)
        started = time.monotonic()
        policy.offload.restore()
        seconds = time.monotonic() - started
        lines.append(f"  round {round_} restore {seconds:.3f} s, {14 * num / seconds / 1e9:5.1f} GB/s")
        assert not any(b.grad_data.any() for chunk in policy.chunks for b in chunk.buffers)
        assert all(torch.equal(a, b) for a, b in zip(state, _state(policy), strict=True))
        assert torch.equal(expected, logprobs())
    policy.offload.release("optimizer")
    metrics, _ = continue_training(policy, 2)  # each update fetches it
    assert policy.offload.offloaded == ("optimizer",)
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    checkpoint.restore(checkpoint.latest(folder), policy)
    assert all(torch.equal(a, b) for a, b in zip(state, _state(policy), strict=True)), "the checkpoint"
    assert torch.equal(expected, logprobs())
    return lines


@pytest.mark.parametrize("model", [BIG, BIG_MOE], ids=["dense", "moe"])
def test_memory_goes_and_every_bit_comes_back(model, tmp_path):
    cfg = run_config(model=model, params="bf16")
    engine = replace(cfg.engine, placement="colocated")
    cfg = replace(cfg, optim=replace(cfg.optim, offload=PARTS), engine=engine)
    (lines,) = run_ranks(1, _play, cfg, tmp_path, deadline_s=100)
    print("\n" + "\n".join(lines))
