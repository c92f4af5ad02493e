"""Threads of the host in a trainer rank: one beside a GPU, as many as were asked for, all on a CPU."""

import pytest
import torch

from megatron_fp8rl.trainer.parallel import limit_host_threads


@pytest.mark.parametrize(("device", "asked", "expected"), [("cuda", None, 1), ("cuda", "3", 3), ("cpu", None, 3)])
def test_a_rank_beside_a_gpu_wakes_no_other_core(device, asked, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        limit_host_threads(torch.device(device))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
