"""The kernel that splits, norms and rotates heads, against torch: in Triton's interpreter, and compiled for a Hopper GPU."""

import pytest
import torch

from megatron_fp8rl.kernels.float64 import rotate_halves
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter

# (tokens, key heads, query heads of each, features of a head)
CASES = {
    "many queries": (37, 2, 8, 128),
    "one query": (16, 3, 1, 64),
    "one group": (5, 1, 5, 32),
    "no token": (0, 2, 2, 32),
}
EPS = 1e-6


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """RMSNorm of float32 heads, rounded once to BF16."""
    if weight is None:
        return x
    return rounded(x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float())


def case(name: str, has_norms: bool):
    tokens, groups, queries, width = CASES[name]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    mixed = draw(tokens, groups * (queries + 2) * width).requires_grad_()
    norms = tuple((1 + draw(width)).requires_grad_() for _ in range(2)) if has_norms else None
    angles = torch.randn(tokens, 1, width // 2, generator=generator) * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    grads = draw(tokens, groups * queries, width), draw(tokens, groups, width), draw(tokens, groups, width)
    return mixed, groups, norms, cos, sin, grads


def expected(mixed, groups, norms, cos, sin, grads):
    """Heads and gradients by torch in float32, rounded to BF16 where the kernel rounds."""
    width = grads[0].shape[-1]
    heads = mixed.detach().float().unflatten(1, (groups, -1, width))
    query, key, value = (part.flatten(1, 2).requires_grad_() for part in heads.split([heads.shape[2] - 2, 1, 1], dim=2))
    weights = (None, None) if norms is None else tuple(weight.detach().float().requires_grad_() for weight in norms)
    normed = [norm(x, weight) for x, weight in zip((query, key), weights)]
    out = [rotate_halves(x.bfloat16(), cos, sin) for x in normed] + [value.detach().bfloat16()]
    turned = [rotate_halves(grad, cos, -sin).float() for grad in grads[:2]]
    wanted = [x for x in (query, key, *weights) if x is not None]
    plain = [
        x if w is None else x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w
        for x, w in zip((query, key), weights)
    ]
    found = torch.autograd.grad(plain, wanted, turned)
    parts = (*found[:2], grads[2].float())
    dmixed = torch.cat([part.unflatten(1, (groups, -1)) for part in parts], dim=2).flatten(1)
    return out, dmixed, found[2:]


def assert_close(found: torch.Tensor, wanted: torch.Tensor, share: float = 0.01) -> None:
    """Equal but for one in a hundred numbers, which may be a BF16 number beside: sums have another order."""
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=2**-9)
    if found.numel():
        assert (found != wanted.bfloat16()).float().mean() <= share


@in_interpreter
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_heads_and_gradients_are_those_of_torch(name, has_norms):
    from megatron_fp8rl.kernels.triton import rotate

    mixed, groups, norms, cos, sin, grads = case(name, has_norms)
    found = rotate.split_heads(mixed, groups, norms, EPS, cos, sin)
    heads, dmixed, dweights = expected(mixed, groups, norms, cos, sin, grads)
    for ours, theirs in zip(found, heads, strict=True):
        assert ours.is_contiguous()
        assert_close(ours, theirs, 0.01 if has_norms else 0.0)
    strided = [grad.transpose(0, 1).contiguous().transpose(0, 1) for grad in grads]
    for gradients in (grads, strided):
        ours, *of_weights = torch.autograd.grad(found, (mixed, *(norms or ())), gradients, retain_graph=True)
        assert_close(ours, dmixed, 0.02 if has_norms else 0.0)
        for one, theirs in zip(of_weights, dweights, strict=True):
            assert_close(one, theirs, 0.05)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("half", [32, 64, 128])
def test_it_compiles_without_spills(half, backward):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fp8rl.kernels.triton.rotate import _TOKENS, _split_heads

    types = {
        "cos": "*fp32",
        "sin": "*fp32",
        "dweights": "*fp32",
        "num_tokens": "i32",
        "num_groups": "i32",
        "eps": "fp32",
    }
    constants = dict(QUERIES=8, HALF=half, TOKENS=_TOKENS, NORM=True, BACKWARD=backward, HARDWARE=True)
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "*bf16") for arg in _split_heads.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    source = ASTSource(_split_heads, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    vector = "v2" if half == 32 else "v4"  # a thread has 4 or more numbers of a half
    assert f"ld.global.{vector}.b32" in compiled.asm["ptx"] and f"st.global.{vector}.b32" in compiled.asm["ptx"]
    assert "fma.rn.f32" not in compiled.asm["ptx"] and "ld.local" not in compiled.asm["ptx"]
