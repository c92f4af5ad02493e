"""Norms and quantized rows in C: the bits of the same functions in PyTorch."""

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.kernels import blockwise, c_code, float64


def both(monkeypatch: pytest.MonkeyPatch, function) -> tuple[Tensor, Tensor]:
    if c_code.library("rows") is None:
        pytest.skip("no C compiler")
    compiled = function()
    monkeypatch.setattr(c_code, "library", lambda name: None)
    return compiled, function()


def rows(scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    wide, exponents = torch.randn(2, 64, 640, generator=generator)
    x = (wide * torch.exp(3 * exponents) * scale).bfloat16()
    x[3, 5], x[7, 128:256], x[11, 0] = 0, 0, -0.0
    x[9, 1], x[10, 2] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize("scale", [1, 1e-3, 1e-30, 1e-38, 1e30, 1e38])
def test_quantized_rows(scale, monkeypatch):
    x = rows(scale)
    got, expected = both(monkeypatch, lambda: blockwise.round_activation(x, "pow2", torch.bfloat16))
    finite = ~expected.isnan()
    assert torch.equal(got.isnan(), ~finite) and finite.any() and not finite.all()
    assert torch.equal(got.view(torch.int16)[finite], expected.view(torch.int16)[finite])


@pytest.mark.parametrize("scale", [1, 1e-3, 1e-30, 1e-38, 1e30, 1e38])
def test_norms(scale, monkeypatch):
    x, weight = rows(scale), rows(1)[0]
    got, expected = both(monkeypatch, lambda: float64.rms_norm(x, weight, 1e-6))
    assert torch.equal(got.nan_to_num(9e9), expected.nan_to_num(9e9))


def test_norms_of_heads_that_are_parts_of_rows(monkeypatch):
    x, weight = rows(1)[12:, :384].unflatten(-1, (-1, 128)), rows(1)[1, :128]
    got, expected = both(monkeypatch, lambda: float64.rms_norm(x, weight, 1e-6))
    assert torch.equal(got, expected) and got.is_contiguous()


def test_norms_with_a_gradient_stay_in_pytorch():
    x = rows(1)[:2].requires_grad_()
    assert float64.rms_norm(x, rows(1)[0], 1e-6).requires_grad
