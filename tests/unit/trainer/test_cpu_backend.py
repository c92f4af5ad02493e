"""Megatron-Core's view of torch on CPUs: only there, and only for releases that it was written for."""

import importlib.metadata

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
    found = layers.F.embedding(ids, weight)
    assert torch.equal(found, weight[ids])
    found.backward(gradient)
    assert torch.equal(weight.grad[2], gradient.double().sum(0).bfloat16())
    assert not weight.grad[[0, 1, 3]].any()


@pytest.mark.parametrize("version, refused", [("0.19.0", False), ("0.19.2", False), ("0.20.0", True), ("0.18.1", True)])
def test_other_releases_are_refused(version, refused, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if refused:
        with pytest.raises(RuntimeError, match=f"megatron-core {version} is installed.*Install the pinned release"):
            megatron_on_cpu._check_version()
    else:
        megatron_on_cpu._check_version()
