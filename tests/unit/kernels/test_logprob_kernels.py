"""The kernels of log-probabilities against torch in float64: in Triton's interpreter, and compiled for a Hopper GPU."""

import numpy as np
import pytest
import torch

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.kernels.types import UNIT
from tests.helpers.compiled import compile_kernel, register_report
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter
from tests.tolerances import LOGPROBS_FLOAT32

NUM, FIRST = 5, 3


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=400.0)


def case(vocab: int):
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(NUM, vocab, generator=generator)).bfloat16()
    targets = FIRST + torch.tensor([0, vocab - 1, 1, -1, vocab])  # the last two are elsewhere
    is_here = torch.tensor([True, True, True, False, False])
    return logits, targets, is_here, torch.randn(NUM, generator=generator), torch.randn(NUM, generator=generator)


@in_interpreter
@pytest.mark.parametrize("vocab", [50, 4096, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_and_gradients(vocab, temperature):
    from megatron_fp8rl.kernels.triton import log_softmax

    logits, targets, is_here, on_logprobs, on_entropy = case(vocab)
    z = (logits.double() / temperature).requires_grad_()
    largest = z.detach().amax(-1)
    shifted = z.detach() - largest[:, None]
    local = (targets - FIRST).clamp(0, vocab - 1)
    at_target = torch.where(is_here, shifted.gather(1, local[:, None])[:, 0], 0.0)
    expected = torch.stack([(shifted.exp() * shifted).sum(-1), at_target])
    exp_sums, others = log_softmax.sums(logits, largest.float(), targets, FIRST, temperature)
    torch.testing.assert_close(others.double(), expected, **LOGPROBS_FLOAT32)
    torch.testing.assert_close(exp_sums.double() / UNIT, shifted.exp().sum(-1), rtol=LOGPROBS_FLOAT32["rtol"], atol=0)

    log_p = torch.log_softmax(z, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    # A target elsewhere leaves -p: the softmax's sum is over all shards.
    logprobs = torch.where(is_here, z.gather(1, local[:, None])[:, 0], 0.0) - torch.logsumexp(z, dim=-1)
    rows = dict(log_norm=torch.logsumexp(z, -1).detach().float(), entropy=entropy.detach().float())
    for with_entropy in (False, True):
        loss = (logprobs * on_logprobs).sum() + with_entropy * (entropy * on_entropy).sum()
        (wanted,) = torch.autograd.grad(loss, z, retain_graph=True)
        wanted = wanted / temperature
        grads = dict(grad_logprobs=on_logprobs, grad_entropy=on_entropy if with_entropy else None)
        ours = log_softmax.gradient(logits.clone(), targets, FIRST, temperature, **rows, **grads)
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), wanted, rtol=2**-8, atol=1e-7)  # half a step of BF16


@in_interpreter
@pytest.mark.parametrize(("with_entropy", "truncates"), [(False, False), (True, False), (True, True)])
def test_the_whole_function_is_that_of_torch(monkeypatch, with_entropy, truncates):
    """Values and gradients of ``token_logprobs``, in chunks, with kernels and without, also over kept entries."""
    from megatron_fp8rl.trainer import logprobs

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator).bfloat16() for size in (NUM, 50))
    targets, on = torch.randint(0, 50, (NUM,), generator=generator), torch.randn(NUM, generator=generator)
    are_kept = torch.rand(NUM, 64, generator=generator) < torch.tensor([0.0, 0.0, 0.2, 0.8, 2.0])[:, None]
    are_kept[torch.arange(NUM), targets] = True
    bits = np.packbits(are_kept.numpy(), axis=1, bitorder="little")
    kept = KeptEntries.from_bits(bits, 48) if truncates else None
    shard = logprobs.HeadShard.of(num_rows=50, vocab_size=48, temperature=0.7, chunk_tokens=2, group=None)
    actual = []
    for kernels in (logprobs._kernels, lambda logits: None):
        monkeypatch.setattr(logprobs, "_kernels", kernels)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values, entropy = logprobs.token_logprobs(x, w, targets, shard, kept)
        ((values * on).sum() + with_entropy * entropy.sum()).backward()
        actual.append((values.detach(), entropy.detach(), x.grad.float(), w.grad.float()))
    for ours, theirs in zip(actual[0][:2], actual[1][:2]):
        torch.testing.assert_close(ours, theirs, **LOGPROBS_FLOAT32)
    for ours, theirs in zip(actual[0][2:], actual[1][2:]):
        assert (ours - theirs).norm() < 2**-8 * theirs.norm()


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("temperature", ["1", "other"])
@pytest.mark.parametrize("name", ["_sum_rows", "_gradient"])
def test_they_compile_without_spilling(tmp_path, name, temperature):
    from megatron_fp8rl.kernels.triton import log_softmax

    integers = ("num_tokens", "num_columns", "first_token", "stride")
    types = {"logits": "*bf16", "targets": "*i64", "temperature": "fp32", "exp_sums": "*i64"}
    types |= dict.fromkeys(integers, "i32")
    constants = dict(ENTROPY=True, DIVIDE=temperature != "1", BLOCK=log_softmax._BLOCK, HARDWARE=True, UNIT=UNIT)

    def is_aligned(name: str, kind: str) -> bool:
        return kind.startswith("*") or name in ("num_columns", "stride")

    how = dict(default="*fp32", is_aligned=is_aligned, num_warps=8)
    ptx = compile_kernel(getattr(log_softmax, name), types, constants, **how)["ptx"]
    assert "ld.global.v4.b32" in ptx and (name == "_sum_rows" or "st.global.v4.b32" in ptx)
    output = register_report(ptx, tmp_path)
    assert " 0 bytes spill stores" in output, output
