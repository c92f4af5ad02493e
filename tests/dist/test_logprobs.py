"""Chunked vocabulary-parallel log-probabilities and entropy, against torch.log_softmax in float64."""

import numpy as np
import pytest
import torch

from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.kernels import exact_logprobs, float64
from megatron_fp8rl.trainer.logprobs import HeadShard, gather_context, token_logprobs, zigzag_indices
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.tolerances import LOGPROBS_FLOAT32

NUM, HIDDEN, VOCAB = 11, 16, 50
CHUNKS = (1, 3, NUM, 4096)


def _problem():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    targets = torch.randint(0, VOCAB, (NUM,), generator=generator)
    return draw(NUM, HIDDEN), draw(VOCAB, HIDDEN), targets, draw(NUM), draw(NUM)


def _expected(temperature: float, with_entropy: bool):
    hidden, weight, targets, on_logprobs, on_entropy = _problem()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((logprobs * on_logprobs).sum() + with_entropy * (entropy * on_entropy).sum()).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def _sharded(num_rows: int, temperature: float, chunk_tokens: int, with_entropy: bool, tensor: int):
    """On a rank: (log-probabilities, entropy, whole gradient of hidden, this rank's rows of the gradient of weight)."""
    import torch.distributed as dist

    group = dist.group.WORLD if tensor > 1 else None
    rank = dist.get_rank() if tensor > 1 else 0
    hidden, weight, targets, on_logprobs, on_entropy = _problem()
    padded = torch.full((num_rows * tensor, HIDDEN), 100.0)  # would win every softmax if it counted
    padded[:VOCAB] = weight
    rows = padded[rank * num_rows : (rank + 1) * num_rows].clone().requires_grad_()
    hidden.requires_grad_()
    shard = HeadShard.of(
        num_rows=num_rows, vocab_size=VOCAB, temperature=temperature, chunk_tokens=chunk_tokens, group=group
    )
    logprobs, entropy = token_logprobs(hidden, rows, targets, shard)
    loss = (logprobs * on_logprobs).sum()
    (loss + (entropy * on_entropy).sum() if with_entropy else loss).backward()
    if tensor > 1:
        dist.all_reduce(hidden.grad)
    return logprobs.detach(), entropy.detach(), hidden.grad, rows.grad


def _all_cases(num_rows: int, tensor: int):
    import torch.distributed as dist

    if tensor > 1:
        dist.init_process_group("gloo")
    return {
        (temperature, chunk, with_entropy): _sharded(num_rows, temperature, chunk, with_entropy, tensor)
        for temperature in (1.0, 0.7)
        for chunk in CHUNKS
        for with_entropy in (False, True)
    }


# 25 rows: even shards. 32: the second is padded. 64: the second holds nothing but padding.
@pytest.mark.parametrize(("tensor", "num_rows"), [(1, 50), (1, 64), (2, 25), (2, 32), (2, 64)])
def test_values_and_gradients(tensor, num_rows):
    ranks = run_ranks(tensor, _all_cases, num_rows, tensor)
    for (temperature, _, with_entropy), first in ranks[0].items():
        case = (temperature, _, with_entropy)
        logprobs, entropy, grad_hidden, grad_weight = _expected(temperature, with_entropy)
        for result in (rank[case] for rank in ranks):
            torch.testing.assert_close(result[0].double(), logprobs, **LOGPROBS_FLOAT32)
            torch.testing.assert_close(result[1].double(), entropy, **LOGPROBS_FLOAT32)
            torch.testing.assert_close(result[2].double(), grad_hidden, **LOGPROBS_FLOAT32)
        whole = torch.cat([rank[case][3] for rank in ranks])
        torch.testing.assert_close(whole[:VOCAB].double(), grad_weight, **LOGPROBS_FLOAT32)
        assert not whole[VOCAB:].any(), "padding rows got a gradient"
        assert torch.equal(first[0], ranks[-1][case][0]), "tensor-parallel ranks disagree"


def test_bf16_head_rounds_logits_once():
    """Logits are BF16, as in the engine; all later steps are FP32."""
    hidden, weight, targets, *_ = _problem()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    shard = HeadShard.of(num_rows=VOCAB, vocab_size=VOCAB, temperature=0.7, chunk_tokens=4, group=None)
    logprobs, entropy = token_logprobs(hidden, weight, targets, shard)
    log_p = torch.log_softmax((hidden @ weight.t()).double() / 0.7, dim=-1)
    torch.testing.assert_close(logprobs.double(), log_p.gather(1, targets[:, None])[:, 0], **LOGPROBS_FLOAT32)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), **LOGPROBS_FLOAT32)


