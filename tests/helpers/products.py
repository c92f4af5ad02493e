"""Every product of a policy's linears on Transformer Engine's kernels, beside the emulation of the very same operands.

Two runs cannot be compared number by number: where a BF16 result differs in its last bit, one FP8 number in some tens
rounds the other way, and after a few layers two correct runs differ as much as FP8 and BF16 do. Here nothing adds up:
each linear of a running update is computed again from the input, the weights and the output gradient that it was given.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.recipes import AmaxHistory, Recipe, make_recipe, quantized_linear
from tests.helpers.hf_parts import hf_names_of
from tests.helpers.training import continue_training

PRODUCTS = ("y", "dx", "dW")


@dataclass(eq=False)
class _Call:
    """One pass of one microbatch through one linear."""

    linear: torch.nn.Module
    splits: list[int] | None
    weights: list[Tensor]
    history: Tensor | None  # of finished steps
    x: Tensor
    y: Tensor | None = None
    grad: Tensor | None = None
    dx: Tensor | None = None


class _Watch(torch.autograd.Function):
    """A copy of a tensor that stores its gradient in ``call``."""

    @staticmethod
    def forward(ctx, x, call, name):
        ctx.call, ctx.name = call, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        setattr(ctx.call, ctx.name, grad.detach().clone())
        return grad, None, None


@contextmanager
def _watched(linears) -> Iterator[list[_Call]]:
    """Record the calls of the linears on Transformer Engine's kernels in passes with gradients."""
    from megatron_fp8rl.trainer.model.linear import on_transformer_engine as original

    calls: list[_Call] = []

    def watched(linear, x_TK, weights, splits):
        if not torch.is_grad_enabled():
            return original(linear, x_TK, weights, splits)
        history = linear.history.history.clone() if linear.history is not None else None
        call = _Call(linear, splits, [w.detach().clone() for w in weights], history, x_TK.detach().clone())
        calls.append(call)
        y = original(linear, _Watch.apply(x_TK, call, "dx"), weights, splits)
        call.y = y.detach().clone()
        return _Watch.apply(y, call, "grad")

    with pytest.MonkeyPatch.context() as patch:
        for linear in linears:
            if linear.gemm is original:
                patch.setattr(linear, "gemm", watched)
        yield calls


def of_an_update(policy, precision=None) -> dict[str, tuple[float, float, float]]:
    """Update ``policy`` once; signal over error in decibels of y, dx and dW of each linear on Transformer Engine's
    kernels, by the global name of its (first) weight, against the emulation of ``precision``, by default the policy's.

    Asserts that these linears are those of the layer table, and that delayed scaling recorded the same magnitudes.
    Linears without tokens are left out.
    """
    from megatron_fp8rl.trainer.model.build import named_linears
    from megatron_fp8rl.trainer.model.linear import GroupedLinear

    linears = {linear: name for (name, *_), linear in named_linears(policy.models, policy.parallel)}
    recipe = make_recipe(precision or policy.cfg.precision)
    table = LayerTable.build(policy.cfg.model, policy.cfg.precision)
    recipes = {
        linear: recipe if table.trainer_format(hf_names_of(name, policy.cfg.model)[0]).is_quantized else None
        for linear, name in linears.items()
    }
    result, step = {}, policy.optimizer.step

    def compare_and_step(lr: float) -> float:  # gradients are whole here, and not clipped yet
        assert all(call.linear in linears for call in calls)
        for linear, name in linears.items():
            own = [call for call in calls if call.linear is linear]
            if own:
                result[name] = _decibels(linear, own, recipes[linear])
            else:
                assert recipes[linear] is None and not isinstance(linear, GroupedLinear), f"{name} is not in FP8"
        return step(lr)

    with _watched(linears) as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy.optimizer, "step", compare_and_step)
        continue_training(policy, 1)
    return {name: ratios for name, ratios in result.items() if ratios is not None}


def _decibels(linear, calls: list[_Call], recipe: Recipe | None) -> tuple[float, float, float] | None:
    emulated = [_emulated(call, recipe) for call in calls]
    history = linear.history
    if history is not None and recipe is not None:
        largest = torch.stack([other.current for *_, other in emulated]).amax(0)
        assert torch.equal(history.current, largest), "magnitudes that delayed scaling records"
    if not any(len(call.x) for call in calls):
        return None
    weights = [linear.weight] if calls[0].splits is None else linear.weights
    ours = [
        torch.cat([call.y.flatten() for call in calls]),
        torch.cat([call.dx.flatten() for call in calls]),
        torch.cat([weight.main_grad.flatten() for weight in weights]),
    ]
    theirs = [
        torch.cat([y.flatten() for y, *_ in emulated]),
        torch.cat([dx.flatten() for _, dx, *_ in emulated]),
        sum(torch.cat([part.double().flatten() for part in dw]) for _, _, dw, _ in emulated),
    ]
    return tuple(_ratio(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True))


def _emulated(call: _Call, recipe: Recipe | None) -> tuple[Tensor, Tensor, list[Tensor], AmaxHistory | None]:
    """y, dx, dW of each weight, and the magnitudes of delayed scaling."""
    from megatron_fp8rl.trainer.model import linear as linears

    history = None
    if call.history is not None:
        history = AmaxHistory(*call.history.shape[::2], call.history.device)
        history.history.copy_(call.history)
    x, weights = call.x.requires_grad_(), [weight.requires_grad_() for weight in call.weights]
    if call.splits is not None:
        y = quantized_linear(x, weights, recipe, splits=call.splits, history=history)
    else:
        linear = SimpleNamespace(recipe=recipe, history=history, block_rows=call.linear.block_rows)
        y = linears.in_torch(linear, x, weights, None)
    dx, *dw = torch.autograd.grad(y, [x, *weights], call.grad)
    return y.detach(), dx, dw, history


def _ratio(ours: Tensor, theirs: Tensor) -> float:
    """NaN where either is not finite."""
    error, signal = float((ours - theirs).square().sum()), float(theirs.square().sum())
    return math.inf if error == 0 else 10 * math.log10(signal / error) if signal else -math.inf
