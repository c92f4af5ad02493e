"""BF16 products on a CPU: equal to products in float64, bit for bit, also where float32 sums are inexact."""

import subprocess

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.kernels import c_code, compile_cache, float64, rounded_products


@pytest.fixture(autouse=True)
def compiled():
    c_code.library.cache_clear()
    if c_code.library("rounded_products") is None:
        pytest.skip("no C compiler, or a CPU without AVX-512 BF16")
    yield
    c_code.library.cache_clear()


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.double(), b.double()).to(a.dtype)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (1, 770, 640), (9, 5, 64), (130, 67, 1536), (16, 64, 8192)])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_shape_and_number_of_threads(m, n, k, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(rounded_products, "_WORK_PER_THREAD", 64)
    c_code._pool.cache_clear()
    a, b = rand(m, k).bfloat16(), rand(n, k, seed=1).bfloat16().t()
    expected = reference(a, b)
    assert torch.equal(rounded_products.multiply(a, b), expected)
    assert torch.equal(rounded_products.multiply(a, b.contiguous()), expected)
    c_code._pool.cache_clear()


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    a, b = rand(64, 1024, seed=2), rand(96, 1024, seed=3)
    halves = torch.cat([a[:, :512], a[:, :512]], 1)
    outlier, ordered = a.clone(), b.clone()
    outlier[:, 7] *= 1000
    ordered[:, 7] *= 1000
    return {
        "cancellation": (halves, torch.cat([b[:, :512], -b[:, :512] * (1 + 2**-7)], 1)),
        "outliers in both": (outlier, ordered),
        "outliers in one": (outlier, b),
        "integers with ties": (a.mul(3).round(), b.mul(3).round()),
        "positive": (a.abs(), b.abs()),
        "wide range": (a * torch.exp(6 * rand(64, 1024, seed=4)), b * torch.exp(6 * rand(96, 1024, seed=5))),
        "small": (a * 2.0**-60, b * 2.0**-62),
        "large": (a * 2.0**60, b * 2.0**64),
        "squares of zero": (a * 2.0**-90, b * 2.0**40),
        "zeros": (a * 0, b),
    }


@pytest.mark.parametrize("name", cases())
def test_sums_that_float32_rounds_wrongly(name):
    a, b = (x.bfloat16() for x in cases()[name])
    assert torch.equal(rounded_products.multiply(a, b.t()), reference(a, b.t()))
    if name == "cancellation":
        assert not torch.equal(torch.mm(a.float(), b.float().t()).bfloat16(), reference(a, b.t()))


def test_infinities_and_nan_stay():
    a, b = rand(8, 32).bfloat16(), rand(6, 32, seed=1).bfloat16()
    a[1, 3], a[2, 4], b[1, 5] = torch.inf, torch.nan, -torch.inf
    product, expected = rounded_products.multiply(a, b.t()), reference(a, b.t())
    assert torch.equal(product.isnan(), expected.isnan()) and product.isnan().any() and product.isinf().any()
    assert torch.equal(product.nan_to_num(5.0), expected.nan_to_num(5.0))


def test_other_operands_and_machines_compute_in_float64(monkeypatch, tmp_path):
    a, b = rand(4, 40).bfloat16(), rand(40, 6).bfloat16()
    assert rounded_products.multiply(a, b) is None  # 40 is no multiple of 32
    assert rounded_products.multiply(a[:, :32].float(), b[:32]) is None
    assert torch.equal(float64.matmul(a, b), reference(a, b))
    weight = rand(32, 6).bfloat16().requires_grad_()
    float64.matmul(a[:, :32], weight).sum().backward()
    assert torch.equal(weight.grad, reference(a[:, :32].t(), torch.ones(4, 6).bfloat16()))

    def failing(*_, **__):
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(subprocess, "run", failing)
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, str(tmp_path))  # without compiled libraries
    c_code.library.cache_clear()
    assert rounded_products.multiply(a[:, :32], b[:32]) is None
    assert torch.equal(float64.matmul(a[:, :32], b[:32]), reference(a[:, :32], b[:32]))
