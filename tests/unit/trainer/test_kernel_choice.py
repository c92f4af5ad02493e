"""Which kernels the trainer takes on which machine, and what it says when it cannot."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.kernels import deep_gemm
from megatron_fp8rl.precision import auto_kernels
from megatron_fp8rl.trainer import fused_kernels as kernels
from megatron_fp8rl.trainer.fused_kernels import (
    choose_expert_kernels,
    choose_kernels,
    choose_linear_kernels,
    fused_kernels,
)
from model_configs.qwen3 import grpo_qwen3_30b_a3b

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def run(**precision) -> RunConfig:
    return replace(grpo_qwen3_30b_a3b(), precision=PrecisionConfig(**precision))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(kernels, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_a_cpu_emulates_and_says_so_when_asked_for_more():
    assert choose_kernels(PrecisionConfig(), CPU) == "emulated"
    with pytest.raises(ValueError, match="precision.kernels = 'te'.*Choose --precision.kernels auto"):
        choose_kernels(PrecisionConfig(kernels="te"), CPU)


@pytest.mark.parametrize("trainer", ["bf16", "blockwise", "tensorwise", "delayed"])
def test_a_gpu_takes_transformer_engine_unless_told_otherwise(hopper, trainer):
    for asked, chosen in (("auto", "te"), ("te", "te"), ("emulated", "emulated")):
        assert choose_kernels(PrecisionConfig(trainer=trainer, kernels=asked), GPU) == chosen


def test_mxfp8_names_the_capability_that_it_needs(hopper):
    with pytest.raises(ValueError, match=r"compute capability 10.0 \(Blackwell\), and this GPU has 9.0. Choose"):
        choose_kernels(PrecisionConfig(trainer="mxfp8"), GPU)


@pytest.mark.parametrize("asked", ["auto", "te"])
def test_a_gpu_without_transformer_engine_names_the_remedy(monkeypatch, asked):
    monkeypatch.setattr(kernels, "has_transformer_engine", lambda: False)
    with pytest.raises(RuntimeError, match="pip install 'transformer-engine.*--precision.kernels emulated"):
        choose_kernels(PrecisionConfig(kernels=asked), GPU)
    assert choose_kernels(PrecisionConfig(kernels="emulated"), GPU) == "emulated"


def test_the_record_of_a_run_names_what_computes(hopper):
    assert fused_kernels(run(), CPU) == {
        "trainer kernel, FP8 linears": "PyTorch (emulated)",
        "trainer kernel, expert linears": "PyTorch",
        "trainer kernel, norms": "PyTorch",
        "trainer kernel, optimizer": "torch.AdamW",  # what Megatron-Core falls back to on a machine without a GPU
    }
    assert fused_kernels(run(), GPU)["trainer kernel, expert linears"] == "Transformer Engine (grouped)"


def test_grouped_experts_are_a_choice_that_names_what_it_needs(hopper, monkeypatch):
    asked = run(experts="deep_gemm")
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: name == "vllm.third_party.deep_gemm")
    for device, kernels_of_auto in ((CPU, "te"), (GPU, "deep_gemm")):
        assert choose_expert_kernels(run(), device) == kernels_of_auto
        assert choose_expert_kernels(asked, device) == "deep_gemm"
    assert fused_kernels(asked, GPU)["trainer kernel, expert linears"] == "DeepGEMM (grouped)"
    assert fused_kernels(asked, CPU)["trainer kernel, expert linears"] == "PyTorch (as DeepGEMM)"
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: False)
    with pytest.raises(RuntimeError, match="DeepGEMM is not installed.*--precision.experts te"):
        choose_expert_kernels(asked, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(ValueError, match=r"compute capability 9.0 \(Hopper\), and this GPU has 10.0. Choose"):
        choose_expert_kernels(asked, GPU)


def test_linears_on_deep_gemm_are_a_choice_that_names_what_it_needs(hopper, monkeypatch):
    asked = run(linears="deep_gemm")
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: name == "vllm.third_party.deep_gemm")
    for device, kernels_of_te in ((CPU, "emulated"), (GPU, "te")):
        assert choose_linear_kernels(run(), device) == ("deep_gemm" if device is GPU else kernels_of_te)
        assert choose_linear_kernels(run(linears="te"), device) == kernels_of_te
        assert choose_linear_kernels(asked, device) == "deep_gemm"
    assert fused_kernels(asked, GPU)["trainer kernel, FP8 linears"] == "DeepGEMM"
    assert fused_kernels(asked, CPU)["trainer kernel, FP8 linears"] == "PyTorch (as DeepGEMM)"
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: False)
    with pytest.raises(RuntimeError, match="DeepGEMM is not installed.*--precision.linears te"):
        choose_linear_kernels(asked, GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(ValueError, match=r"precision.linears = .*compute capability 9.0 \(Hopper\), and this GPU has 10.0"):
        choose_linear_kernels(asked, GPU)


def test_auto_takes_deep_gemm_where_it_is_faster_and_can_run_and_never_raises(hopper, monkeypatch):
    everywhere = dict.fromkeys(auto_kernels.DEEP_GEMM_IS_FASTER, auto_kernels.Range(first=0))
    monkeypatch.setattr(auto_kernels, "DEEP_GEMM_IS_FASTER", everywhere)
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: name == "vllm.third_party.deep_gemm")
    assert (choose_linear_kernels(run(), GPU), choose_expert_kernels(run(), GPU)) == ("deep_gemm", "deep_gemm")
    assert (choose_linear_kernels(run(), CPU), choose_expert_kernels(run(), CPU)) == ("emulated", "te")
    for asked in (dict(linears="te", experts="te"), dict(trainer="delayed"), dict(gradients="e5m2")):
        assert (choose_linear_kernels(run(**asked), GPU), choose_expert_kernels(run(**asked), GPU)) == ("te", "te")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert (choose_linear_kernels(run(), GPU), choose_expert_kernels(run(), GPU)) == ("te", "te")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(deep_gemm, "_is_there", lambda name: False)
    assert (choose_linear_kernels(run(), GPU), choose_expert_kernels(run(), GPU)) == ("te", "te")
