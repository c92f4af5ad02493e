"""Experts of each implementation, for benchmarks/experts.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.timing import Call, device, te_recipe

if TYPE_CHECKING:
    import torch


TE_RECIPES = ("bf16", "blockwise", "delayed", "tensorwise")
OURS = {  # (trainer's precision, operands of weight gradients)
    "grouped bf16": ("bf16", "bf16"),
    "grouped fp8": ("blockwise", "fp8"),
    "grouped fp8, bf16 wgrad": ("blockwise", "bf16"),
}
ARMS = (*(f"te {recipe}" for recipe in TE_RECIPES), *OURS)


def experts(arm: str, counts: Sequence[int], hidden: int, width: int) -> tuple[Call, Call]:
    """(forward, forward and backward) of all experts of an arm. Quantizes weights in every call, and adds weight
    gradients to FP32 buffers, as Megatron-Core."""
    import torch

    x = torch.randn(sum(counts), hidden, device=device()).bfloat16().requires_grad_()
    grad = torch.randn_like(x) * 1e-3
    run = _te_experts(arm, counts, hidden, width) if arm.startswith("te ") else _grouped(arm, counts, hidden, width)

    def forward() -> None:
        run(x)

    def both() -> None:
        x.grad = None
        run(x).backward(grad)

    return forward, both


def _te_experts(arm: str, counts: Sequence[int], hidden: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Transformer Engine's GroupedLinear and fused SwiGLU, without the router's weights."""
    import torch
    import transformer_engine.pytorch as te

    recipe = te_recipe(arm)
    counts, num_experts, swiglu = list(counts), len(counts), fused_swiglu()
    pad, unpad = te.Fp8Padding(num_experts), te.Fp8Unpadding(num_experts)
    settings = dict(bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    fc1 = te.GroupedLinear(num_experts, hidden, 2 * width, **settings)
    fc2 = te.GroupedLinear(num_experts, width, hidden, **settings)
    for linear in (fc1, fc2):
        give_gradient_buffers(list(linear.parameters()))

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            x, splits = (x, counts) if recipe is None else pad(x, counts)
            y = fc2(swiglu(fc1(x, splits)), splits)
            return y if recipe is None else unpad(y, counts)

    return run


@functools.cache
def fused_swiglu() -> Callable[[torch.Tensor], torch.Tensor]:
    """silu(gate) * up of h [T, 2F] by Transformer Engine's kernels."""
    import torch
    import transformer_engine_torch as tex

    class Swiglu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(h)
            return tex.swiglu(h, None)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return tex.dswiglu(grad, *ctx.saved_tensors, None)

    return Swiglu.apply


def _grouped(arm: str, counts: Sequence[int], hidden: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The library's GroupedExperts, including the router's weights."""
    import torch

    from megatron_fp8rl.trainer.model.weight_cache import WeightCache

    module = build_grouped(arm, len(counts), hidden, width)
    on_host, probs = torch.tensor(list(counts)), torch.rand(sum(counts), device=device()).requires_grad_()
    parameters = list(module.parameters())

    def run(x: torch.Tensor) -> torch.Tensor:
        for linear in (module.linear_fc1, module.linear_fc2):
            linear.cache = WeightCache()  # otherwise weights are quantized once per optimizer step
        for tensor in (probs, *parameters):
            tensor.grad = None  # as Megatron-Core's hooks do
        return module(x, on_host, probs)[0]

    return run


def build_grouped(arm: str, num_experts: int, hidden: int, width: int) -> Any:
    import torch
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fp8rl.config import PrecisionConfig
    from megatron_fp8rl.precision.formats import BF16
    from megatron_fp8rl.precision.recipes import make_recipe
    from megatron_fp8rl.trainer.model.experts import GroupedExperts
    from megatron_fp8rl.trainer.model.linear import GroupedLinear, LinearSpec

    trainer, wgrad = OURS[arm]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_grouped_gemm=True,
        moe_ffn_hidden_size=width,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    recipe = make_recipe(PrecisionConfig(trainer=trainer, rollout="bf16", kernels={"experts": "deep_gemm"}))
    submodules = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, parallel_mode="column", spec=LinearSpec(recipe)),
        linear_fc2=partial(GroupedLinear, parallel_mode="row", spec=LinearSpec(recipe)),
    )
    groups = SimpleNamespace(ep=alone, expt_tp=alone, expt_dp=alone)
    module = GroupedExperts(
        num_experts,
        config,
        submodules=submodules,
        pg_collection=groups,
        wgrad=wgrad,
        fmt=BF16 if recipe is None else recipe.fmt,
    )
    for linear in (module.linear_fc1, module.linear_fc2):
        for weight in linear.weights:
            torch.nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
    give_gradient_buffers(list(module.parameters())[::-1])
    for parameter in module.parameters():
        parameter.grad_added_to_main_grad = False  # otherwise Transformer Engine copies an unused gradient
        parameter.gradients_ready = lambda parameters: None  # as without overlap in trainer/optimizer/optimizer.py
    return module


def give_gradient_buffers(parameters: Sequence[torch.nn.Parameter]) -> None:
    """FP32 ``main_grad`` as views of one buffer, in the order of ``parameters``."""
    import torch

    buffer = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
        parameter.main_grad = part.view(parameter.shape)
