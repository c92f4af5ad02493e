"""Log-probabilities whose bits no order of summation changes, against float64."""

import pytest
import torch

from megatron_fp8rl.kernels import exact_logprobs, float64
from tests.tolerances import LOGPROBS_FLOAT32


def logits_of(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (5 * torch.randn(7, vocab, generator=generator)).bfloat16().to(dtype)


@pytest.mark.parametrize("vocab", [3, 4096, 151_936])
def test_they_are_those_of_float64(vocab):
    logits, ids = logits_of(vocab, torch.bfloat16), torch.arange(14).view(7, 2) % vocab
    expected = torch.log_softmax(logits.double(), dim=-1)
    actual = exact_logprobs.token_logprobs(logits, ids)
    torch.testing.assert_close(actual.double(), expected.gather(1, ids), **LOGPROBS_FLOAT32)
    assert torch.equal(exact_logprobs.log_softmax(logits).gather(1, ids), actual)


def test_neither_the_dtype_nor_the_order_nor_shards_change_a_bit():
    logits = logits_of(5000, torch.bfloat16)
    ids = torch.full((7, 1), 123)
    actual = exact_logprobs.token_logprobs(logits, ids)
    assert torch.equal(actual, exact_logprobs.token_logprobs(logits.float(), ids))
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    place = (order == 123).nonzero().expand(7, 1)
    assert torch.equal(actual, exact_logprobs.token_logprobs(logits[:, order].contiguous(), place))
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)
    shards = sum(exact_logprobs.exp_sum(part) for part in shifted.split(1250, dim=1))
    assert torch.equal(shards, exact_logprobs.exp_sum(shifted))
    assert not torch.equal(sum(p.exp().sum(-1) for p in shifted.split(1250, dim=1)), shifted[:, order].exp().sum(-1))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
def test_both_ends_divide_by_a_temperature_alike(temperature):
    """The trainer over one shard and over two, and the engine's two runners: V1 in place, V2 by our function."""
    from megatron_fp8rl.trainer.logprobs import HeadShard, _chunk_statistics

    logits, targets = logits_of(500, torch.bfloat16), torch.arange(7) * 70
    engine = logits.float().div_(torch.full((7, 1), temperature))
    expected = exact_logprobs.token_logprobs(engine, targets[:, None])[:, 0]
    rows = exact_logprobs.divided(logits, torch.full((7, 1), temperature))
    assert torch.equal(exact_logprobs.token_logprobs(rows, targets[:, None])[:, 0], expected)
    shard = HeadShard.of(num_rows=500, vocab_size=500, temperature=temperature, chunk_tokens=8, group=None)
    assert torch.equal(_chunk_statistics(logits, logits, targets, shard)[0], expected)
    # BF16 quotients or a reciprocal, as before, differ.
    if temperature != 1:
        assert not torch.equal(exact_logprobs.token_logprobs(rows.bfloat16(), targets[:, None])[:, 0], expected)
        assert not torch.equal(logits.float() * (1 / torch.tensor(temperature)), rows)


def test_a_nan_stays_one_and_masked_logits_are_impossible():
    logits = logits_of(50, torch.float32)
    logits[0, 3], logits[1, 4] = torch.nan, -torch.inf
    actual = exact_logprobs.log_softmax(logits)
    assert actual[0].isnan().all() and actual[1, 4] == -torch.inf and actual[1:].isfinite().sum() == 6 * 50 - 1


def test_attention_does_not_depend_on_the_rest_of_the_batch():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 9, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    whole = float64.attend(query, key, value, causal, 0.25)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (query, key, value)), is_causal=True, scale=0.25, enable_gqa=True
    )
    assert torch.equal(whole, plain.transpose(1, 2).bfloat16())
    for last in range(9):  # as an engine decodes, beside keys of nobody
        padded = [torch.cat([x[:, : last + 1], torch.full_like(x[:, :3], 7.0)], dim=1) for x in (key, value)]
        mask = (torch.arange(last + 4) <= last)[None, None]
        assert torch.equal(float64.attend(query[:, last : last + 1], *padded, mask, 0.25), whole[:, last : last + 1])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_row_of_a_product_does_not_depend_on_the_others(rows):
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(size, 384, generator=generator).bfloat16() for size in (64, 256))
    whole = float64.matmul(x, w.t())
    assert torch.equal(float64.matmul(x[:rows], w.t()), whole[:rows])
    assert torch.equal(whole, (x.double() @ w.double().t()).bfloat16()) and whole.dtype == torch.bfloat16
