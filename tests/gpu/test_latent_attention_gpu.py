"""Absorbed latent attention on a GPU: a token has the same bits in a prompt, in a part of it, and decoded."""

import pytest
import torch

from tests.helpers.latent_cases import LatentCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES, SCALE = (512, 64), 0.07
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 200, 513, 1030)


def _attended(case: LatentCase, query=None, rows=None, cu_queries=None, num_keys=None, max_queries=None):
    from megatron_fp8rl.kernels.triton.latent import attend

    query = case.query if query is None else query.contiguous()
    pages = case.pages if rows is None else case.pages[rows].contiguous()
    cu_queries = case.cu_queries if cu_queries is None else cu_queries
    num_keys = case.num_keys if num_keys is None else num_keys
    out = torch.full((*query.shape[:2], SIZES[0]), 7.0, dtype=torch.bfloat16, device="cuda")
    attend(query, case.cache, pages, cu_queries, num_keys, max_queries or case.max_queries, SCALE, out)
    return out


@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
def test_a_token_has_the_same_bits_everywhere(num_heads):
    prompts = LatentCase.drawn([(n, n) for n in LENGTHS], num_heads, SIZES, page_tokens=16, device="cuda")
    whole = _attended(prompts)
    torch.testing.assert_close(whole.double(), prompts.expected(SCALE), rtol=2e-2, atol=2e-2)
    starts, numbers = prompts.cu_queries.tolist(), torch.tensor
    for back in (0, 1, 7, 40):  # decoded: the token so many places before the end of each sequence
        rows = [i for i, n in enumerate(LENGTHS) if n > back]
        tokens = numbers([starts[i + 1] - 1 - back for i in rows], device="cuda")
        decoded = _attended(
            prompts,
            prompts.query[tokens],
            numbers(rows, device="cuda"),
            torch.arange(len(rows) + 1, device="cuda").int(),
            numbers([LENGTHS[i] - back for i in rows], device="cuda").int(),
            1,
        )
        assert torch.equal(decoded, whole[tokens])
    part = _attended(
        prompts,
        prompts.query[-100:],
        numbers([len(LENGTHS) - 1], device="cuda"),
        numbers([0, 100], device="cuda").int(),
        prompts.num_keys[-1:].contiguous(),
        100,
    )
    assert torch.equal(part, whole[-100:])


@pytest.mark.parametrize("shape", [(20, 192, 512), (20, 512, 256), (128, 128, 512)], ids=str)
def test_a_row_of_a_product_does_not_depend_on_other_rows(shape):
    from megatron_fp8rl.kernels.triton.latent import by_head

    num_heads, size, columns = shape
    x = torch.randn(777, num_heads, size, device="cuda").bfloat16()
    matrices = torch.randn(num_heads, columns, size, device="cuda").bfloat16().transpose(1, 2)
    whole = by_head(x, matrices)
    exact = torch.einsum("thk,hkn->thn", x.double(), matrices.double())
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=1e-2)
    for row in (0, 63, 64, 776):
        assert torch.equal(by_head(x[row : row + 1], matrices)[0], whole[row])


def test_half_a_block_of_rows_has_the_bits_of_a_whole_one():
    """vLLM multiplies kv_a_proj_with_mqa [576, K] as it is; the trainer fills its last block with zeros."""
    from megatron_fp8rl.kernels.gemm import Fp8, multiply_dense, quantized
    from megatron_fp8rl.precision.formats import blockwise_format

    fmt = blockwise_format("pow2")
    weight = torch.nn.functional.pad(torch.randn(576, 2048, device="cuda").bfloat16(), (0, 0, 0, 64))
    padded = Fp8(*(part[0] for part in quantized(weight[None], fmt)))
    partial = Fp8(padded.data[:576].contiguous(), padded.scale)
    for rows in (128, 1024, 8192):
        x = torch.randn(rows, 2048, device="cuda").to(torch.float8_e4m3fn)
        x = Fp8(x, torch.ones(2048 // 128, rows, device="cuda").t())
        assert torch.equal(multiply_dense(x, padded)[:, :576], multiply_dense(x, partial))
