"""Reverse KL divergence from a teacher at each loss token, chunkwise from the last hidden states of both models.

In: hidden states and vocabulary shard of the student's head on the ranks of the last pipeline stage, and a
:class:`Taught`. Out: FP32 divergences, equal on all tensor-parallel ranks, with gradients for the student. With student
p and teacher q at the sampling temperature, over the kept entries if sampling truncates:

    full     sum_v p(v) log(p(v) / q(v)) over the vocabulary; the teacher's logits are computed here from its states
    top k    the same over k + 1 outcomes: the teacher's k most likely tokens, and all others together. At most the full
             divergence (data-processing inequality), and 0 only if all k + 1 probabilities are equal

The gradient with respect to a logit is ``p(v) * (log ratio of its outcome - divergence) / temperature``. No pass
keeps logits: forward and backward compute them for ``_CHUNK_TOKENS`` tokens at a time. On GPUs only ``full`` was
measured.

Shapes: N = tokens, n = tokens of a chunk, H = hidden size, V = vocabulary rows of this rank, K = most likely tokens.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.exact_logprobs import divided
from megatron_fp8rl.trainer.logprobs import HeadShard, _add_product, _chunk_statistics, _chunks, _owned, keep_only
from megatron_fp8rl.trainer.optimizer.grad_buffers import add_gradient
from megatron_fp8rl.types import Taught

_CHUNK_TOKENS = 1024  # at most; about five FP32 values for each of their logits exist at a time
_LEAST_REST = 1e-6  # probability of all other tokens together, below which rounding errors decide


def divergence(
    hidden_NH: Tensor, weight_VH: Tensor, taught: Taught, shard: HeadShard, kept: KeptEntries | None = None
) -> Tensor:
    """Collective over ``shard.group``: KL(student || teacher) at each token, FP32 [N] in nats, with gradients for
    ``hidden_NH`` and ``weight_VH`` as :func:`token_logprobs` has them. ``taught`` has N positions."""
    return _Divergence.apply(hidden_NH, weight_VH, taught, shard, kept)


@torch.no_grad()
def most_likely(
    hidden_NH: Tensor, weight_VH: Tensor, num: int, shard: HeadShard, kept: KeptEntries | None = None
) -> tuple[Tensor, Tensor]:
    """Collective over ``shard.group``: ids int64 and log-probabilities FP32, [N, num] each, of the most likely tokens,
    equal on all ranks."""
    ids_NK = torch.zeros((hidden_NH.shape[0], num), dtype=torch.int64, device=hidden_NH.device)
    logprobs_NK = torch.full(ids_NK.shape, -torch.inf, device=hidden_NH.device)
    for chunk in _chunks_of(hidden_NH, shard):
        log_q_nV = _log_softmax(hidden_NH[chunk], weight_VH, shard, _part(kept, chunk))
        best = log_q_nV.topk(min(num, log_q_nV.shape[1]))
        logprobs_NK[chunk, : best.values.shape[1]] = best.values
        ids_NK[chunk, : best.values.shape[1]] = best.indices + shard.first_token
        if shard.group is not None:
            pairs = [[torch.empty_like(x[chunk]) for _ in range(shard.group.size())] for x in (ids_NK, logprobs_NK)]
            for parts, mine in zip(pairs, (ids_NK, logprobs_NK), strict=True):
                dist.all_gather(parts, mine[chunk].contiguous(), group=shard.group)
            ids, values = (torch.cat(parts, dim=1) for parts in pairs)
            best = values.topk(num)
            logprobs_NK[chunk], ids_NK[chunk] = best.values, ids.gather(1, best.indices)
    return ids_NK, logprobs_NK


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH: Tensor, weight_VH: Tensor, taught: Taught, shard: HeadShard, kept: KeptEntries | None):
        ctx.save_for_backward(hidden_NH, weight_VH)
        ctx.rest = (taught, shard, kept)
        value_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=torch.float32)
        for chunk in _chunks_of(hidden_NH, shard):
            value_N[chunk], _, _ = _of_chunk(chunk, hidden_NH, weight_VH, *ctx.rest)
        return value_N

    @staticmethod
    def backward(ctx, grad_N: Tensor):
        hidden_NH, weight_VH = ctx.saved_tensors
        taught, shard, kept = ctx.rest
        rows_VH, grad_hidden_NH = weight_VH[: shard.num_tokens], torch.empty_like(hidden_NH)

        def run(grad_weight_VH: Tensor | None) -> None:
            for chunk in _chunks_of(hidden_NH, shard):
                value_n, p_nV, log_ratio_nV = _of_chunk(chunk, hidden_NH, weight_VH, taught, shard, kept)
                p_nV.mul_(log_ratio_nV.sub_(value_n[:, None])).mul_(grad_N[chunk, None] / shard.temperature)
                grad_logits = p_nV.to(hidden_NH.dtype)
                torch.mm(grad_logits, rows_VH, out=grad_hidden_NH[chunk])
                if grad_weight_VH is not None:
                    _add_product(grad_weight_VH[: shard.num_tokens], grad_logits.t(), hidden_NH[chunk])
                del p_nV, log_ratio_nV, grad_logits  # before the next chunk's are there

        if ctx.needs_input_grad[1]:
            return grad_hidden_NH, add_gradient(weight_VH, run, is_shared=shard.is_shared), None, None, None
        run(None)
        return grad_hidden_NH, None, None, None, None


def _of_chunk(
    chunk: slice, hidden_NH: Tensor, weight_VH: Tensor, taught: Taught, shard: HeadShard, kept: KeptEntries | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence [n], p [n, V], log(p / q) of the outcome of each vocabulary entry [n, V]), FP32."""
    kept = _part(kept, chunk)
    log_p_nV = _log_softmax(hidden_NH[chunk], weight_VH, shard, kept)
    if taught.head is not None:
        log_q_nV = _log_softmax(taught.hidden_nH[chunk], taught.head, shard, kept)
        log_ratio_nV = torch.sub(log_p_nV, log_q_nV, out=log_q_nV)
        p_nV = log_p_nV.exp_()
        value_n = (p_nV * log_ratio_nV).sum(-1)
        if shard.group is not None:
            dist.all_reduce(value_n, group=shard.group)
        return value_n, p_nV, log_ratio_nV
    local_nK, owned_nK = _owned(taught.ids_nK[chunk], shard)
    log_p_nK = log_p_nV.new_zeros(local_nK.shape)
    if shard.num_tokens:
        log_p_nK = log_p_nV.gather(1, local_nK).masked_fill_(~owned_nK, 0.0)
    if shard.group is not None:
        dist.all_reduce(log_p_nK, group=shard.group)
    log_p_nO = _with_rest(log_p_nK)
    log_ratio_nO = log_p_nO - _with_rest(taught.logprobs_nK[chunk])
    value_n = (log_p_nO.exp() * log_ratio_nO).sum(-1)
    log_ratio_nV = log_ratio_nO[:, -1:].repeat(1, log_p_nV.shape[1])
    rows_nK = torch.arange(len(local_nK), device=local_nK.device)[:, None].expand_as(local_nK)
    log_ratio_nV[rows_nK[owned_nK], local_nK[owned_nK]] = log_ratio_nO[:, :-1][owned_nK]
    return value_n, log_p_nV.exp_(), log_ratio_nV