def test_refuses_temperature_zero():
    with pytest.raises(ValueError, match="temperature above 0"):
        HeadShard.of(num_rows=8, vocab_size=8, temperature=0.0, chunk_tokens=4, group=None)


def _gathered():
    parallel = Parallel.init(ParallelConfig(world_size=2, context=2), deadline_s=60)
    cu_seqlens = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    parts = [zigzag_indices(cu_seqlens, 2, rank) for rank in range(2)]
    packed = torch.arange(24.0)
    own = packed[parts[parallel.cp_rank]].clone().requires_grad_()
    gathered = gather_context(own, torch.cat(parts), parallel.cp_group)
    (gathered * torch.arange(24.0).square()).sum().backward()
    return [part.tolist() for part in parts], gathered.detach(), own.grad


def test_context_gather_follows_the_zigzag():
    for rank, (parts, gathered, grad) in enumerate(run_ranks(2, _gathered)):
        # Written out by hand: sequences of 8, 4 and 12 tokens in four chunks each; rank 0 holds the outer two.
        assert parts[0] == [0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23]
        assert parts[1] == [2, 3, 4, 5, 9, 10, 15, 16, 17, 18, 19, 20]
        assert torch.equal(gathered, torch.arange(24.0))
        assert torch.equal(grad, torch.tensor(parts[rank]).float().square())


def test_context_refuses_lengths_that_do_not_divide():
    with pytest.raises(ValueError, match="multiples"):
        zigzag_indices(torch.tensor([0, 6, 12]), 2, 0)


KEPT_VOCAB = 200  # a mask has 7 words
KEPT = [{4}, {0, 150}, set(range(7)), set(range(100, 200)), set(range(200)) - {77}, None, {199}, {99, 100, 30}]


def _kept_problem():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (len(KEPT), KEPT_VOCAB))
    are_kept = np.array([[kept is None or v in kept for v in range(224)] for kept in KEPT])
    kept = KeptEntries.from_bits(np.packbits(are_kept, axis=1, bitorder="little"), KEPT_VOCAB)
    targets = torch.tensor([max(kept or {KEPT_VOCAB - 1}) for kept in KEPT])
    are_kept[:, KEPT_VOCAB:] = False
    return hidden.bfloat16(), weight.bfloat16(), targets, kept, torch.from_numpy(are_kept[:, :KEPT_VOCAB])


def _kept_cases(num_rows: int, tensor: int):
    import torch.distributed as dist

    if tensor > 1:
        dist.init_process_group("gloo")
    group, rank = (dist.group.WORLD, dist.get_rank()) if tensor > 1 else (None, 0)
    hidden, weight, targets, kept, _ = _kept_problem()
    padded = torch.full((num_rows * tensor, HIDDEN), 100.0, dtype=torch.bfloat16)
    padded[:KEPT_VOCAB] = weight
    results = {}
    for temperature in (1.0, 0.7):
        for chunk in (3, len(KEPT)):
            shard = HeadShard.of(
                num_rows=num_rows, vocab_size=KEPT_VOCAB, temperature=temperature, chunk_tokens=chunk, group=group
            )
            x = hidden.clone().requires_grad_()
            w = padded[rank * num_rows : (rank + 1) * num_rows].clone().requires_grad_()
            logprobs, entropy = token_logprobs(x, w, targets, shard, kept)
            (logprobs.sum() + entropy.sum()).backward()
            results[temperature, chunk] = logprobs.detach(), entropy.detach(), w.grad
    return results


@pytest.mark.parametrize(("tensor", "num_rows"), [(1, 200), (2, 100), (2, 104), (2, 208)])
def test_kept_entries_are_the_whole_distribution(tensor, num_rows):
    """Bits of the engine's function over logits that are -inf for dropped entries, on one rank and on two."""
    hidden, weight, targets, _, are_kept = _kept_problem()
    ranks = run_ranks(tensor, _kept_cases, num_rows, tensor)
    for temperature, chunk in ranks[0]:
        processed = float64.matmul(hidden, weight.t()).float().div(temperature).masked_fill(~are_kept, -torch.inf)
        engine = exact_logprobs.token_logprobs(processed, targets[:, None])[:, 0]
        w = weight.double().requires_grad_()
        logits = (hidden.double() @ w.t()).div(temperature).masked_fill(~are_kept, -1e300)
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, targets[:, None]).sum() + entropy.sum()).backward()
        for result in (rank[temperature, chunk] for rank in ranks):
            assert result[0].tolist() == engine.tolist()
            torch.testing.assert_close(result[1].double(), entropy.detach(), rtol=2e-2, atol=2e-2)  # BF16 logits
        actual = torch.cat([rank[temperature, chunk][2] for rank in ranks])[:KEPT_VOCAB].double()
        assert (actual - w.grad).norm() < 2e-2 * w.grad.norm()
