"""The kernels of absorbed latent attention against torch in float64, in Triton's interpreter."""

import pytest
import torch

from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter
from tests.helpers.latent_cases import LatentCase

pytest.importorskip("triton")


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=900.0)


@in_interpreter
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize(
    "queries_and_keys",
    [[(1, 1), (1, 33), (1, 100)], [(5, 5), (40, 70), (1, 32)], [(3, 3), (0, 0), (2, 65)]],
    ids=["decoding", "prompts", "a sequence without tokens"],
)
def test_queries_see_the_keys_before_them(queries_and_keys, page_tokens):
    from megatron_fp8rl.kernels.triton.latent import attend

    case = LatentCase.drawn(queries_and_keys, num_heads=6, sizes=(64, 16), page_tokens=page_tokens)
    out = torch.full_like(case.query[..., :64], 7.0)
    attend(case.query, case.cache, case.pages, case.cu_queries, case.num_keys, case.max_queries, 0.2, out)
    torch.testing.assert_close(out.double(), case.expected(0.2), rtol=1e-2, atol=1e-2)


@in_interpreter
@pytest.mark.parametrize(("num_rows", "size", "columns"), [(3, 64, 128), (70, 128, 200)])
def test_products_by_head(num_rows, size, columns):
    from megatron_fp8rl.kernels.triton.latent import by_head

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 3, size + 8, generator=generator).bfloat16()[..., :size]
    matrices = torch.randn(3, columns, size, generator=generator).bfloat16().transpose(1, 2)
    exact = torch.einsum("thk,hkn->thn", x.double(), matrices.double())
    torch.testing.assert_close(by_head(x, matrices).double(), exact, rtol=2**-8, atol=1e-4)
    with pytest.raises(ValueError, match="products by head"):
        by_head(x[..., :60], matrices[:, :60])