def _with_rest(logprobs_nK: Tensor) -> Tensor:
    """Log-probabilities of K tokens and of all others together, FP32 [n, K + 1]."""
    rest_n1 = (1 - logprobs_nK.double().exp().sum(-1, keepdim=True)).clamp_(min=_LEAST_REST)
    return torch.cat([logprobs_nK, rest_n1.log_().float()], dim=1)


def _log_softmax(hidden_nH: Tensor, weight_VH: Tensor, shard: HeadShard, kept: KeptEntries | None) -> Tensor:
    """Collective: log-probabilities of this shard's tokens, FP32 [n, V], normalized over all shards."""
    logits = float64.matmul(hidden_nH, weight_VH[: shard.num_tokens].t()) if shard.num_tokens else None
    if kept is not None and logits is not None:
        keep_only(logits, kept, shard.first_token)
    nowhere_n = torch.zeros(hidden_nH.shape[0], dtype=torch.int64, device=hidden_nH.device)
    _, _, log_norm_n = _chunk_statistics(logits, hidden_nH, nowhere_n, shard)
    if logits is None:
        return hidden_nH.new_empty((hidden_nH.shape[0], 0), dtype=torch.float32)
    return divided(logits, shard.temperature).sub_(log_norm_n[:, None])


def _part(kept: KeptEntries | None, chunk: slice) -> KeptEntries | None:
    return None if kept is None else kept[chunk]


def _chunks_of(hidden_NH: Tensor, shard: HeadShard) -> list[slice]:
    return _chunks(hidden_NH.shape[0], min(shard.chunk_tokens, _CHUNK_TOKENS))
