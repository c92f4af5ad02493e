"""Log-probabilities on a GPU, of a real vocabulary, against torch in float64; -s shows their time."""

import pytest
import torch

from tests.tolerances import LOGPROBS_FLOAT32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HIDDEN, ROWS, VOCAB = 256, 152_064, 151_936


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients(temperature, with_entropy):
    from megatron_fp8rl.trainer.logprobs import HeadShard, token_logprobs

    generator = torch.Generator("cuda").manual_seed(0)
    num = 48
    hidden = torch.randn(num, HIDDEN, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(ROWS, HIDDEN, device="cuda", generator=generator) / 8).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCAB, (num,), device="cuda", generator=generator)
    on = torch.randn(2, num, device="cuda", generator=generator)
    shard = HeadShard.of(num_rows=ROWS, vocab_size=VOCAB, temperature=temperature, chunk_tokens=20, group=None)
    logprobs, entropy = token_logprobs(hidden, weight, targets, shard)
    ((logprobs * on[0]).sum() + with_entropy * (entropy * on[1]).sum()).backward()

    logits = (hidden.detach() @ weight.detach()[:VOCAB].t()).double().requires_grad_()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    expected, disorder = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((expected * on[0]).sum() + with_entropy * (disorder * on[1]).sum()).backward()
    torch.testing.assert_close(logprobs.detach().double(), expected.detach(), **LOGPROBS_FLOAT32)
    torch.testing.assert_close(entropy.detach().double(), disorder.detach(), **LOGPROBS_FLOAT32)
    on_hidden = logits.grad @ weight.detach()[:VOCAB].double()
    on_weight = logits.grad.t() @ hidden.detach().double()
    for actual, wanted in ((hidden.grad, on_hidden), (weight.grad[:VOCAB], on_weight)):
        assert (actual.double() - wanted).norm() < 2**-7 * wanted.norm()
    assert not weight.grad[VOCAB:].any(), "padding rows got a gradient"


@pytest.mark.parametrize("chunk_tokens", [20, 64])
def test_the_gradient_of_the_head_goes_to_its_buffer(chunk_tokens):
    """Twice, as of two microbatches: the buffer holds the sum; what autograd gets is never read."""
    from megatron_fp8rl.trainer.logprobs import HeadShard, token_logprobs

    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(48, HIDDEN, device="cuda", generator=generator).bfloat16()
    weight = torch.nn.Parameter((torch.randn(ROWS, HIDDEN, device="cuda", generator=generator) / 8).bfloat16())
    targets = torch.randint(0, VOCAB, (48,), device="cuda", generator=generator)
    shard = HeadShard.of(num_rows=ROWS, vocab_size=VOCAB, temperature=1.0, chunk_tokens=chunk_tokens, group=None)
    token_logprobs(hidden, weight, targets, shard)[0].sum().backward()
    plain, weight.grad = weight.grad.float(), None
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(ROWS, HIDDEN, device="cuda"), False
    for _ in range(2):
        token_logprobs(hidden, weight, targets, shard)[0].sum().backward()
    assert weight.grad_added_to_main_grad
    assert (weight.main_grad - 2 * plain).norm() < 2**-8 * (2 * plain).norm()
    assert not weight.main_grad[VOCAB:].any(), "padding rows got a gradient"


@pytest.mark.parametrize("chunk_tokens", [4096, 16_384])
def test_speed(chunk_tokens):
    """Prints milliseconds for 16,384 tokens; says nothing about what they should be."""
    from benchmarks.timing import milliseconds
    from megatron_fp8rl.trainer import logprobs

    hidden = torch.randn(16_384, 2048, device="cuda").bfloat16().requires_grad_()
    weight = torch.nn.Parameter((torch.randn(VOCAB, 2048, device="cuda") / 45).bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(VOCAB, 2048, device="cuda"), False
    targets = torch.randint(0, VOCAB, (16_384,), device="cuda")
    shard = logprobs.HeadShard.of(
        num_rows=VOCAB, vocab_size=VOCAB, temperature=1.0, chunk_tokens=chunk_tokens, group=None
    )

    def both():
        hidden.grad = weight.grad = None
        logprobs.token_logprobs(hidden, weight, targets, shard)[0].sum().backward()

    torch.cuda.reset_peak_memory_stats()
    before, ms = torch.cuda.memory_allocated(), milliseconds(both, 5, warm=2)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    products = (8 if chunk_tokens < 16_384 else 6) * 16_384 * 2048 * VOCAB / 1e12
    print(
        f"\nlog-probabilities of 16,384 x {VOCAB:,} in chunks of {chunk_tokens:,}: {ms:.1f} ms, "
        f"{products:.1f} TFLOP, peak {peak:.1f} GiB"
    )
