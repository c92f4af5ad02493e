"""The divergence from a teacher: values and gradients against float64, over vocabulary shards, without whole logits."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.trainer import divergence as module
from megatron_fp8rl.trainer.divergence import divergence, most_likely
from megatron_fp8rl.trainer.logprobs import HeadShard
from megatron_fp8rl.types import Taught
from tests.helpers.dist import run_ranks

N, H, TEMPERATURE = 11, 16, 0.7


def _inputs(vocab_size: int) -> tuple[torch.Tensor, ...]:
    """float64: student's states and head, teacher's states and head, and weights of the tokens in a loss."""
    draw = torch.Generator().manual_seed(3)
    shapes = ((N, H), (vocab_size, H), (N, 2 * H), (vocab_size, 2 * H), (N,))
    return tuple(torch.randn(shape, generator=draw).double() * 0.4 for shape in shapes)


def _kept(vocab_size: int) -> KeptEntries:
    bits = np.zeros((N, 4 * -(-vocab_size // 32)), np.uint8)
    bits[:, 0] = 0b10110111
    bits[4:] = 255
    return KeptEntries.from_bits(bits, vocab_size)


def _reference(vocab_size: int, top_k: int, truncates: bool) -> tuple[torch.Tensor, ...]:
    """float64 by autograd: divergences, gradients of states and head, the teacher's most likely log-probabilities."""
    hidden, weight, teacher_hidden, teacher_weight, shares = _inputs(vocab_size)
    hidden.requires_grad_()
    weight.requires_grad_()
    dropped = torch.zeros(N, vocab_size, dtype=torch.bool)
    if truncates:
        dropped[:4] = torch.tensor([v not in (0, 1, 2, 4, 5, 7) for v in range(vocab_size)])
    p, q = (
        (states @ head.t() / TEMPERATURE).masked_fill(dropped, -1e30).log_softmax(-1)
        for states, head in ((hidden, weight), (teacher_hidden, teacher_weight))
    )
    best = q.topk(top_k or 1)
    if top_k:
        rest = [(1 - x.gather(1, best.indices).exp().sum(-1, keepdim=True)).clamp(min=1e-6).log() for x in (p, q)]
        p, q = (torch.cat([x.gather(1, best.indices), r], dim=1) for x, r in zip((p, q), rest, strict=True))
    value = (p.exp() * (p - q)).sum(-1)
    (value * shares).sum().backward()
    return value.detach(), hidden.grad, weight.grad, best.values


def _measured(vocab_size: int, num_rows: int, top_k: int, truncates: bool) -> tuple[torch.Tensor, ...]:
    if dist.get_world_size() == 1:
        group, rank = None, 0
    else:
        group, rank = dist.group.WORLD, dist.get_rank()
    rows = slice(rank * num_rows, (rank + 1) * num_rows)

    def shard_of(head: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([head, torch.full((64, head.shape[1]), 9.0, dtype=head.dtype)])
        return padded[rows].float().clone()

    hidden, weight, teacher_hidden, teacher_weight, shares = _inputs(vocab_size)
    hidden, mine = hidden.float().requires_grad_(), shard_of(weight).requires_grad_()
    shard = HeadShard.of(num_rows=num_rows, vocab_size=vocab_size, temperature=TEMPERATURE, chunk_tokens=4, group=group)
    kept, here = _kept(vocab_size) if truncates else None, torch.arange(N)
    ids, logprobs = most_likely(teacher_hidden.float(), shard_of(teacher_weight), top_k or 1, shard, kept)
    if top_k:
        taught = Taught(positions_n=here, ids_nK=ids, logprobs_nK=logprobs)
    else:
        taught = Taught(positions_n=here, hidden_nH=teacher_hidden.float(), head=shard_of(teacher_weight))
    value = divergence(hidden, mine, taught, shard, kept)
    (value * shares.float()).sum().backward()
    return value.detach(), hidden.grad, mine.grad, logprobs


def _start_and_measure(*cases: tuple) -> list[tuple[torch.Tensor, ...]]:
    dist.init_process_group("gloo")
    return [_measured(*case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_and_gradients_equal_float64(world_size: int):
    cases = [(vocab, top_k, truncates) for vocab in (20, 37) for top_k in (0, 5) for truncates in (False, True)]
    num_rows = 24 if world_size == 2 else 48  # one of two shards has padding, or nothing else
    ranks = run_ranks(world_size, _start_and_measure, *((v, num_rows, *rest) for v, *rest in cases))
    for case, *parts in zip(cases, *ranks, strict=True):
        value, grad_hidden, grad_weight, best = _reference(*case)
        for rank in parts:
            torch.testing.assert_close(rank[0].double(), value, atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(rank[3].double(), best, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(sum(rank[1] for rank in parts).double(), grad_hidden, atol=2e-6, rtol=1e-4)
        grads = torch.cat([rank[2] for rank in parts]).double()
        torch.testing.assert_close(grads[: len(grad_weight)], grad_weight, atol=2e-6, rtol=1e-4)
        assert not grads[len(grad_weight) :].any()


@pytest.mark.parametrize("top_k", [0, 8])
def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch, top_k: int):
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 16)
    num, vocab_size, sizes = 256, 512, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor))
            return out

    hidden, head = torch.randn(num, 8, requires_grad=True), torch.randn(vocab_size, 8, requires_grad=True)
    shard = HeadShard.of(num_rows=vocab_size, vocab_size=vocab_size, temperature=1.0, chunk_tokens=8192, group=None)
    with Watch():
        states, positions = torch.randn(num, 8), torch.arange(num)
        taught = Taught(positions_n=positions, hidden_nH=states, head=head.detach() * 2)
        if top_k:
            ids, logprobs = most_likely(states, head.detach(), top_k, shard)
            taught = Taught(positions_n=positions, ids_nK=ids, logprobs_nK=logprobs)
        divergence(hidden, head, taught, shard).sum().backward()
    assert max(sizes) == 16 * vocab_size and hidden.grad.abs().max() > 0


def test_fewer_tokens_give_a_smaller_divergence():
    hidden, weight, teacher_hidden, teacher_weight, _ = (x.float() for x in _inputs(37))
    shard = HeadShard.of(num_rows=37, vocab_size=37, temperature=1.0, chunk_tokens=64, group=None)
    positions, values = torch.arange(N), []
    for top_k in (1, 4, 16, 36):
        ids, logprobs = most_likely(teacher_hidden, teacher_weight, top_k, shard)
        taught = Taught(positions_n=positions, ids_nK=ids, logprobs_nK=logprobs)
        values.append(divergence(hidden, weight, taught, shard))
    values.append(
        divergence(hidden, weight, Taught(positions_n=positions, hidden_nH=teacher_hidden, head=teacher_weight), shard)
    )
    for smaller, larger in itertools.pairwise(values):
        assert (larger >= smaller - 1e-5).all() and (smaller >= 0).all()
    torch.testing.assert_close(values[-1], values[-2], atol=1e-5, rtol=1e-4)  # one other token is all others together
