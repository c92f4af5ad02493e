"""Sums of parts in one order: their definition, their rounding error, and the Triton kernel in the interpreter."""

import functools

import pytest
import torch

from megatron_fp8rl.kernels.ordered_sum import add_in_order
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter


def _parts(num_parts: int, *shape: int) -> torch.Tensor:
    return torch.randn(num_parts, *shape, generator=torch.Generator().manual_seed(num_parts)).bfloat16()


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, says="2 skipped")


@in_interpreter
@pytest.mark.parametrize(("num_parts", "shape"), [(1, (3, 5)), (2, (4100,)), (8, (17, 129))])
def test_the_kernel_adds_as_torch_does(num_parts, shape):
    from megatron_fp8rl.kernels.triton import ordered_sum

    parts = _parts(num_parts, *shape)
    expected = functools.reduce(torch.add, parts.float()).bfloat16()
    assert torch.equal(ordered_sum.add_in_order(parts), expected)
    assert torch.equal(add_in_order(parts), expected)


@starts_interpreter
def test_two_parts_are_added_as_before_and_more_are_rounded_once_at_the_end():
    two, eight = _parts(2, 4, 300), _parts(8, 4, 3000)
    assert torch.equal(add_in_order(two), two[0] + two[1])
    far = torch.tensor([1.0, 2.0**30, -(2.0**30)]).bfloat16()[:, None]
    assert (add_in_order(far).item(), add_in_order(far.flip(0)).item()) == (0.0, 1.0)
    assert torch.equal(add_in_order(eight.double()), functools.reduce(torch.add, eight.double()))
    exact = eight.double().sum(0)
    errors = [
        (total.double() - exact).square().mean() for total in (add_in_order(eight), functools.reduce(torch.add, eight))
    ]
    assert errors[0] < 0.5 * errors[1], "a sum that rounds after each part is less accurate"
