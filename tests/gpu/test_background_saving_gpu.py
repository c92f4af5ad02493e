"""Checkpoints of a GPU that are written while training goes on: what they hold, and how long a step waits.

Run with -s for sizes and seconds.
"""

import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.models import small_model
from tests.helpers.training import continue_training, run_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# 0.26 billion parameters, 3.5 GiB of a checkpoint
BIG = small_model((1, 4096, 32, 8, 128, 8192), ffn=12288, max_position_embeddings=128, initializer_range=0.02)


def _state(policy) -> list[torch.Tensor]:
    """Copies of weights, master weights and moments."""
    return [tensor.cpu() for tensor in (*policy.offload._params(), *policy.offload._states())]


def _update(policy) -> float:
    """Seconds of one update."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    continue_training(policy, 1)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _play(cfg, folder) -> list[str]:
    from megatron_fp8rl.trainer import checkpoint
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=100))
    continue_training(policy, 2)
    undisturbed = min(_update(policy) for _ in range(4))
    lines = []
    for step in (1, 2):
        began = time.perf_counter()
        path = checkpoint.save(folder, step, policy, {})
        whole = time.perf_counter() - began
        size = sum(file.stat().st_size for file in path.iterdir())
        lines.append(f"{size / 2**30:.1f} GiB written while the step waits: {whole:.2f} s")
    with closing(checkpoint.Saver(folder, policy)) as saver:
        for step in (3, 4):
            state = _state(policy) if step == 4 else []
            began = time.perf_counter()
            saver.begin(step, {})
            copied = time.perf_counter() - began
            beside = []
            while not saver._open.is_done:
                beside.append(_update(policy))
            written = time.perf_counter() - began
            began = time.perf_counter()
            saver.poll()
            named = time.perf_counter() - began
            assert saver._open is None and checkpoint.latest(folder).name == f"step_{step:08d}"
            lines.append(
                f"in the background: the step waits {copied:.2f} s for the copy and {named:.2f} s for the name; "
                f"written after {written:.2f} s beside {len(beside)} updates of {min(beside):.3f} to "
                f"{max(beside):.3f} s, undisturbed {undisturbed:.3f} s"
            )
    assert not all(torch.equal(a, b) for a, b in zip(state, _state(policy), strict=True)), "nothing was trained"
    checkpoint.restore(checkpoint.latest(folder), policy)
    assert all(torch.equal(a, b) for a, b in zip(state, _state(policy), strict=True)), "not the step of the checkpoint"
    return lines


@pytest.mark.parametrize("params", ["bf16", "fp32"])
def test_a_checkpoint_holds_the_step_at_which_it_was_begun(params, tmp_path):
    cfg = run_config(model=BIG, params=params)
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, keep=1))
    (lines,) = run_ranks(1, _play, cfg, str(tmp_path), deadline_s=240)
    print("\n" + "\n".join(lines))
