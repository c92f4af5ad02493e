"""Megatron-Core's view of torch on CPUs: only there, and only when it was asked for."""

import subprocess
import sys

import pytest
import torch

from megatron_fp8rl.trainer.compat import megatron_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is replaced")


def test_megatron_sees_the_cpu_as_its_device_and_nobody_else_does():
    from megatron.core.tensor_parallel import layers

    assert layers.torch.cuda.current_device() == torch.device("cpu")
    assert layers.torch.empty(2, device=layers.torch.cuda.current_device()).device.type == "cpu"
    assert layers.torch.Tensor is torch.Tensor and layers.torch is not torch
    assert not torch.cuda.is_available()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_random_states_of_the_tracker_are_separate():
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("experts", 7)
    expected = torch.Generator().manual_seed(7)
    outside = torch.get_rng_state()
    with tracker.fork("experts"):
        first = torch.rand(3)
    with tracker.fork("experts"):
        second = torch.rand(3)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3, generator=expected) for _ in range(2)]))
    assert torch.equal(torch.get_rng_state(), outside)
    with pytest.raises(KeyError, match="'unknown' was never added"), tracker.fork("unknown"):
        pass


def test_the_gradient_of_a_bf16_embedding_is_rounded_once():
    """3,000 times one token, as a space is: adding them up in BF16 loses a tenth."""
    from megatron.core.tensor_parallel import layers

    gradient = torch.rand(3000, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(4, 8, dtype=torch.bfloat16).requires_grad_()
    ids = torch.full((3000,), 2)
    actual = layers.F.embedding(ids, weight)
    assert torch.equal(actual, weight[ids])
    actual.backward(gradient)
    assert torch.equal(weight.grad[2], gradient.double().sum(0).bfloat16())
    assert not weight.grad[[0, 1, 3]].any()


@pytest.mark.slow
def test_a_program_that_forgot_to_install_is_told():
    program = (
        "from megatron_fp8rl.config import ParallelConfig\n"
        "from megatron_fp8rl.trainer.parallel import Parallel\n"
        "Parallel.init(ParallelConfig())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode and "megatron_on_cpu.install(), which checks versions" in done.stderr


def test_installing_after_megatron_is_refused(monkeypatch):
    import megatron.core  # noqa: F401

    monkeypatch.setattr(megatron_on_cpu, "_installed", False)
    with pytest.raises(RuntimeError, match="call that first"):
        megatron_on_cpu.install()


def test_importing_the_trainer_changes_nothing():
    program = "import sys, megatron_fp8rl.trainer\nassert not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
