"""Experts outside of a model: on grouped kernels, on those of the linears, and as a formula in float64."""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.formats import BF16
from megatron_fp8rl.precision.recipes import make_recipe
from megatron_fp8rl.trainer.model.experts import GroupedExperts
from megatron_fp8rl.trainer.model.layers import Experts
from megatron_fp8rl.trainer.model.linear import GroupedLinear, LinearSpec, in_torch, on_transformer_engine

_ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def build_experts(
    num_experts: int,
    hidden: int,
    features: int,
    precision: PrecisionConfig,
    *,
    kernels: str = "emulated",
    applies_router_weights: bool = True,
    wgrad: str = "fp8",
) -> Experts | GroupedExperts:
    """BF16 experts of one rank, grouped for ``kernels.experts = "deep_gemm"``. Weights depend on sizes only."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_grouped_gemm=True,
        moe_ffn_hidden_size=features,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    grouped, recipe = precision.kernel("experts") == "deep_gemm", make_recipe(precision)
    gemm = on_transformer_engine if kernels == "te" else in_torch
    spec = LinearSpec(recipe, None if grouped else gemm)
    submodules = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, parallel_mode="column", spec=spec),
        linear_fc2=partial(GroupedLinear, parallel_mode="row", spec=spec),
    )
    kind = partial(Experts, applies_router_weights=applies_router_weights)
    if grouped:
        fmt = BF16 if recipe is None else recipe.fmt
        kind = partial(GroupedExperts, wgrad=wgrad, fmt=fmt, applies_router_weights=applies_router_weights)
    groups = SimpleNamespace(ep=_ALONE, expt_tp=_ALONE, expt_dp=_ALONE)
    module = kind(num_experts, config, submodules=submodules, pg_collection=groups)
    generator = torch.Generator().manual_seed(1)
    for linear in (module.linear_fc1, module.linear_fc2):
        for weight in linear.weights:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))
    return module


def give_gradient_buffers(module: torch.nn.Module, fill: float = 0.0) -> None:
    """FP32 ``main_grad`` as views of one buffer, in Megatron-Core's order: last parameter first."""
    parameters = list(module.parameters())[::-1]
    device = parameters[0].device
    buffer = torch.full((sum(parameter.numel() for parameter in parameters),), fill, device=device)
    for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters])):
        parameter.main_grad, parameter.grad_added_to_main_grad = part.view(parameter.shape), False


def draw_tokens(
    counts: Sequence[int], hidden: int, device: str = "cpu", seed: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 tokens [T, H] and the router's weights float32 [T], which want gradients, and an output gradient [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), hidden, generator=generator).bfloat16().to(device).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).to(device).requires_grad_()
    return x, probs, torch.randn(sum(counts), hidden, generator=generator).mul_(1e-3).bfloat16().to(device)


def run_experts(module, counts: Sequence[int], x: Tensor, probs: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients: y, dx, dprobs, and of each linear dW [E, N, K], from ``main_grad`` where there is one."""
    y, _ = module(x, torch.tensor(list(counts)), probs)
    linears = {"dW1": module.linear_fc1.weights, "dW2": module.linear_fc2.weights}
    weights = [weight for part in linears.values() for weight in part]
    has_buffers = hasattr(weights[0], "main_grad")
    dx, dprobs, *dw = torch.autograd.grad(y, [x, probs, *([] if has_buffers else weights)], grad)
    if has_buffers:
        dw = [weight.main_grad.clone() for weight in weights]
    half = len(dw) // 2
    return {"y": y.detach(), "dx": dx, "dprobs": dprobs, "dW1": torch.stack(dw[:half]), "dW2": torch.stack(dw[half:])}


def exact_experts(module, counts: Sequence[int], x: Tensor, probs: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """:func:`run_experts` in float64."""
    x, probs = (tensor.detach().double().requires_grad_() for tensor in (x, probs))
    w1, w2 = (
        torch.stack([weight.detach().double() for weight in linear.weights]).requires_grad_()
        for linear in (module.linear_fc1, module.linear_fc2)
    )
    parts = []
    for tokens, p, fc1, fc2 in zip(x.split(list(counts)), probs.split(list(counts)), w1, w2):
        gate, up = (tokens @ fc1.t()).chunk(2, dim=1)
        parts.append((F.silu(gate) * up) @ fc2.t() * p[:, None])
    y = torch.cat(parts)
    gradients = torch.autograd.grad(y, [x, probs, w1, w2], grad.double())
    return {"y": y.detach(), **dict(zip(("dx", "dprobs", "dW1", "dW2"), gradients))}


def decibels(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Signal over error of each; infinite where nothing differs."""
    ratios = {}
    for name, reference in exact.items():
        error = (actual[name].double() - reference.double()).norm() ** 2
        ratios[name] = math.inf if error == 0 else float(10 * torch.log10(reference.double().norm() ** 2 / error))
    return ratios
